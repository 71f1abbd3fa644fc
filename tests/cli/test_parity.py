"""wcache verify --against: whatever a model of the state would show otherwise is named, and nothing else."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.cli.commands import Wcache
from tests.modules.random_modules import build
from wcache_async import Client, Daemon
from wcache_async.cli.compare import Comparison
from wcache_async.cli.parity import Attached, compare_exactly, structural_differences
from wcache_async.manifest import Kind, ModuleRecord, StateSpec, TensorSpec, WrappedTensor
from wcache_async.sources.base import Source
from wcache_async.sources.module import ModuleSource

replace = msgspec.structs.replace

SPEC = StateSpec(
    storages=(64, 64, 64),
    tensors=(
        TensorSpec(name="a", dtype="float32", shape=(4, 4), storage=0),
        TensorSpec(name="b", dtype="float32", shape=(4, 4), storage=1, kind=Kind.BUFFER),
        TensorSpec(name="c", dtype="float32", shape=(2, 4), storage=2, requires_grad=True),
        TensorSpec(name="d", dtype="float32", shape=(2, 4), storage=2, offset=32),
        TensorSpec(name="e", dtype="float32", shape=(0, 4), storage=2, offset=32),
    ),
    aliases={"f": "a"},
    module=ModuleRecord(wrapped={"w": WrappedTensor(type="T", kind=Kind.PARAMETER)}),
)


def with_tensor(name: str, **changes: object) -> StateSpec:
    tensors = tuple(replace(tensor, **changes) if tensor.name == name else tensor for tensor in SPEC.tensors)
    return replace(SPEC, tensors=tensors)


def structure(theirs: StateSpec, ours: StateSpec = SPEC) -> list[tuple[str, str, str, str]]:
    return [(d.tensor, d.what, d.checkpoint, d.client) for d in structural_differences(ours, theirs)]


# ----------------------------------------------------------------------------------- structure
@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (SPEC, []),
        (with_tensor("b", kind=Kind.NON_PERSISTENT_BUFFER), [("b", "persistence", "buffer", "non persistent buffer")]),
        (with_tensor("b", kind=Kind.PARAMETER), [("b", "kind", "buffer", "parameter")]),
        (with_tensor("b", kind=Kind.ATTRIBUTE), [("b", "kind", "buffer", "attribute")]),
        (
            with_tensor("a", kind=Kind.BUFFER),
            [("a", "kind", "parameter", "buffer"), ("f", "kind", "parameter", "buffer")],
        ),
        (with_tensor("b", stride=(1, 4)), [("b", "stride", "[4, 1]", "[1, 4]")]),
        (with_tensor("b", stride=(4, 1)), []),
        (with_tensor("c", requires_grad=False), [("c", "requires_grad", "True", "False")]),
        (
            replace(SPEC, aliases={"f": "b"}),
            [
                ("a", "ties", "f", "none"),
                ("b", "ties", "none", "f"),
                ("f", "kind", "parameter", "buffer"),
                ("f", "ties", "a", "b"),
            ],
        ),
        (
            with_tensor("d", storage=1, offset=0),
            [
                ("b", "storage", "none", "+0 bytes from b"),
                ("c", "storage", "+0 bytes from c", "none"),
                ("d", "storage", "+32 bytes from c", "+0 bytes from b"),
            ],
        ),
        (with_tensor("d", offset=16), [("d", "storage", "+32 bytes from c", "+16 bytes from c")]),
        (with_tensor("e", storage=0, offset=0), []),
        (
            replace(SPEC, module=ModuleRecord(wrapped={"w": WrappedTensor(type="U", kind=Kind.PARAMETER)})),
            [("w", "wrapped", '{"type":"T","kind":0}', '{"type":"U","kind":0}')],
        ),
        (replace(SPEC, module=None), [("w", "wrapped", '{"type":"T","kind":0}', "none")]),
        (
            replace(SPEC, module=replace(SPEC.module or ModuleRecord(), alias_kinds={"f": Kind.ATTRIBUTE})),
            [("f", "kind", "parameter", "attribute")],
        ),
    ],
)
def test_what_differs_in_structure_is_named(theirs: StateSpec, expected: list[tuple[str, str, str, str]]) -> None:
    assert structure(theirs) == expected


def test_which_name_of_a_tie_is_first_and_how_storages_are_numbered_is_nothing() -> None:
    a, b, c, d, e = SPEC.tensors
    other = StateSpec(
        storages=(64, 64, 128),
        tensors=(
            replace(e, storage=0),
            replace(d, offset=96),
            replace(c, offset=64),
            replace(b, storage=0),
            replace(a, name="f", storage=1),
        ),
        aliases={"a": "f"},
        module=SPEC.module,
    )
    assert structure(other) == []


def test_names_that_one_side_lacks_make_no_difference_of_the_others() -> None:
    """They are told as missing or unexpected, by the comparison of bytes."""
    fewer = replace(SPEC, tensors=SPEC.tensors[1:3], aliases={})
    assert structure(fewer) == []
    assert structure(SPEC, fewer) == []


# ------------------------------------------------------------------------------- whole states
async def attached_to(daemon: Daemon, name: str, compare: Callable[[Attached], Comparison]) -> Comparison:
    async with Client(daemon.socket_path) as client:
        state = await client.fetch_state(name)
        seen = Attached(
            manifest=state.manifest,
            tensors=await state.import_tensors(),
            digest=state.digest,
            digests=await state.fetch_digests(),
        )
        return compare(seen)


def rows(comparison: Comparison) -> list[tuple[str, str]]:
    return [(difference.tensor, difference.what) for difference in comparison.differences]


def against(source: Source) -> Callable[[Attached], Comparison]:
    def compare(seen: Attached) -> Comparison:
        with source:
            return compare_exactly(source, seen, lambda *_: None)

    return compare


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
async def test_random_modules_equal_themselves(short_tmp: Path) -> None:
    async with Daemon(short_tmp / "s") as daemon:
        for seed in range(25):
            await daemon.load(ModuleSource(lambda seed=seed: build(seed)), name=f"m{seed}")  # type: ignore[misc]
            found = await attached_to(
                daemon,
                f"m{seed}",
                against(ModuleSource(lambda seed=seed: build(seed))),  # type: ignore[misc]
            )
            assert rows(found) == [], seed


class Model(nn.Module):
    """A tied weight, a buffer, a view, a strided weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(6, 4))
        self.b = self.a
        self.t = nn.Parameter(torch.randn(5, 3).t())
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("rows", self.a.detach()[2:4], persistent=False)


