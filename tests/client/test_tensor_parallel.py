"""DTensors: what `parallelize_module` makes of a meta model takes its shards from the rank's state, and no other's."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.cli.commands import Wcache
from tests.processes import Forge
from tests.ranks import run_ranks
from wcache_async import blocking
from wcache_async.client.bind import Slot, plan
from wcache_async.errors import BindError, ModuleError
from wcache_async.manifest import Cut, Kind, StateSpec, TensorSpec, build_manifest, plan_layout


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale)  # type: ignore[no-any-return,operator]


def parallelized(model: Small, size: int = 2) -> Small:
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model


def on_meta() -> Small:
    with torch.device("meta"):
        return Small()


@pytest.fixture
def wcache(forge: Forge, short_tmp: Path) -> Wcache:
    return Wcache(forge, short_tmp / "wcache.sock")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the whole model."""
    torch.manual_seed(1)
    model = Small()
    model.scale.uniform_()  # type: ignore[operator]
    path = tmp_path / "m.safetensors"
    save_file(model.state_dict(), path)
    return path


def plan_file(folder: Path, **changes: object) -> Path:
    path = folder / f"plan-{len(changes)}.json"
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise"}
    path.write_text(json.dumps(plan | {name.replace("__", ".*."): style for name, style in changes.items()}))
    return path


def inputs() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(2))


def fetched(socket: Path, rank: int, name: str = "m") -> blocking.State:
    return blocking.fetch_state(name, rank=rank, socket_path=socket, timeout=30)


# ----------------------------------------------------------------------------- the same logits
def logits_of_a_meta_build(rank: int, socket: Path, checkpoint: Path) -> list[list[float]]:
    bound = parallelized(on_meta())
    with fetched(socket, rank) as state:
        assert (state.config["tp_size"], state.config["tp_rank"]) == (2, rank)
        state.bind(bound)
        shards = {tensor.data_ptr() for tensor in state.import_tensors().values()}
    with torch.no_grad():
        for parameter in bound.parameters():
            assert isinstance(parameter, nn.Parameter)
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            assert local.data_ptr() in shards
    loaded = Small()
    loaded.load_state_dict(load_file(checkpoint))
    loaded = parallelized(loaded)
    for (name, ours), theirs in zip(bound.named_parameters(), loaded.parameters(), strict=True):
        assert type(ours) is type(theirs), name
        assert (ours.shape, ours.stride(), ours.requires_grad) == (theirs.shape, theirs.stride(), theirs.requires_grad)
        assert getattr(ours, "placements", None) == getattr(theirs, "placements", None), name
    with torch.inference_mode():
        logits = bound(inputs())
        assert torch.equal(logits, loaded(inputs()))
    return logits.tolist()  # type: ignore[no-any-return]


def test_a_parallelized_meta_model_computes_what_one_loaded_from_disk_does(
    wcache: Wcache, forge: Forge, checkpoint: Path, tmp_path: Path
) -> None:
    with wcache.serve(checkpoint, "--tp-size", "2", "--tp-plan", plan_file(tmp_path)):
        results = run_ranks(forge, 2, tmp_path, logits_of_a_meta_build, wcache.socket_path, checkpoint)
    assert results[0] == results[1]
    whole = Small()
    whole.load_state_dict(load_file(checkpoint))
    with torch.inference_mode():
        torch.testing.assert_close(torch.tensor(results[0]), whole(inputs()))


def logits_of_a_materialised_build(rank: int, socket: Path) -> list[list[float]]:
    torch.manual_seed(3)
    bound = parallelized(Small())
    bound.head.weight.requires_grad_(False)
    with fetched(socket, rank) as state:
        state.bind(bound)
    assert not bound.head.weight.requires_grad
    with torch.inference_mode():
        return bound(inputs()).tolist()  # type: ignore[no-any-return]


def test_a_materialised_model_has_its_shards_replaced(
    wcache: Wcache, forge: Forge, checkpoint: Path, tmp_path: Path
) -> None:
    whole = Small()
    whole.load_state_dict(load_file(checkpoint))
    with wcache.serve(checkpoint, "--tp-size", "2", "--tp-plan", plan_file(tmp_path)):
        results = run_ranks(forge, 2, tmp_path, logits_of_a_materialised_build, wcache.socket_path)
    with torch.inference_mode():
        for logits in results:
            torch.testing.assert_close(torch.tensor(logits), whole(inputs()))


