"""views: exact, plain, independent tensors, on this torch and on one without its private guard."""

import gc
import sys
from types import FrameType

import pytest
import torch

from wcache_async.backends import views
from wcache_async.backends.views import ArenaViews
from wcache_async.errors import InvalidManifest
from wcache_async.manifest import Arena, StateManifest, TensorEntry

ARENA = torch.arange(256, dtype=torch.uint8)


def manifest(*tensors: TensorEntry, dtypes: tuple[str, ...] = ("uint8", "float32"), arenas: int = 1) -> StateManifest:
    return StateManifest(dtypes, tuple(Arena(256) for _ in range(arenas)), tensors, {})


@pytest.fixture(params=["below_autograd", "public_api"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How views are made: by torch's private guard, or by what is left where a torch has none."""
    if request.param == "public_api":
        monkeypatch.setattr(views, "_skips_autograd", lambda: False)


def test_this_torch_has_the_guard_whatever_the_thread_is_set_to() -> None:
    for probe in (torch.inference_mode, torch.no_grad):
        views._skips_autograd.cache_clear()
        with probe(), torch.device("meta"):
            assert views._skips_autograd()
    views._skips_autograd.cache_clear()
    assert views._skips_autograd()


@pytest.mark.usefixtures("way")
def test_preparing_finds_out_about_a_torch_that_is_there_and_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(views, "_skips_autograd", lambda: asked.append(True))
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch")
        views.prepare_views()
        assert "torch" not in sys.modules
    assert asked == []
    views.prepare_views()
    assert asked == [True]


def test_geometry_is_the_manifests() -> None:
    made = ArenaViews(
        manifest(
            TensorEntry("plain", 0, (2, 3), 5, 0),
            TensorEntry("scalar", 1, (), 8, 0),
            TensorEntry("empty", 1, (0, 4), 0, 0),
            TensorEntry("strided", 1, (3, 2), 64, 0, 0, (1, 5)),
            TensorEntry("second", 0, (4,), 10, 1, 1),
            arenas=2,
        ),
        [ARENA, ARENA + 1],
    ).tensors()
    assert made["plain"].tolist() == [[5, 6, 7], [8, 9, 10]]
    assert (made["plain"].stride(), made["plain"].dtype) == ((3, 1), torch.uint8)
    assert made["scalar"].shape == ()
    assert torch.equal(made["scalar"], ARENA[8:12].view(torch.float32)[0])
    assert (made["empty"].shape, made["empty"].stride()) == ((0, 4), (4, 1))
    assert made["strided"].stride() == (1, 5)
    assert torch.equal(made["strided"], ARENA.view(torch.float32).as_strided((3, 2), (1, 5), 16))
    assert made["second"].tolist() == [11, 12, 13, 14]


@pytest.mark.usefixtures("way")
def test_tensors_are_no_views_share_no_version_counter_and_need_no_grad() -> None:
    arena = ARENA.clone()
    source = ArenaViews(manifest(TensorEntry("a", 1, (4,), 0, 0), TensorEntry("b", 1, (4,), 64, 1)), [arena])
    with torch.inference_mode():
        a, b = source.tensors().values()
        single = source.tensor(source.manifest.tensors[0])
    for tensor in (a, b, single):
        assert not tensor._is_view()
        assert not tensor.is_inference()
        assert tensor.is_leaf
        assert not tensor.requires_grad
    a.zero_()
    assert (a._version, b._version, single._version) == (1, 0, 0)
    assert arena[:16].tolist() == [0] * 16


@pytest.mark.usefixtures("way")
def test_a_tensor_keeps_its_arena_alive() -> None:
    source = ArenaViews(manifest(TensorEntry("a", 0, (4,), 0, 0)), [torch.full((256,), 7, dtype=torch.uint8)])
    tensor = source.tensors()["a"]
    del source
    gc.collect()
    torch.zeros(256, dtype=torch.uint8)  # would take the freed block
    assert tensor.tolist() == [7, 7, 7, 7]


@pytest.mark.usefixtures("way")
def test_aliases_come_last_and_are_the_very_object() -> None:
    described = StateManifest(
        ("uint8",), (Arena(256),), (TensorEntry("b", 0, (1,), 0, 0), TensorEntry("a", 0, (1,), 64, 1)), {"0": "b"}
    )
    made = ArenaViews(described, [ARENA]).tensors()
    assert list(made) == ["b", "a", "0"]
    assert made["0"] is made["b"]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "entry",
    [
        TensorEntry("bad", 0, (2**40,), 0, 0),
        TensorEntry("bad", 0, (2,), 0, 0, 0, (2**63 - 1,)),
        TensorEntry("bad", 0, (2,), 0, 0, 0, (2**64,)),
        TensorEntry("bad", 0, (2**63,), 0, 0),
        TensorEntry("bad", 1, (64,), 4, 0),
        TensorEntry("bad", 0, (1, 2), 0, 0, 0, (1,)),
        TensorEntry("bad", 0, (0, 2**62, 2**62, 2**62), 0, 0, 0, (2**100, 1, 1, 1)),
        TensorEntry("bad", 7, (1,), 0, 0),
        TensorEntry("bad", 0, (1,), 0, 0, 7),
    ],
    ids=["beyond", "stride", "stride64", "shape64", "last", "rank", "empty", "dtype", "arena"],
)
def test_impossible_geometry_is_a_typed_error_that_names_the_tensor(entry: TensorEntry) -> None:
    source = ArenaViews(manifest(TensorEntry("good", 0, (1,), 0, 0), entry), [ARENA.clone()])
    with pytest.raises(InvalidManifest) as caught:
        source.tensors()
    assert caught.value.tensor == "bad"
    with pytest.raises(InvalidManifest):
        source.tensor(entry)
    assert gc.isenabled()


@pytest.mark.usefixtures("way")
def test_autograd_works_after_a_failure() -> None:
    source = ArenaViews(manifest(TensorEntry("bad", 0, (2**40,), 0, 0)), [ARENA])
    with pytest.raises(InvalidManifest):
        source.tensors()
    weight = torch.ones(3, requires_grad=True)
    torch.autograd.backward((weight * 2).sum())
    assert weight.grad is not None
    assert weight[:1]._is_view()


@pytest.mark.usefixtures("way")
def test_an_arena_whose_size_its_dtypes_do_not_divide_serves_whole_elements() -> None:
    described = StateManifest(("float32",), (Arena(66),), (TensorEntry("a", 0, (16,), 0, 0),), {})
    made = ArenaViews(described, [ARENA[:66]]).tensors()
    assert torch.equal(made["a"], ARENA[:64].view(torch.float32))


def test_no_collection_runs_while_thousands_are_made() -> None:
    entries = tuple(TensorEntry(str(i), 0, (4,), i % 252, i) for i in range(3000))
    made_so_far: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is ArenaViews.tensors.__code__:
                made_so_far.append(len(frame.f_locals["built"]))
            frame = frame.f_back

    gc.callbacks.append(note)
    try:
        made = ArenaViews(manifest(*entries), [ARENA]).tensors()
    finally:
        gc.callbacks.remove(note)
    assert len(made) == 3000
    assert set(made_so_far) <= {3000}  # One may be due as soon as it is let go.
    assert gc.isenabled()
