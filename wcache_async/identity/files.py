"""Which files a state was read from, and whether they are still what they were."""

import os
from collections.abc import Iterable, Mapping, Sequence

from wcache_async.errors import Scalar
from wcache_async.manifest import FileStamp, Origin

__all__ = ["LOCAL_FILESYSTEMS", "changed_files", "origin_of", "stamp_file", "stamp_of"]

LOCAL_FILESYSTEMS = frozenset({"btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "squashfs", "tmpfs", "xfs"})
"""Filesystems that answer for their files at once, with no server or other process to wait for."""


def stamp_of(path: str, status: os.stat_result) -> FileStamp:
    """The stamp of the file at `path`, whose status that is."""
    return FileStamp(
        os.fsencode(os.path.abspath(path)), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    )


def stamp_file(path: str) -> FileStamp:
    """The file's stamp as it is now.  Raises OSError."""
    return stamp_of(path, os.stat(path))


def origin_of(files: Sequence[FileStamp]) -> Origin | None:
    """Where a state that was read from `files` comes from; None for none.  Reads /proc."""
    if not files:
        return None
    filesystems = _filesystems()
    local = all(filesystems.get(stamp.device) in LOCAL_FILESYSTEMS for stamp in files)
    return Origin(files=tuple(files), mount_namespace=_mount_namespace(), local=local)


def changed_files(origin: Origin) -> dict[str, dict[str, list[Scalar]]]:
    """The files that are not what they were, by path: what differs, and each as ``[then, now]``.

    A file that cannot be seen from here is not among them: whoever has no access to it, or has another file
    system at its place, cannot tell.  One that is gone from a folder that is still there counts as
    changed where paths mean the same as for who read it: a checkpoint saved anew in other shards.
    Blocks for as long as the file system takes.
    """
    same_namespace = origin.mount_namespace != 0 and origin.mount_namespace == _mount_namespace()
    found = {}
    for stamp in origin.files:
        differences = _differences(stamp, same_namespace)
        if differences:
            found[os.fsdecode(stamp.path)] = differences
    return found


def _differences(stamp: FileStamp, same_namespace: bool) -> dict[str, list[Scalar]]:
    try:
        now = os.stat(stamp.path)
    except FileNotFoundError:
        gone = same_namespace and os.path.isdir(os.path.dirname(stamp.path))
        return {"file": ["there", "gone"]} if gone else {}
    except OSError:
        return {}
    if now.st_dev != stamp.device and not same_namespace:
        return {}
    pairs: Iterable[tuple[str, int, int]] = (
        ("device", stamp.device, now.st_dev),
        ("inode", stamp.inode, now.st_ino),
        ("size", stamp.size, now.st_size),
        ("mtime_ns", stamp.mtime_ns, now.st_mtime_ns),
    )
    return {name: [then, value] for name, then, value in pairs if then != value}


def _mount_namespace() -> int:
    """The number of this process's mount namespace (namespaces(7)); 0 where it cannot be told."""
    try:
        return os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return 0


def _filesystems() -> Mapping[int, str]:
    """Type of each mounted file system by its device number; see proc_pid_mountinfo(5)."""
    found = {}
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                major, _, minor = before.split()[2].partition(":")
                found[os.makedev(int(major), int(minor))] = after.split()[0]
    except OSError:
        pass
    return found
