"""memory: the tightest of all limits counts, and what was promised is not promised twice."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcache_async.backends import memory
from wcache_async.backends.memory import Reservation, available_memory
from wcache_async.errors import InsufficientMemory

GIB = 1 << 30


class Machine:
    """A /proc and cgroup tree as the kernel would show it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {8 * GIB // 1024} kB\nSwapFree: 1 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cgroup2(self, own: str, *, mount: str = "sys/fs/cgroup", mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"1:name=systemd:/elsewhere\n0::{own}\n")
        self.write("proc/self/mountinfo", f"31 23 0:28 {mount_root} /{mount} rw,relatime - cgroup2 cgroup2 rw\n")
        (self.root / mount).mkdir(parents=True, exist_ok=True)

    def limit2(self, folder: str, limit: str, used: int, *, cache: int = 0) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\nfile 5\nactive_file {cache // 2}\ninactive_file {cache // 2}\n")

    def available(self) -> tuple[int, str]:
        return available_memory(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_it_is_what_the_kernel_thinks_available(machine: Machine) -> None:
    assert machine.available() == (8 * GIB, "MemAvailable of the machine")


def test_a_machine_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    available, limit = available_memory(tmp_path)
    assert available >= 1 << 62
    assert limit == "no limit is known"


def test_a_cgroup_limit_counts_less_what_is_used(machine: Machine) -> None:
    machine.cgroup2("/app")
    machine.limit2("sys/fs/cgroup/app", str(4 * GIB), GIB)
    available, limit = machine.available()
    assert available == 3 * GIB
    assert limit.endswith("sys/fs/cgroup/app")


def test_page_cache_of_a_cgroup_can_be_had_back(machine: Machine) -> None:
    machine.cgroup2("/app")
    machine.limit2("sys/fs/cgroup/app", str(4 * GIB), 3 * GIB, cache=2 * GIB)
    assert machine.available()[0] == 3 * GIB


def test_a_cgroup_over_its_limit_has_nothing(machine: Machine) -> None:
    machine.cgroup2("/app")
    machine.limit2("sys/fs/cgroup/app", str(GIB), 2 * GIB)
    assert machine.available()[0] == 0


@pytest.mark.parametrize("tightest", ["", "/a", "/a/b", "/a/b/c"])
def test_every_ancestor_limits(machine: Machine, tightest: str) -> None:
    machine.cgroup2("/a/b/c")
    for folder in ("", "/a", "/a/b", "/a/b/c"):
        machine.limit2(f"sys/fs/cgroup{folder}", str(GIB if folder == tightest else 6 * GIB), 0)
    available, limit = machine.available()
    assert available == GIB
    assert limit.endswith(f"sys/fs/cgroup{tightest}")


def test_no_limit_and_no_memory_controller_limit_nothing(machine: Machine) -> None:
    machine.cgroup2("/a/b")
    machine.limit2("sys/fs/cgroup/a", "max", GIB)
    machine.write("sys/fs/cgroup/a/b/cgroup.procs", "1\n")
    assert machine.available()[0] == 8 * GIB


def test_in_a_container_the_mount_may_start_below_the_path(machine: Machine) -> None:
    # Without a cgroup namespace: the path is the host's, the mount shows only the container's part.
    machine.cgroup2("/docker/abc/inner", mount_root="/docker/abc")
    machine.limit2("sys/fs/cgroup/inner", str(2 * GIB), 0)
    assert machine.available()[0] == 2 * GIB


def test_a_path_that_the_mount_does_not_show_leaves_the_mounts_own_limit(machine: Machine) -> None:
    machine.cgroup2("/../other")
    machine.limit2("sys/fs/cgroup", str(2 * GIB), 0)
    assert machine.available()[0] == 2 * GIB


def test_version_one_counts_too(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/app/x\n0::/\n")
    machine.write(
        "proc/self/mountinfo",
        "35 31 0:32 / /cg/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
        "37 31 0:34 / /data rw - ext4 /dev/vda rw\n",
    )
    for folder, limit in (("cg/memory", 1 << 62), ("cg/memory/app", 5 * GIB), ("cg/memory/app/x", 1 << 62)):
        machine.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        machine.write(f"{folder}/memory.usage_in_bytes", f"{2 * GIB}\n")
        machine.write(f"{folder}/memory.stat", f"active_file 7\ntotal_active_file {GIB}\ntotal_inactive_file 0\n")
    assert machine.available()[0] == 4 * GIB


def test_this_machine_can_be_asked() -> None:
    available, limit = available_memory()
    assert 0 < available < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert limit


# ---------------------------------------------------------------------------------- promises
@pytest.fixture
def ten_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "available_memory", lambda: (10, "a tiny machine"))
    yield
    Reservation(10)  # Every test has given back what it was promised.


@pytest.mark.usefixtures("ten_bytes")
def test_more_than_there_is_is_refused_with_the_sizes() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        Reservation(11)
    assert (caught.value.needed, caught.value.available, caught.value.limit) == (11, 10, "a tiny machine")


@pytest.mark.usefixtures("ten_bytes")
def test_what_one_load_was_promised_another_cannot_have() -> None:
    first = Reservation(6)
    with pytest.raises(InsufficientMemory) as caught:
        Reservation(5)
    assert caught.value.available == 4
    second = Reservation(4)
    first.release()
    first.release()
    Reservation(6).release()
    second.release()


@pytest.mark.usefixtures("ten_bytes")
def test_what_was_taken_counts_by_the_kernels_account_alone() -> None:
    first = Reservation(6)
    first.take(4)
    Reservation(8).release()
    first.take(100)
    Reservation(10).release()
    first.release()
    Reservation(10).release()


@pytest.mark.usefixtures("ten_bytes")
def test_a_dropped_promise_is_no_promise() -> None:
    Reservation(10)
    Reservation(10)
