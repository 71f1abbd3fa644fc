"""registry: backends by name, plugins by entry point, and no choice but among what both sides accept."""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from wcache_async.backends import registry
from wcache_async.backends.base import (
    SHM_FD_BACKEND,
    TORCH_IPC_BACKEND,
    VMM_FD_BACKEND,
    Capabilities,
    ImportOptions,
    StateTensors,
)
from wcache_async.backends.registry import (
    choose_accepted,
    choose_daemon_transport_backend,
    choose_for_device,
    get_client_transport_backend,
    get_transport_backend_class,
    known_backends,
    usable_backends,
    usable_backends_waits,
)
from wcache_async.backends.shm_fd import ShmFdTransportBackend
from wcache_async.errors import BackendNotAccepted, BackendUnavailable, UnknownBackend

CPU_STATE: StateTensors = {"a": (torch.ones(1), True)}
# A CUDA tensor as far as choosing goes: this machine need not have one.
CUDA_STATE = cast(StateTensors, {"a": (SimpleNamespace(device=SimpleNamespace(type="cuda")), True)})


@pytest.fixture(autouse=True)
def forget_what_was_loaded() -> Iterator[None]:
    registry._load.cache_clear()
    registry._entry_points.cache_clear()
    yield
    registry._load.cache_clear()
    registry._entry_points.cache_clear()


# -------------------------------------------------------------------------------- by name
def test_the_three_built_in_names_are_known_and_shm_fd_works_here() -> None:
    assert known_backends()[:3] == ["vmm_fd", "torch_ipc", "shm_fd"]
    assert SHM_FD_BACKEND in usable_backends()


@pytest.mark.parametrize(("cuda", "waits"), [(None, False), ("13.0", True)])
def test_only_where_torch_has_cuda_may_a_driver_have_to_be_loaded(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, waits: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert usable_backends_waits() is waits
    if not waits:
        monkeypatch.setattr(ctypes, "CDLL", None)  # Nothing is loaded to find out.
        assert "vmm_fd" not in usable_backends()


def test_without_torch_a_driver_may_have_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert usable_backends_waits()


def test_a_client_gets_the_backend_the_response_names_with_its_options() -> None:
    backend = get_client_transport_backend("shm_fd", ImportOptions(mapping="read_only"))
    assert isinstance(backend, ShmFdTransportBackend)
    assert backend.options.mapping == "read_only"
    assert get_client_transport_backend("shm_fd").options.mapping == "private"
    assert get_client_transport_backend("shm_fd") is not backend


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="private, read_only"):
        ImportOptions(mapping="shared")  # type: ignore[arg-type]


def test_an_unknown_name_raises_and_lists_what_is_known() -> None:
    with pytest.raises(UnknownBackend) as caught:
        get_client_transport_backend("carrier_pigeon")
    assert caught.value.name == "carrier_pigeon"
    assert caught.value.known[:3] == ["vmm_fd", "torch_ipc", "shm_fd"]


def test_a_known_backend_that_cannot_work_here_raises_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShmFdTransportBackend, "unavailable_reason", classmethod(lambda cls: "no memfd on Mars"))
    with pytest.raises(BackendUnavailable) as caught:
        get_client_transport_backend("shm_fd")
    assert (caught.value.name, caught.value.reason) == ("shm_fd", "no memfd on Mars")
    assert SHM_FD_BACKEND not in usable_backends()


def test_a_response_without_a_backend_is_an_older_daemons_torch_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(ShmFdTransportBackend):
        name = TORCH_IPC_BACKEND

    monkeypatch.setattr(registry, "_load", {TORCH_IPC_BACKEND: Older}.__getitem__)
    assert isinstance(get_client_transport_backend(""), Older)