# -------------------------------------------------------------------------- what does not fit
def refusals(rank: int, socket: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, asked in (("m", 1 - rank), ("packed", rank), ("whole", 0)):
        model = parallelized(on_meta())
        before = {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}
        with fetched(socket, asked, name) as state, pytest.raises(BindError) as caught:
            state.bind(model)
        assert {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()} == before
        assert all(parameter.is_meta for parameter in model.parameters())
        told[name] = caught.value.mismatched
    return told


def test_the_state_of_another_rank_or_another_plan_does_not_fit(
    wcache: Wcache, forge: Forge, checkpoint: Path, tmp_path: Path
) -> None:
    """All of them have the shapes that the module wants, but for the whole one."""
    packed = plan_file(tmp_path, layers__up="packed_colwise")
    with wcache.serve(checkpoint, "--tp-size", "2", "--tp-plan", plan_file(tmp_path)):
        assert wcache("load", checkpoint, "--name", "packed", "--tp-size", "2", "--tp-plan", packed).code == 0
        assert wcache("load", checkpoint, "--name", "whole").code == 0
        told, _ = run_ranks(forge, 2, tmp_path, refusals, wcache.socket_path)
    cut = {f"layers.{n}.{name}" for n in range(2) for name in ("up.weight", "up.bias", "down.weight")} | {"head.weight"}
    assert told["m"].keys() == told["whole"].keys() == cut
    assert told["m"]["layers.1.down.weight"] == [
        "float32[8, 8], part 0 of 2 along dimension 1 of 16",
        "float32[8, 8], part 1 of 2 along dimension 1 of 16",
    ]
    assert told["packed"]["layers.0.up.bias"] == [
        "float32[8], part 0 of 2 along dimension 0 of 16",
        "float32[8], part 0 of 2 along dimension 0 of 8+8",
    ]
    assert told["packed"].keys() == {name for name in cut if ".up." in name}
    assert told["whole"]["head.weight"][1] == "float32[12, 8]"


def odd_modules(rank: int, socket: Path) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))

    def distributed(tensor: torch.Tensor, placement: Any) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(tensor, mesh, [placement], src_data_rank=None))

    told = {}
    with fetched(socket, rank) as state:
        uneven = parallelized(on_meta())
        uneven.head.weight = distributed(torch.empty(13, 8, device="meta"), Shard(0))
        with pytest.raises(ModuleError) as caught:
            state.bind(uneven)
        told[caught.value.path] = caught.value.reason

        # A DTensor that every rank has whole is one where the state has it whole.
        replicated = parallelized(on_meta())
        for layer in replicated.layers:
            layer.norm.weight = distributed(layer.norm.weight, Replicate())  # type: ignore[union-attr,arg-type]
        state.bind(replicated)
        for layer in replicated.layers:
            assert isinstance(layer.norm.weight, DTensor)  # type: ignore[union-attr]
            assert layer.norm.weight.placements == (Replicate(),)  # type: ignore[union-attr]

    # Two names of one object stay one, where the checkpoint has it once.
    tied = parallelized(on_meta())
    tied.layers[1].up.weight = tied.layers[0].up.weight  # type: ignore[union-attr]
    with fetched(socket, rank, "tied") as state:
        state.bind(tied)
    assert tied.layers[1].up.weight is tied.layers[0].up.weight  # type: ignore[union-attr]
    assert not tied.layers[1].up.weight.is_meta  # type: ignore[union-attr]
    return told


def test_distributions_of_other_kinds(wcache: Wcache, forge: Forge, checkpoint: Path, tmp_path: Path) -> None:
    once = load_file(checkpoint)
    del once["layers.1.up.weight"]
    save_file(once, tmp_path / "tied.safetensors")
    plan = plan_file(tmp_path)
    with wcache.serve(f"m={checkpoint}", tmp_path / "tied.safetensors", "--tp-size", "2", "--tp-plan", plan):
        for told in run_ranks(forge, 2, tmp_path, odd_modules, wcache.socket_path):
            assert told == {"head.weight": "its dimension 0 of 13 cannot be cut into 2 equal slices"}


# ------------------------------------------------------------------------- states of no plan's
def logits_of_own_shards(rank: int, socket: Path) -> list[list[float]]:
    bound = parallelized(on_meta())
    with fetched(socket, rank, f"rank-{rank}") as state:
        assert not state.manifest.cuts
        state.bind(bound)
    with torch.inference_mode():
        return bound(inputs()).tolist()  # type: ignore[no-any-return]


