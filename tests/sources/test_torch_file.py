"""torch checkpoints: what `torch.load` gives is what is served, in both of torch's formats."""

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from wcache_async.errors import SourceError
from wcache_async.manifest import DTYPE_ITEMSIZE, Kind
from wcache_async.sources import open_source

if TYPE_CHECKING:
    from tests.sources.conftest import Load

Same = Callable[[torch.Tensor, torch.Tensor], bool]
Save = Callable[[object], Path]


@pytest.fixture(params=["archive", "legacy"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    """`torch.save` in either format."""

    def write(value: object) -> Path:
        torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=request.param == "archive")
        return tmp_path / "x.pt"

    return write


def _refused(path: Path, *, dtype: str = "") -> SourceError:
    with pytest.raises(SourceError) as caught, open_source(str(path), dtype=dtype) as source:
        source.open()
    assert caught.value.path == str(path)
    return caught.value


_UNSAVED = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
"""torch saves tensors of these and cannot load them again."""


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(DTYPE_ITEMSIZE.keys() - _UNSAVED))
def test_every_dtype_torch_can_save_is_read_as_torch_reads_it(
    tmp_path: Path, load: "Load", same: Same, dtype: str
) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    tensor = torch.arange(2 * torch_dtype.itemsize, dtype=torch.uint8).view(torch_dtype)
    torch.save({"w": tensor}, tmp_path / "x.pt")
    assert same(load(tmp_path / "x.pt").tensors["w"], tensor)


def test_tensors_are_those_of_torch_load(save: Save, load: "Load", same: Same) -> None:
    path = save(
        {
            "state_dict": {
                "matrix": torch.randn(300, 50),
                "transposed": torch.randn(30, 20).t(),
                "scalar": torch.tensor(3.5),
                "empty": torch.empty(0, 3),
                "expanded": torch.randn(1, 4).expand(5, 4),
                "int": torch.arange(7),
                "steps": 12,
            },
            "epoch": 4,
        }
    )
    want = torch.load(path, weights_only=True)["state_dict"]
    del want["steps"]
    loaded = load(path)
    assert loaded.tensors.keys() == want.keys()
    for name, tensor in want.items():
        assert same(loaded.tensors[name], tensor)
        if tensor.numel():
            assert loaded.tensors[name].stride() == tensor.stride()


def test_tensors_that_share_a_storage_still_do(save: Save, load: "Load", same: Same) -> None:
    fused = torch.randn(12, 8)
    parts = {
        "q": fused[:4],
        "k": fused[4:8],
        "v": fused[8:],
        "all": fused,
        "column": fused[:, 3],
        "other": torch.ones(2),
    }
    loaded = load(save(parts))
    assert all(same(loaded.tensors[name], tensor) for name, tensor in parts.items())
    assert len(loaded.spec.storages) == 2
    loaded.tensors["q"].fill_(7.0)
    assert (loaded.tensors["all"][:4] == 7.0).all()


def test_one_tensor_under_two_names_is_an_alias(save: Save, load: "Load") -> None:
    tied, empty = torch.randn(4, 3), torch.empty(0)
    loaded = load(save({"embed": tied, "b": torch.ones(1), "head": tied, "e1": empty, "e2": empty}))
    assert loaded.spec.aliases == {"head": "embed", "e2": "e1"}
    assert sorted(loaded.tensors) == ["b", "e1", "embed"]


def test_a_tied_weight_is_an_alias_though_state_dict_detaches_it_twice(save: Save, load: "Load") -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    assert load(save(module.state_dict())).spec.aliases == {"1.weight": "0.weight"}


def test_two_views_that_differ_are_no_aliases(save: Save, load: "Load") -> None:
    base = torch.arange(4.0)
    loaded = load(save({"row": base.view(1, 4), "column": base.view(4, 1)}))
    assert not loaded.spec.aliases
    assert len(loaded.spec.storages) == 1


def test_empty_tensors_that_look_alike_are_no_aliases(save: Save, load: "Load") -> None:
    assert not load(save({"a": torch.empty(0), "b": torch.empty(0)})).spec.aliases


def test_a_storage_is_cut_to_what_is_reached_and_keeps_alignment(save: Save, load: "Load", same: Same) -> None:
    big = torch.randn(100_000)
    views = {"a": big[1003:1010], "b": big[1008:1020:3]}
    loaded = load(save(views))
    assert all(same(loaded.tensors[name], tensor) for name, tensor in views.items())
    assert loaded.spec.storages == ((1003 * 4) % 64 + 15 * 4,)
    offsets = {tensor.name: tensor.offset for tensor in loaded.spec.tensors}
    assert offsets["a"] % 64 == 1003 * 4 % 64
    assert offsets["b"] - offsets["a"] == 20