# ------------------------------------------------------------------------------------- plugins
@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that registers backends; the path of its module, for the test to write."""
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[wcache_async.backends]\n"
        + "".join(f"{name} = wcache_test_plugin:{name}\n" for name in ("fast", "renamed", "plain", "absent", "shm_fd"))
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wcache_test_plugin", raising=False)
    module = tmp_path / "wcache_test_plugin.py"
    module.write_text(
        "from wcache_async.backends.shm_fd import ShmFdTransportBackend\n"
        "class fast(ShmFdTransportBackend):\n    name = 'fast'\n"
        "class renamed(ShmFdTransportBackend):\n    name = 'something_else'\n"
        "class plain:\n    name = 'plain'\n"
        "class shm_fd(ShmFdTransportBackend):\n    stolen = True\n"
    )
    return module


@pytest.mark.usefixtures("plugin")
def test_plugins_are_known_and_chosen_where_somebody_names_them() -> None:
    assert "fast" in known_backends()
    assert "fast" not in usable_backends()
    assert get_client_transport_backend("fast").name == "fast"
    assert choose_daemon_transport_backend(CPU_STATE, ["fast"]).name == "fast"
    assert choose_daemon_transport_backend(CPU_STATE, ["fast", "shm_fd"]).name == "shm_fd"
    assert choose_for_device("cpu", "fast").name == "fast"
    assert choose_for_device("cpu").name == "shm_fd"


@pytest.mark.usefixtures("plugin")
def test_a_plugin_cannot_take_a_built_in_name() -> None:
    assert get_transport_backend_class("shm_fd") is ShmFdTransportBackend
    assert known_backends().count("shm_fd") == 1


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("plain", "is no WeightCache"), ("renamed", "something_else"), ("absent", "cannot be imported")],
)
def test_a_plugin_that_keeps_no_contract_is_unavailable_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        get_client_transport_backend(name)
    assert caught.value.name == name
    assert reason in caught.value.reason


def test_a_plugin_whose_module_does_not_import_is_unavailable(plugin: Path) -> None:
    plugin.write_text("import a_package_nobody_has\n")
    with pytest.raises(BackendUnavailable, match="a_package_nobody_has"):
        get_client_transport_backend("fast")


# ------------------------------------------------------------------------------------- choosing
class _Fake(ShmFdTransportBackend):
    """A backend that exists on no machine without a GPU, as far as choosing goes."""

    exports = True

    @classmethod
    def can_export_state(cls, state_tensors: StateTensors) -> bool:
        types = {tensor.device.type for tensor, _ in state_tensors.values()}
        return cls.exports and types <= cls.capabilities.devices


def _capabilities(*devices: str) -> Capabilities:
    return Capabilities(
        survives_daemon_exit=True, read_only=True, needs_shared_pid_namespace=False, devices=frozenset(devices)
    )


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[_Fake]]:
    """All three built-in backends, working here."""
    backends: dict[str, type[_Fake]] = {
        VMM_FD_BACKEND: type("Vmm", (_Fake,), {"name": VMM_FD_BACKEND, "capabilities": _capabilities("cuda")}),
        TORCH_IPC_BACKEND: type(
            "Ipc", (_Fake,), {"name": TORCH_IPC_BACKEND, "capabilities": _capabilities("cpu", "cuda")}
        ),
        SHM_FD_BACKEND: type("Shm", (_Fake,), {"name": SHM_FD_BACKEND, "capabilities": _capabilities("cpu")}),
    }

    def load(name: str) -> type[_Fake]:
        if name not in backends:
            raise UnknownBackend(name=name, known=list(backends))
        return backends[name]

    monkeypatch.setattr(registry, "_load", load)
    return backends


ALL = (SHM_FD_BACKEND, TORCH_IPC_BACKEND, VMM_FD_BACKEND)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("state", "accepted", "chosen"),
    [
        (CPU_STATE, ALL, "shm_fd"),
        (CUDA_STATE, ALL, "vmm_fd"),
        (CPU_STATE, ("torch_ipc", "shm_fd"), "shm_fd"),  # The daemon's order, not the client's.
        (CUDA_STATE, ("torch_ipc", "shm_fd"), "torch_ipc"),
        (CPU_STATE, ("torch_ipc",), "torch_ipc"),
        (CPU_STATE, (), "torch_ipc"),
        (CUDA_STATE, (), "torch_ipc"),
        (CPU_STATE, ("from_the_future", "shm_fd"), "shm_fd"),
        ({**CPU_STATE, **CUDA_STATE}, ALL, "vmm_fd"),
    ],
)
def test_the_best_that_both_sides_can_is_chosen(state: StateTensors, accepted: tuple[str, ...], chosen: str) -> None:
    assert choose_daemon_transport_backend(state, accepted).name == chosen


def test_a_backend_that_cannot_export_the_state_is_passed_over(three: dict[str, type[_Fake]]) -> None:
    three[VMM_FD_BACKEND].exports = False
    assert choose_daemon_transport_backend(CUDA_STATE, ALL).name == "torch_ipc"


@pytest.mark.usefixtures("three")
def test_nothing_in_common_is_an_error_that_tells_both_sides() -> None:
    with pytest.raises(BackendNotAccepted) as caught:
        choose_daemon_transport_backend(CPU_STATE, ["vmm_fd", "from_the_future"])
    assert caught.value.accepted == ["vmm_fd", "from_the_future"]
    assert caught.value.exportable == ["shm_fd", "torch_ipc"]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("device", "requested", "chosen"),
    [
        ("cpu", "auto", "shm_fd"),
        ("cuda", "auto", "vmm_fd"),
        ("cuda:3", "auto", "vmm_fd"),
        ("cuda:0", "torch_ipc", "torch_ipc"),
        ("cpu", "torch_ipc", "torch_ipc"),
    ],
)
def test_a_state_to_be_loaded_gets_what_its_device_takes(device: str, requested: str, chosen: str) -> None:
    assert choose_for_device(device, requested).name == chosen


@pytest.mark.usefixtures("three")
def test_a_backend_asked_for_is_that_one_or_an_error() -> None:
    with pytest.raises(BackendUnavailable, match="carries cuda tensors, not cpu"):
        choose_for_device("cpu", "vmm_fd")
    with pytest.raises(UnknownBackend):
        choose_for_device("cpu", "carrier_pigeon")


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("device", "accepted", "chosen"),
    [
        ("cpu", ALL, "shm_fd"),
        ("cuda:1", ALL, "vmm_fd"),
        ("cuda:1", ("torch_ipc", "from_the_future"), "torch_ipc"),
        ("cpu", ("torch_ipc", "vmm_fd"), "torch_ipc"),
    ],
)
def test_a_client_gets_the_best_it_accepts_for_the_device(device: str, accepted: tuple[str, ...], chosen: str) -> None:
    assert choose_accepted(device, accepted).name == chosen


@pytest.mark.usefixtures("three")
def test_a_client_that_accepts_nothing_the_device_takes_is_told_what_it_does() -> None:
    with pytest.raises(BackendNotAccepted) as caught:
        choose_accepted("cpu", ["vmm_fd"])
    assert caught.value.exportable == ["shm_fd", "torch_ipc"]


def test_automatic_choice_skips_what_cannot_work_and_says_so_where_nothing_can(
    three: dict[str, type[_Fake]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(three[VMM_FD_BACKEND], "unavailable_reason", classmethod(lambda cls: "no driver"))
    assert choose_for_device("cuda").name == "torch_ipc"
    with pytest.raises(BackendUnavailable, match="no driver"):
        choose_for_device("cuda", "vmm_fd")
    with pytest.raises(BackendUnavailable, match="xpu"):
        choose_for_device("xpu")