def untied(model: Model) -> None:
    model.b = nn.Parameter(model.a.detach().clone())


def persistent(model: Model) -> None:
    model.register_buffer("rows", model.get_buffer("rows"), persistent=True)


def contiguous(model: Model) -> None:
    model.t = nn.Parameter(model.t.detach().contiguous())


def other_byte(model: Model) -> None:
    model.get_buffer("mask")[3] = 2


def parted(model: Model) -> None:
    model.register_buffer("rows", model.get_buffer("rows").clone(), persistent=False)


def frozen(model: Model) -> None:
    model.t.requires_grad_(False)


def longer(model: Model) -> None:
    model.register_buffer("mask", torch.ones(5))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (untied, [("a", "ties"), ("b", "ties"), ("b", "storage")]),
        (persistent, [("rows", "persistence")]),
        (contiguous, [("t", "stride")]),
        (other_byte, [("mask", "bytes"), ("mask", "digest")]),
        (parted, [("a", "storage"), ("b", "storage"), ("rows", "storage")]),
        (frozen, [("t", "requires_grad")]),
        (longer, [("mask", "shape")]),
    ],
)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_each_kind_of_loss_is_named(
    short_tmp: Path, change: Callable[[Model], None], expected: list[tuple[str, str]]
) -> None:
    """What caches of weights have lost elsewhere: ties, persistence, strides, views."""

    def changed() -> Model:
        model = Model()
        change(model)
        return model

    async with Daemon(short_tmp / "s") as daemon:
        await daemon.load(ModuleSource(changed), name="m")
        found = await attached_to(daemon, "m", against(ModuleSource(Model)))
    assert sorted(rows(found)) == sorted(expected)


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_daemon_that_tells_a_wrong_digest_or_none_is_found_out(short_tmp: Path) -> None:
    async with Daemon(short_tmp / "s") as daemon:
        await daemon.load(ModuleSource(Model), name="m")

        def lying(seen: Attached) -> Comparison:
            wrong = Attached(
                manifest=seen.manifest, tensors=seen.tensors, digest="0" * 32, digests=dict(seen.digests, t="0" * 32)
            )
            return against(ModuleSource(Model))(wrong)

        def silent(seen: Attached) -> Comparison:
            none = Attached(manifest=seen.manifest, tensors=seen.tensors, digest="", digests={})
            return against(ModuleSource(Model))(none)

        (difference,) = (await attached_to(daemon, "m", lying)).differences
        assert (difference.tensor, difference.what, difference.client) == ("t", "digest", "0" * 32)
        (difference,) = (await attached_to(daemon, "m", silent)).differences
        assert (difference.tensor, difference.what, difference.client) == ("(state)", "digest", "not known")


