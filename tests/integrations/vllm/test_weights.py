"""An engine's tensors taken out plain and put back as its own parameters, and what has no place in that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wcache_async import Client, Daemon
from wcache_async.errors import BindError, ModuleError
from wcache_async.integrations.vllm.weights import layout_of, module_scalars, put_back, reshape, take
from wcache_async.modules.export import Described


class EngineParameter(nn.Parameter):
    """As vLLM has them: a class of its own, with attributes, made by a constructor that wants more than data."""

    def __new__(cls, data: torch.Tensor, **_: Any) -> "EngineParameter":
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, *, loader: Any) -> None:
        self.loader = loader

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Implementation:
    """What a layer computes with, which is no module."""

    def __init__(self, slopes: torch.Tensor, shared: torch.Tensor) -> None:
        self.slopes = slopes
        self.shared = shared
        self.inner = None


Implementation.__module__ = "vllm.attention"


class Model(nn.Module):
    table: torch.Tensor

    def __init__(self, seed: float = 0.0) -> None:
        super().__init__()
        self.weight = EngineParameter(torch.full((3, 2), seed), loader=self.load)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.weight
        self.norm = nn.Parameter(torch.full((2,), seed), requires_grad=False)
        self.norm.output_dim = 0  # type: ignore[attr-defined]
        self.register_buffer("table", torch.full((2,), seed), persistent=False)
        self.kv_cache = [torch.tensor([])]
        self.implementation = Implementation(torch.full((4,), seed), self.table)
        self.has_own_head = False

    def load(self) -> None:
        self.has_own_head = True


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


async def published(daemon: Daemon, model: nn.Module, *, helpers: bool = True, **scalars: Any) -> None:
    async with Client(daemon.socket_path) as client:
        await client.publish("m", Described(take(model, helpers=helpers).walked, scalars, source="test"))


async def attached(daemon: Daemon, model: nn.Module, *, helpers: bool = True) -> None:
    async with Client(daemon.socket_path) as client:
        state = await client.fetch_state("m")
        taken = take(model, device=torch.device("cpu"), helpers=helpers)
        put_back(taken, await state.import_tensors(), state.manifest, state.backend)


async def test_parameters_are_the_engines_own_again(daemon: Daemon) -> None:
    await published(daemon, Model(7.0), has_own_head=True)
    model = on_meta()
    loader = model.weight.loader
    await attached(daemon, model)
    assert type(model.weight) is EngineParameter
    assert model.weight.loader == loader == model.load
    assert model.head.weight is model.weight
    assert torch.equal(model.weight, torch.full((3, 2), 7.0))
    assert type(model.norm) is nn.Parameter
    assert model.norm.output_dim == 0  # type: ignore[attr-defined]
    assert model.has_own_head, "what loading sets besides tensors comes with them"


async def test_what_helpers_hold_is_bound_and_is_the_same_object_where_it_was(daemon: Daemon) -> None:
    await published(daemon, Model(7.0))
    model = on_meta()
    await attached(daemon, model)
    assert torch.equal(model.implementation.slopes, torch.full((4,), 7.0))
    assert model.implementation.shared is model.table
    assert torch.equal(model.table, torch.full((2,), 7.0))
    assert not model.kv_cache[0].is_meta


async def test_the_builder_moves_onto_the_arenas_and_keeps_what_its_parameters_are(daemon: Daemon) -> None:
    model = Model(7.0)
    before = model.weight.data_ptr()
    await published(daemon, model)
    await attached(daemon, model)
    assert model.weight.data_ptr() != before
    assert type(model.weight) is EngineParameter
    assert model.head.weight is model.weight
    assert model.implementation.shared is model.table


async def test_another_set_of_tensors_is_a_bind_error_and_nothing_bound(daemon: Daemon) -> None:
    await published(daemon, Model(7.0))
    model = on_meta()
    model.register_parameter("extra", nn.Parameter(torch.empty(1, device="meta")))
    with pytest.raises(BindError) as caught:
        await attached(daemon, model)
    assert caught.value.missing == ["extra"]
    assert model.weight.is_meta
    assert model.implementation.slopes.is_meta


async def test_tensors_in_a_list_are_refused_by_name(daemon: Daemon) -> None:
    model = Model()
    model.kv_cache = [torch.ones(1)]
    with pytest.raises(ModuleError, match="kv_cache"):
        await published(daemon, model)


def test_a_parameter_without_a_shape_yet_is_refused_by_name() -> None:
    model = Model()
    model.register_parameter("late", nn.UninitializedParameter())  # type: ignore[arg-type]
    with pytest.raises(ModuleError, match="late"):
        take(model)


def test_what_loading_changes_shows_in_layout_and_scalars() -> None:
    model = Model()
    layout, scalars = layout_of(take(model)), module_scalars(model)
    model.load()
    model.norm.data = torch.zeros(3)
    assert {n for n, v in layout_of(take(model)).items() if layout[n] != v} == {"norm"}
    assert {n for n, v in module_scalars(model).items() if scalars[n] != v} == {"has_own_head"}
    assert "training" not in scalars


# ------------------------------------------------------------------------- processed weights
class Processed(Model):
    """After post-processing: one tensor replaced by two, another of another shape and kind."""

    def process(self) -> None:
        weight = self.weight.data
        del self.weight, self.head.weight
        self.head.weight = nn.Parameter(weight.t().contiguous(), requires_grad=False)
        self.register_parameter("scale", nn.Parameter(weight.amax(), requires_grad=False))
        del self._buffers["table"]
        self.table = EngineParameter(torch.full((2, 2), 5.0), loader=None)
        self.packed = torch.ones(2, dtype=torch.int32)
        self.implementation.shared = self.table


async def test_a_meta_model_takes_the_shape_that_post_processing_left(daemon: Daemon) -> None:
    done = Processed(7.0)
    done.process()
    await published(daemon, done, helpers=False)
    with torch.device("meta"):
        model = Processed()
    async with Client(daemon.socket_path) as client:
        state = await client.fetch_state("m")
        reshape(model, state.manifest)
        taken = take(model, device=torch.device("cpu"), helpers=False)
        put_back(taken, await state.import_tensors(), state.manifest, state.backend)
    assert dict(model.named_parameters()).keys() == dict(done.named_parameters()).keys()
    assert all(torch.equal(p, dict(done.named_parameters())[n]) for n, p in model.named_parameters())
    assert torch.equal(model.packed, done.packed)
    assert not hasattr(model, "weight")
    assert "table" not in model._buffers


async def test_the_builders_helpers_follow_what_was_replaced(daemon: Daemon) -> None:
    done = Processed(7.0)
    done.process()
    await published(daemon, done, helpers=False)
    before = done.table
    await attached(daemon, done, helpers=False)
    assert done.implementation.shared is done.table is not before


async def test_processed_tensors_of_a_module_there_is_not_are_a_bind_error(daemon: Daemon) -> None:
    await published(daemon, Model(7.0), helpers=False)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    async with Client(daemon.socket_path) as client:
        state = await client.fetch_state("m")
        with pytest.raises(BindError) as caught:
            reshape(model, state.manifest)
    assert caught.value.unexpected == ["head.weight"]


@pytest.fixture
async def daemon(short_tmp: Path) -> Any:
    async with Daemon(short_tmp / "s.sock", drain_timeout=5) as running:
        yield running
