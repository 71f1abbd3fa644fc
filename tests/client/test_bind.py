"""Binding: the plan is pure and complete, the module is changed wholly or not at all."""

import pytest
import torch
from torch import nn

from wcache_async.backends.base import WeightCacheTransportBackend
from wcache_async.backends.shm_fd import ShmFdTransportBackend
from wcache_async.client.bind import bind, describe, plan
from wcache_async.errors import BindError
from wcache_async.manifest import StateManifest, StateSpec, TensorSpec, build_manifest, plan_layout
from wcache_async.modules.walk import walk

Tensors = dict[str, torch.Tensor]


class Small(nn.Module):
    """A tied weight, a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def manifest_of(tensors: Tensors, aliases: dict[str, str] | None = None) -> StateManifest:
    specs = [
        TensorSpec(name=name, dtype=str(t.dtype)[6:], shape=tuple(t.shape), storage=i)
        for i, (name, t) in enumerate(tensors.items())
    ]
    sizes = tuple(t.nbytes for t in tensors.values())
    spec = StateSpec(storages=sizes, tensors=tuple(specs), aliases=aliases or {})
    return build_manifest(spec, plan_layout(sizes))


@pytest.fixture
def backend() -> WeightCacheTransportBackend:
    return ShmFdTransportBackend()


@pytest.fixture
def state() -> Tensors:
    torch.manual_seed(1)
    return {name: torch.rand_like(t.float()).to(t.dtype) for name, t in Small().state_dict().items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_tensor_is_replaced_and_ties_stay(
    device: str, state: Tensors, backend: WeightCacheTransportBackend
) -> None:
    del state["head.weight"]  # As a checkpoint holds a tied weight: once.
    with torch.device(device):
        module = Small()
    if device == "meta":
        module.angles = torch.arange(3.0)
    embed = module.embed.weight
    bind(module, state, manifest_of(state), backend)
    assert module.head.weight is module.embed.weight
    for name, tensor in state.items():
        got = module.state_dict()[name]
        assert got.data_ptr() == tensor.data_ptr()
    assert module.embed.weight.requires_grad
    assert isinstance(module.embed.weight, nn.Parameter)
    if device == "cpu":
        assert module.embed.weight is embed  # Hooks and optimizers keep what they hold.
    assert vars(module)["_weight_cache_transport_backend"] is backend
    assert "angles" not in module.state_dict()


def test_a_state_with_the_tied_weight_under_both_names_binds_too(
    state: Tensors, backend: WeightCacheTransportBackend
) -> None:
    tied = {**state, "head.weight": state["embed.weight"]}
    manifest = manifest_of({k: v for k, v in state.items() if k != "head.weight"}, {"head.weight": "embed.weight"})
    module = Small()
    bind(module, tied, manifest, backend)
    assert module.head.weight is module.embed.weight


def test_what_does_not_fit_is_listed_whole_and_the_module_untouched(
    state: Tensors, backend: WeightCacheTransportBackend
) -> None:
    module = Small()
    before = {name: (id(t), t.data_ptr()) for name, t in module.state_dict(keep_vars=True).items()}
    del state["head.weight"], state["embed.weight"], state["norm.bias"]
    state["norm.weight"] = torch.zeros(5)
    state["norm.running_mean"] = torch.zeros(4, dtype=torch.float64)
    state["extra"] = torch.zeros(1)
    with pytest.raises(BindError) as caught:
        bind(module, state, manifest_of(state), backend)
    assert sorted(caught.value.missing) == ["embed.weight", "head.weight", "norm.bias"]
    assert caught.value.unexpected == ["extra"]
    assert caught.value.mismatched == {
        "norm.weight": ["float32[4]", "float32[5]"],
        "norm.running_mean": ["float32[4]", "float64[4]"],
    }
    after = {name: (id(t), t.data_ptr()) for name, t in module.state_dict(keep_vars=True).items()}
    assert after == before
    assert not hasattr(module, "_weight_cache_transport_backend")


def test_a_buffer_on_meta_that_the_state_lacks_is_an_error_even_when_not_strict(
    state: Tensors, backend: WeightCacheTransportBackend
) -> None:
    with torch.device("meta"):
        module = Small()
    for strict in (True, False):
        with pytest.raises(BindError) as caught:
            bind(module, state, manifest_of(state), backend, strict=strict)
        assert caught.value.missing == ["angles"]


def test_not_strict_leaves_both_sides_leftovers(state: Tensors, backend: WeightCacheTransportBackend) -> None:
    module = Small()
    kept = module.norm.bias.clone()
    del state["norm.bias"]
    state["extra"] = torch.zeros(1)
    bind(module, state, manifest_of(state), backend, strict=False)
    assert torch.equal(module.norm.bias, kept)
    assert torch.equal(module.norm.weight, state["norm.weight"])


def test_planning_touches_nothing(state: Tensors) -> None:
    with torch.device("meta"):
        module = Small()
    module.angles = torch.arange(3.0)
    planned = plan(describe(walk(module)), manifest_of(state))
    assert planned.sources.keys() >= state.keys()
    assert module.embed.weight.is_meta


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_constructor_hung_on_its_parameters_stays(
    device: str, state: Tensors, backend: WeightCacheTransportBackend
) -> None:
    """How to load or shard them, as engines note it."""
    with torch.device(device):
        module = Small()
    module.angles = torch.arange(3.0)
    module.embed.weight.output_dim = 0  # type: ignore[attr-defined]
    bind(module, state, manifest_of(state), backend)
    assert module.embed.weight.output_dim == 0  # type: ignore[attr-defined]
