"""Files: what counts as changed, what cannot be seen, and where looking may take long."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from wcache_async.identity import files
from wcache_async.identity.files import changed_files, origin_of, stamp_file
from wcache_async.manifest import Origin

SeenFrom = Callable[[Origin], Origin]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "w.safetensors"
    path.write_bytes(b"abc")
    return path


@pytest.fixture
def origin(file: Path) -> Origin:
    found = origin_of([stamp_file(str(file))])
    assert found is not None
    return found


def elsewhere(origin: Origin) -> Origin:
    """The same as a process with other mounts is told it."""
    return msgspec.structs.replace(origin, mount_namespace=origin.mount_namespace + 1)


def test_a_file_left_alone_or_only_read_is_unchanged(file: Path, origin: Origin) -> None:
    file.read_bytes()
    file.chmod(0o400)
    os.link(file, file.with_suffix(".link"))
    assert changed_files(origin) == changed_files(elsewhere(origin)) == {}


def test_a_stamp_has_the_absolute_path_as_the_kernel_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = os.fsdecode(b"\xff.bin")
    (tmp_path / name).write_bytes(b"abcd")
    monkeypatch.chdir(tmp_path)
    stamp = stamp_file(name)
    status = os.stat(name)
    assert stamp.path == os.fsencode(tmp_path) + b"/\xff.bin"
    assert (stamp.device, stamp.inode, stamp.size) == (status.st_dev, status.st_ino, 4)
    assert stamp.mtime_ns == status.st_mtime_ns


@pytest.mark.parametrize("seen_from", [lambda origin: origin, elsewhere], ids=["here", "elsewhere"])
def test_what_changed_is_told_with_both_values(file: Path, origin: Origin, seen_from: SeenFrom) -> None:
    (stamp,) = origin.files
    os.utime(file, ns=(0, 17))
    assert changed_files(seen_from(origin)) == {str(file): {"mtime_ns": [stamp.mtime_ns, 17]}}
    os.utime(file, ns=(0, stamp.mtime_ns))
    assert changed_files(origin) == {}
    file.write_bytes(b"abcdef")
    os.utime(file, ns=(0, stamp.mtime_ns))
    assert changed_files(seen_from(origin)) == {str(file): {"size": [3, 6]}}


@pytest.mark.parametrize("seen_from", [lambda origin: origin, elsewhere], ids=["here", "elsewhere"])
def test_another_file_in_its_place_is_a_change_though_size_and_time_are_the_same(
    file: Path, origin: Origin, seen_from: SeenFrom
) -> None:
    (stamp,) = origin.files
    other = file.with_suffix(".new")
    other.write_bytes(b"xyz")
    os.utime(other, ns=(0, stamp.mtime_ns))
    other.replace(file)
    found = changed_files(seen_from(origin))
    assert found == {str(file): {"inode": [stamp.inode, os.stat(file).st_ino]}}


def test_a_link_is_followed_to_what_it_means_now(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    origin = origin_of([stamp_file(str(link))])
    assert origin is not None
    assert changed_files(origin) == {}
    other = tmp_path / "other"
    other.write_bytes(b"abc")
    link.unlink()
    link.symlink_to(other)
    assert "inode" in changed_files(origin)[str(link)]


def test_a_file_on_another_file_system_is_another_file_only_where_paths_mean_the_same(
    file: Path, origin: Origin
) -> None:
    """In a container another disk may be mounted at that path, or the model be part of its image."""
    file.unlink()
    file.symlink_to("/proc/version")
    assert "device" in changed_files(origin)[str(file)]
    assert changed_files(elsewhere(origin)) == {}


def test_a_file_gone_from_a_folder_that_stays_has_changed_only_where_paths_mean_the_same(
    file: Path, origin: Origin
) -> None:
    """A checkpoint saved anew in other shards leaves nothing else to see; a container may have the tokenizer alone."""
    file.unlink()
    assert changed_files(origin) == {str(file): {"file": ["there", "gone"]}}
    assert changed_files(elsewhere(origin)) == {}
    assert changed_files(msgspec.structs.replace(origin, mount_namespace=0)) == {}


def test_a_whole_folder_that_is_gone_tells_nothing(file: Path, origin: Origin) -> None:
    shutil.rmtree(file.parent)
    assert changed_files(origin) == {}


def test_a_path_that_cannot_be_looked_at_tells_nothing(file: Path, origin: Origin) -> None:
    shutil.rmtree(file.parent)
    file.parent.write_bytes(b"")  # ENOTDIR
    assert changed_files(origin) == {}


def test_every_changed_file_is_told_in_order(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in (3, 1, 2)]
    for path in paths:
        path.write_bytes(b"")
    origin = origin_of([stamp_file(str(path)) for path in paths])
    assert origin is not None
    for path in (paths[2], paths[0]):
        path.write_bytes(b"x")
    assert list(changed_files(origin)) == [str(paths[0]), str(paths[2])]


def test_no_files_are_no_origin() -> None:
    assert origin_of([]) is None


def test_the_mount_namespace_is_the_kernels_number_of_it(origin: Origin) -> None:
    told = subprocess.run(["readlink", "/proc/self/ns/mnt"], capture_output=True, text=True, check=True).stdout.strip()
    assert told == f"mnt:[{origin.mount_namespace}]"


def test_only_known_local_file_systems_are_local(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, origin: Origin
) -> None:
    device = os.stat(file).st_dev
    kind = files._filesystems()[device]
    assert origin.local == (kind in files.LOCAL_FILESYSTEMS)
    for kind, local in (("ext4", True), ("nfs4", False), ("fuse.sshfs", False)):
        monkeypatch.setattr(files, "_filesystems", lambda kind=kind: {device: kind})
        found = origin_of(origin.files)
        assert found is not None
        assert found.local is local
    monkeypatch.setattr(files, "_filesystems", dict)
    found = origin_of(origin.files)
    assert found is not None
    assert not found.local
