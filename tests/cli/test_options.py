"""What users write on the command line, and what it comes to."""

from pathlib import Path

import pytest
import typer

from wcache_async.cli.options import Scalar, model_name, parse_items, split_model


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-1", -1),
        ("1e3", 1000.0),
        ("0.5", 0.5),
        ("true", True),
        ("false", False),
        ("null", None),
        ("bfloat16", "bfloat16"),
        ("007", "007"),
        ('"4"', "4"),
        ("", ""),
        ("a=b", "a=b"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("[1]", "[1]"),
        ("{", "{"),
        ("[" * 100_000, "[" * 100_000),
        ("18446744073709551615", 2**64 - 1),
    ],
)
def test_values_are_typed_as_json_reads_them_and_text_otherwise(text: str, value: Scalar) -> None:
    (parsed,) = parse_items([f"key={text}"], "--config").values()
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize("item", ["key", "=1", "", "key=18446744073709551616"])
def test_what_is_no_item_is_refused(item: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_items([item], "--config")


def test_names_come_from_files_without_their_suffix_and_from_folders_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    assert model_name(str(folder)) == model_name(f"{folder}/") == "Llama-3.1-8B"
    assert model_name("/models/tiny.safetensors") == "tiny"
    assert model_name("/models/model.safetensors.index.json") == "model"
    assert model_name("/models/checkpoint.v2.pt") == "checkpoint.v2"
    monkeypatch.chdir(folder)
    assert model_name(".") == "Llama-3.1-8B"


def test_a_path_that_exists_is_one_even_with_an_equals_sign(tmp_path: Path) -> None:
    odd = tmp_path / "a=b.pt"
    assert split_model(str(odd)) == (f"{tmp_path}/a", "b.pt")
    odd.touch()
    assert split_model(str(odd)) == ("a=b", str(odd))
    assert split_model(f"meta-llama/Llama={odd}") == ("meta-llama/Llama", str(odd))