def test_a_checkpoint_of_each_ranks_own_is_bound_by_its_shapes(
    wcache: Wcache, forge: Forge, checkpoint: Path, tmp_path: Path
) -> None:
    whole = load_file(checkpoint)
    with wcache.serve():
        for rank in range(2):
            half = {
                name: torch.chunk(tensor, 2, int("down" in name))[rank].contiguous()
                if name.endswith((".up.weight", ".up.bias", ".down.weight", "head.weight"))
                else tensor
                for name, tensor in whole.items()
            }
            save_file(half, tmp_path / f"rank-{rank}.safetensors")
            assert wcache("load", tmp_path / f"rank-{rank}.safetensors", "--rank", str(rank)).code == 0
        results = run_ranks(forge, 2, tmp_path, logits_of_own_shards, wcache.socket_path)
    model = Small()
    model.load_state_dict(whole)
    with torch.inference_mode():
        torch.testing.assert_close(torch.tensor(results[1]), model(inputs()))


# -------------------------------------------------------------------------------- published
def published(rank: int, socket: Path) -> None:
    torch.manual_seed(5)  # Alike in every rank.
    model = parallelized(Small()).eval()
    model.head.weight.requires_grad_(False)
    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]
    with torch.inference_mode():
        logits = model(inputs())
    with blocking.Client(socket) as client:
        client.publish("p", model, rank=rank, rebind=True)
        with torch.inference_mode():
            assert torch.equal(model(inputs()), logits)
    torch.distributed.barrier()
    again = parallelized(on_meta())
    again.layers[1].up.weight = again.layers[0].up.weight  # type: ignore[union-attr]
    with fetched(socket, 1 - rank, "p") as other, pytest.raises(BindError, match=f"part {rank} of 2"):
        other.bind(again)
    with fetched(socket, rank, "p") as state:
        state.bind(again)
        # What the whole is of is the same, whichever rank says it.
        assert state.manifest.cuts["layers.0.down.weight"] == Cut(1, (16,), rank, 2)
        assert "layers.0.down.bias" not in state.manifest.cuts
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.requires_grad == theirs.requires_grad
    assert again.layers[1].up.weight is again.layers[0].up.weight  # type: ignore[union-attr]
    assert not again.training
    with torch.inference_mode():
        assert torch.equal(again(inputs()), logits)


def test_ranks_publish_their_shards_and_others_bind_them(wcache: Wcache, forge: Forge, tmp_path: Path) -> None:
    with wcache.serve():
        run_ranks(forge, 2, tmp_path, published, wcache.socket_path)


def test_names_of_one_tensor_that_a_module_distributes_unlike_do_not_fit() -> None:
    """They could not be one object, and each has the right shape."""
    spec = StateSpec(
        storages=(16,),
        tensors=(TensorSpec(name="a", dtype="float32", shape=(4,), storage=0),),
        aliases={"b": "a"},
        cuts={"a": Cut(0, (8,), 1, 2)},
    )
    manifest = build_manifest(spec, plan_layout(spec.storages))
    slot = Slot(kind=Kind.PARAMETER, dtype="float32", shape=(4,), device="meta", identity=1)
    cut = msgspec.structs.replace(slot, distributed="(Shard(dim=0),)", cut=Cut(0, (8,), 1, 2))
    assert plan({"a": cut, "b": cut}, manifest).sources == {"a": "a", "b": "a"}
    with pytest.raises(BindError) as caught:
        plan({"a": cut, "b": slot}, manifest)
    assert caught.value.mismatched == {"b": ["distributed as no DTensor", "one tensor with a"]}


def test_a_module_without_dtensors_takes_a_share_by_its_shapes(
    wcache: Wcache, checkpoint: Path, tmp_path: Path
) -> None:
    """As engines have them that know their rank's sizes."""
    with torch.device("meta"):
        model = Small()
        model.head = nn.Linear(8, 6, bias=False)
        for layer in model.layers:
            layer.up, layer.down = nn.Linear(8, 8), nn.Linear(8, 8)
    with (
        wcache.serve(checkpoint, "--tp-size", "2", "--tp-plan", plan_file(tmp_path)),
        fetched(wcache.socket_path, 1) as state,
    ):
        state.bind(model)
    assert torch.equal(model.head.weight, load_file(checkpoint)["head.weight"][6:])
