"""What of this machine matters to a weight cache: looked up or measured, and judged."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from wcache_async.cli.units import size_text
from wcache_async.version import __version__

__all__ = ["Finding", "Verdict", "examine"]

_SAMPLE_NBYTES = 32 << 20
_GIB = 1 << 30


class Verdict(StrEnum):
    OK = "ok"
    SLOW = "slow"
    """It works, and could be faster."""
    LIMITED = "limited"
    """It works up to a point that may be met."""
    NO = "no"
    """It does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at: what there is, and what to do about it where it is not `OK`."""

    topic: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Everything, in the order in which it is told.  Blocks, and imports torch for transports that need it."""
    for check in (_versions, _kernel, _sealing, _first_touch, _fd_limit, _overcommit, _memory):
        yield check()
    yield from _transports()


def _versions() -> Finding:
    found = f"wcache-async {__version__}, Python {platform.python_version()}"
    try:
        return Finding(topic="versions", verdict=Verdict.OK, found=f"{found}, torch {version('torch')}")
    except PackageNotFoundError:
        return Finding(
            topic="versions",
            verdict=Verdict.NO,
            found=f"{found}, no torch",
            advice="Install torch: a daemon can do without, clients cannot",
        )


def _kernel() -> Finding:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    found = f"{sys.platform} {release}, {os.cpu_count()} CPUs"
    if numbers < (5, 14):
        return Finding(
            topic="kernel",
            verdict=Verdict.SLOW,
            found=found,
            advice="Before Linux 5.14 (MADV_POPULATE_WRITE) loading takes a system call and a zeroed page more each",
        )
    return Finding(topic="kernel", verdict=Verdict.OK, found=found)


def _sealing() -> Finding:
    from wcache_async.backends.memfd import sealed_memfd

    topic = "sealed memfds"
    try:
        sealed_memfd("wcache-doctor", b"\0").close()
    except OSError as error:
        return Finding(
            topic=topic,
            verdict=Verdict.NO,
            found=f"none can be made: {error.strerror}",
            advice="A sandbox probably forbids memfd_create(2) or fcntl(2) with F_ADD_SEALS: allow them",
        )
    return Finding(topic=topic, verdict=Verdict.OK, found="they can be made")


def _first_touch() -> Finding:
    """A fresh client's first read of every page, and the daemon's filling of them, for an arena of 32 MiB."""
    from wcache_async.backends.mapping import Access, map_pages
    from wcache_async.backends.memfd import create_memfd, seal_memfd, write_memfd

    topic = "first touch"
    setting = _setting("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    pages = f"huge pages for shared memory: {setting}"
    try:
        with create_memfd("wcache-doctor", _SAMPLE_NBYTES) as fd:
            data = memoryview(bytes(_SAMPLE_NBYTES))
            filling = _seconds(lambda: write_memfd(fd, data, 0))
            seal_memfd(fd)
            with memoryview(map_pages(fd.fileno(), _SAMPLE_NBYTES, Access.PRIVATE_WRITE)) as mapped:
                touching = _seconds(mapped.cast("B")[:: resource.getpagesize()].tobytes)
    except OSError as error:
        return Finding(topic=topic, verdict=Verdict.NO, found=f"no arena can be made: {error.strerror}")
    scale = _GIB / _SAMPLE_NBYTES
    found = (
        f"a client's takes {1000 * scale * touching:.0f} ms per GiB, the daemon's, which fills the pages, "
        f"{scale * filling:.2f} s; {pages}"
    )
    # 97 ms per GiB was measured with 4 KiB pages and 6.4 with huge ones.
    if scale * touching > 0.03:
        return Finding(
            topic=topic,
            verdict=Verdict.SLOW,
            found=found,
            advice="Pages of 4 KiB are met one by one; as root, "
            "`echo always > /sys/kernel/mm/transparent_hugepage/shmem_enabled` gives arenas huge ones",
        )
    return Finding(topic=topic, verdict=Verdict.OK, found=found)


def _fd_limit() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, which serve raises to {_limit(hard)}"
    if hard != resource.RLIM_INFINITY and hard < 2048:
        return Finding(
            topic="fd limit",
            verdict=Verdict.LIMITED,
            found=found,
            advice=f"Each client is one: at most some {max(hard - 64, 0)} at once; raise `ulimit -Hn` for the daemon",
        )
    return Finding(topic="fd limit", verdict=Verdict.OK, found=found)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def _overcommit() -> Finding:
    setting = _setting("/proc/sys/vm/overcommit_memory")
    found = f"vm.overcommit_memory = {setting}"
    if setting == "2":
        return Finding(
            topic="overcommit",
            verdict=Verdict.LIMITED,
            found=found,
            advice="Each client's private mapping counts as if all of it were copied: raise vm.overcommit_ratio, "
            'or attach with mapping="read_only"',
        )
    return Finding(topic="overcommit", verdict=Verdict.OK, found=found)


def _memory() -> Finding:
    from wcache_async.backends.memory import available_memory

    available, limit = available_memory()
    huge = _setting("/proc/sys/vm/nr_hugepages")
    return Finding(
        topic="memory",
        verdict=Verdict.OK,
        found=f"{size_text(available)} available ({limit}); {huge} reserved huge pages",
    )


def _transports() -> Iterator[Finding]:
    """One finding for each transport backend."""
    from wcache_async.backends.registry import get_transport_backend_class, known_backends
    from wcache_async.errors import BackendUnavailable

    for name in known_backends():
        topic = f"transport {name}"
        try:
            devices = get_transport_backend_class(name).capabilities.devices
        except BackendUnavailable as error:
            yield Finding(topic=topic, verdict=Verdict.NO, found=error.reason)
        else:
            yield Finding(topic=topic, verdict=Verdict.OK, found=f"works here, for {_tensors_on(devices)}")


def _tensors_on(devices: frozenset[str]) -> str:
    if "cuda" in devices:
        import torch

        if not torch.cuda.is_available():
            rest = ", ".join(sorted(devices - {"cuda"})) or "no"
            return f"{rest} tensors; for cuda ones too, had this machine and its torch CUDA"
    return f"{', '.join(sorted(devices))} tensors"


def _setting(path: str) -> str:
    """A kernel setting; of several values with the chosen one in brackets, that one."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return "not told by this kernel"
    chosen = text.partition("[")[2].partition("]")[0]
    return chosen or text


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
