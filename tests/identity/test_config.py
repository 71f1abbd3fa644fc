"""Standard fields of a config: the same for the same, whoever computes them, and open to more."""

import json

import pytest
import torch

import wcache_async
from wcache_async.identity.config import device_capability, quantization_hash, standard_config

INT8 = {"quant_method": "torchao", "bits": 8, "skip": ["lm_head"], "nested": {"b": 1, "a": None}}


def test_it_has_the_standard_fields_and_whatever_more_is_given() -> None:
    assert standard_config(dtype=torch.bfloat16, quantization=INT8, tp_size=2, revision="main") == {
        "torch_version": torch.__version__,
        "device_capability": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "dtype": "bfloat16",
        "quantization_hash": quantization_hash(INT8),
        "tp_size": 2,
        "revision": "main",
    }


def test_a_dtype_may_be_given_by_name_or_not_at_all() -> None:
    assert standard_config(dtype="float16") == standard_config(dtype=torch.float16)
    assert "dtype" not in standard_config()
    assert standard_config()["quantization_hash"] == ""


def test_further_fields_take_the_place_of_standard_ones() -> None:
    assert standard_config(torch_version="2")["torch_version"] == "2"


def test_it_is_a_public_name() -> None:
    assert wcache_async.standard_config is standard_config


def test_a_gpus_capability_is_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    assert device_capability("cuda:1") == "cuda 9.0"
    assert asked == [torch.device("cuda:1")]
    assert device_capability("meta") == "meta"


def test_a_quantization_hash_is_the_same_for_every_way_to_write_it() -> None:
    backwards = dict(reversed(INT8.items()))
    written = json.dumps(backwards, indent=3)

    class Config:
        def to_dict(self) -> dict[str, object]:
            return dict(INT8)

    hashes = {quantization_hash(each) for each in (INT8, backwards, written, Config())}
    assert len(hashes) == 1
    assert len(hashes.pop()) == 32


@pytest.mark.parametrize(
    "other", [{**INT8, "bits": 4}, {**INT8, "bits": "8"}, {**INT8, "more": None}, {"quant_method": "torchao"}]
)
def test_another_quantization_has_another_hash(other: dict[str, object]) -> None:
    assert quantization_hash(other) != quantization_hash(INT8)


def test_none_has_an_empty_hash() -> None:
    assert quantization_hash(None) == quantization_hash({}) == quantization_hash("") == ""


@pytest.mark.parametrize("text", ["int8", "[1]", "8"])
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"object|Expecting"):
        quantization_hash(text)


def test_transformers_own_object_has_the_hash_of_its_json() -> None:
    """What a client has as an object, the daemon is given as an option, as JSON."""
    transformers = pytest.importorskip("transformers")
    config = transformers.FineGrainedFP8Config()
    assert quantization_hash(config) == quantization_hash(config.to_json_string(use_diff=False))