# ------------------------------------------------------------------------------- command line
def test_a_state_equals_its_checkpoint_exactly(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint):
        ran = wcache("verify", "--against", checkpoint)
        told = wcache("verify", "--name", "tiny", "--against", checkpoint, "--source", "safetensors", "--json").json
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        f"tiny:0 generation 1 through shm_fd equals {checkpoint}: 4 tensors, 3.00 KiB, "
        "every byte, layout, tie and digest\n"
    )
    assert (told["equal"], told["differences"]) == (True, [])
    assert len(told["digest"]) == 32


def test_differences_are_a_table_and_exit_code_1(
    wcache: Wcache, checkpoint: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    other = {**tensors, "scale": torch.tensor(4.0)}
    torch.save({**other, "embed.weight": other["embed.weight"].t().contiguous().t()}, tmp_path / "other.pt")
    with wcache.serve(checkpoint):
        ran = wcache("verify", "--name", "tiny", "--against", tmp_path / "other.pt")
        told = wcache("verify", "--name", "tiny", "--against", tmp_path / "other.pt", "--json")
    assert ran.code == told.code == 1
    lines = ran.out.splitlines()
    assert lines[0].startswith("tiny:0 generation 1 through shm_fd differs from ")
    assert "in 3 respects, of 4 tensors" in lines[0]
    cells = [line.split() for line in lines[1:]]
    assert cells[0] == ["TENSOR", "WHAT", "CHECKPOINT", "CLIENT"]
    assert cells[1] == ["embed.weight", "stride", "[1,", "40]", "[16,", "1]"]
    assert cells[2] == ["scale", "bytes", "at", "byte", "2", "0x80", "0x40"]
    assert cells[3][:2] == ["scale", "digest"]
    found = {(each["tensor"], each["what"]) for each in told.json["differences"]}
    assert found == {("embed.weight", "stride"), ("scale", "bytes"), ("scale", "digest")}


@pytest.mark.parametrize("argv", [[], ["MODEL", "--against", "MODEL"]])
def test_one_model_is_to_be_given(wcache: Wcache, argv: list[str]) -> None:
    ran = wcache("verify", *argv)
    assert ran.code == 2
    assert "give one of MODEL and --against MODEL" in ran.err


def test_a_transformers_model_is_loaded_as_serve_would_and_compared(wcache: Wcache, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs `pip install wcache-async[transformers]`")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    how = ("--source", "transformers", "--dtype", "bfloat16", "--option", "attn_implementation=eager")
    with wcache.serve(folder, *how):
        ran = wcache("verify", "--against", folder, *how)
        raw = wcache("verify", "--against", folder, "--json")
    assert ran.code == 0, ran.out
    assert "every byte, layout, tie and digest" in ran.out
    assert raw.code == 1
    assert {each["what"] for each in raw.json["differences"]} == {"dtype", "requires_grad", "unexpected"}


def test_overwritten_bytes_are_found_although_the_files_are_known_to_have_changed(
    wcache: Wcache, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    with wcache.serve(checkpoint):
        save_file({**tensors, "scale": torch.tensor(4.0)}, checkpoint)
        ran = wcache("verify", "--against", checkpoint, "--json")
        fetched = wcache("fetch", "tiny", "--json")
        allowed = wcache("fetch", "tiny", "--allow-stale", "--json")
        status = wcache("status")
    assert ran.code == 1
    assert {(each["tensor"], each["what"]) for each in ran.json["differences"]} == {
        ("scale", "bytes"),
        ("scale", "digest"),
    }
    assert fetched.code == 1
    assert fetched.json["error"]["code"] == "stale_state"
    assert fetched.json["error"]["details"]["path"] == str(checkpoint)
    assert allowed.code == 0
    assert allowed.json["digest"] == ran.json["digest"]
    assert "tiny:0: the files it was loaded from have changed since" in status.out