def test_parameters_and_buffers_are_told_apart_where_the_file_does(save: Save, load: "Load") -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    loaded = load(save({"w": torch.nn.Parameter(torch.ones(2)), "frozen": frozen, "mean": torch.zeros(2)}))
    kinds = {tensor.name: (tensor.kind, tensor.requires_grad) for tensor in loaded.spec.tensors}
    assert kinds == {
        "w": (Kind.PARAMETER, True),
        "frozen": (Kind.PARAMETER, False),
        "mean": (Kind.BUFFER, False),
    }


def test_plain_tensors_alone_count_as_parameters(save: Save, load: "Load") -> None:
    loaded = load(save(torch.nn.BatchNorm1d(3).state_dict()))
    assert {tensor.kind for tensor in loaded.spec.tensors} == {Kind.PARAMETER}
    assert not any(tensor.requires_grad for tensor in loaded.spec.tensors)


# ------------------------------------------------------------------------------------- cast
def test_a_shared_storage_is_cast_as_a_whole(save: Save, load: "Load", same: Same) -> None:
    base = torch.randn(64)
    views = {"a": base[19:30], "b": base[25:45:4], "int": torch.arange(5)}
    loaded = load(save(views), dtype="float64")
    assert same(loaded.tensors["a"], base[19:30].double())
    assert same(loaded.tensors["b"], base[25:45:4].double())
    assert same(loaded.tensors["int"], views["int"])
    assert len(loaded.spec.storages) == 2
    loaded.tensors["a"][6] = 5.0
    assert loaded.tensors["b"][0] == 5.0


@pytest.fixture
def two_dtypes(tmp_path: Path) -> Path:
    """One storage seen as float32 and as uint16; torch no longer writes it, so two other dtypes are renamed."""
    base = torch.arange(8.0).view(torch.uint32)
    torch.save({"floats": base, "bits": base.view(torch.uint16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"ctorch\nuint32\n", b"ctorch\nfloat32\n"))
    return tmp_path / "x.pt"


def test_a_storage_may_be_seen_through_two_dtypes(two_dtypes: Path, load: "Load", same: Same) -> None:
    for dtype in ("", "float32"):  # A cast to what it is changes nothing.
        loaded = load(two_dtypes, dtype=dtype)
        assert len(loaded.spec.storages) == 1
        assert same(loaded.tensors["floats"], torch.arange(8.0))
        assert same(loaded.tensors["bits"], torch.arange(8.0).view(torch.uint16))


def test_a_storage_seen_through_two_dtypes_is_not_cast(two_dtypes: Path) -> None:
    error = _refused(two_dtypes, dtype="float16")
    assert error.tensor == "floats"
    assert "floats, bits share one storage as float32, uint16" in error.reason


# --------------------------------------------------------------------------------- refusals
def test_a_tensor_that_is_no_plain_one_is_refused_by_name(save: Save) -> None:
    path = save({"w": torch.ones(2), "s": torch.eye(3).to_sparse()})
    error = _refused(path)
    assert "sparse" in error.reason or error.tensor == "s"


def test_a_quantized_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "x.pt")
        error = _refused(tmp_path / "x.pt")
    assert error.tensor == "q"


# ----------------------------------------------------------------------------------- shards
@pytest.fixture
def sharded(tmp_path: Path) -> dict[str, torch.Tensor]:
    """`tmp_path` with two shards and their index."""
    tensors = {"a": torch.randn(3), "b": torch.randn(4), "c": torch.randn(5)}
    torch.save({"a": tensors["a"], "c": tensors["c"]}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": tensors["b"]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {name: f"pytorch_model-0000{1 + (name == 'b')}-of-00002.bin" for name in tensors}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_shards_are_read_through_their_index(
    sharded: dict[str, torch.Tensor], tmp_path: Path, load: "Load", same: Same
) -> None:
    loaded = load(tmp_path)
    assert loaded.tensors.keys() == sharded.keys()
    assert all(same(loaded.tensors[name], tensor) for name, tensor in sharded.items())
    assert loaded.config["source"] == "torch"


def test_shards_that_contradict_their_index_are_refused(sharded: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shard = tmp_path / "pytorch_model-00002-of-00002.bin"
    torch.save({"b": sharded["b"], "a": sharded["a"]}, shard)
    with pytest.raises(SourceError, match="twice") as caught, open_source(str(tmp_path)) as source:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (str(shard), "a")
    torch.save({"d": sharded["b"]}, shard)
    with pytest.raises(SourceError, match="it is not") as caught, open_source(str(tmp_path)) as source:
        source.open()
    assert (caught.value.path, caught.value.tensor) == (str(shard), "b")
