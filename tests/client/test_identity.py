"""Identity: which bytes a client has, and that a checkpoint overwritten since is never served for the new one."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn

from tests.processes import Forge, Peer
from wcache_async import Client, Daemon, blocking
from wcache_async.client import fetch
from wcache_async.errors import ConfigMismatch, LeaseNotFound, StaleState, StateReleased
from wcache_async.identity import files
from wcache_async.manifest import Origin
from wcache_async.protocol.messages import FetchDigests, FetchDigestsResponse
from wcache_async.sources.module import ModuleSource

Tensors = dict[str, torch.Tensor]


def hashed(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def overwrite(path: Path) -> None:
    """One byte of the last tensor is another, as a fine-tuned checkpoint has the same header and other bytes."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


async def load_and_tell(daemon: Daemon, path: Path, name: str) -> str:
    return (await daemon.load(path, name=name)).digest


# ------------------------------------------------------------------------------------ digests
async def test_same_header_and_other_bytes_is_a_different_state(
    daemon: Daemon, checkpoint: Path, tmp_path: Path
) -> None:
    copied, changed = tmp_path / "copied.safetensors", tmp_path / "changed.safetensors"
    shutil.copy(checkpoint, copied)
    shutil.copy(checkpoint, changed)
    overwrite(changed)
    one, same, other = [await load_and_tell(daemon, path, path.stem) for path in (checkpoint, copied, changed)]
    assert one == same
    assert one != other
    assert len(one) == 32
    async with Client(daemon.socket_path) as client:
        assert (await client.fetch_state("copied")).digest == one
        first, last = [await (await client.fetch_state(name)).fetch_digests() for name in ("copied", "changed")]
    assert sum(first[name] != last[name] for name in first) == 1


@pytest.mark.parametrize("backend", ["shm_fd", "torch_ipc"])
async def test_every_tensors_digest_is_to_be_had_whatever_carries_the_state(
    daemon: Daemon, checkpoint: Path, tensors: Tensors, backend: str
) -> None:
    await daemon.load(checkpoint, name="m")
    async with Client(daemon.socket_path, backends=[backend]) as client:
        state = await client.fetch_state("m")
        assert state.transport_backend == backend
        assert await state.fetch_digests() == {name: hashed(tensor) for name, tensor in tensors.items()}
        assert await state.fetch_digests() == {
            name: hashed(tensor) for name, tensor in (await state.import_tensors()).items()
        }
        await state.release()
        with pytest.raises(StateReleased):
            await state.fetch_digests()


async def test_a_states_digest_does_not_depend_on_what_it_was_loaded_into(short_tmp: Path, checkpoint: Path) -> None:
    digests = set()
    for backend in ("shm_fd", "torch_ipc"):
        async with Daemon(short_tmp / backend, backend=backend) as daemon:
            digests.add(await load_and_tell(daemon, checkpoint, "m"))
    assert len(digests) == 1
    assert digests != {""}


class Tied(nn.Module):
    """A tied weight, a view of another, a strided one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.b = self.a
        self.t = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("tail", self.a.detach()[1:, ::2], persistent=False)


async def test_ties_views_and_strides_have_their_digests(daemon: Daemon) -> None:
    module = Tied()
    await daemon.load(ModuleSource(lambda: module), name="m")
    async with Client(daemon.socket_path) as client:
        digests = await (await client.fetch_state("m")).fetch_digests()
    expected = {"a": module.a, "b": module.a, "t": module.t, "tail": module.get_buffer("tail")}
    assert digests == {name: hashed(tensor.detach()) for name, tensor in expected.items()}


async def test_a_published_state_has_the_digest_of_the_same_state_loaded(daemon: Daemon) -> None:
    """The daemon takes it from the arenas it was given: a client's word is not needed."""
    module = Tied()
    await daemon.load(ModuleSource(lambda: module), name="loaded")
    async with Client(daemon.socket_path) as client:
        published = await client.publish("published", module)
        loaded = await client.fetch_state("loaded")
        state = await client.fetch_state("published")
        assert published.digest == state.digest == loaded.digest
        assert await state.fetch_digests() == await loaded.fetch_digests()


async def test_a_digest_may_be_expected(daemon: Daemon, checkpoint: Path) -> None:
    digest = await load_and_tell(daemon, checkpoint, "m")
    async with Client(daemon.socket_path) as client:
        await client.fetch_state("m", expect={"digest": digest, "source": "safetensors"})
        with pytest.raises(ConfigMismatch) as caught:
            await client.fetch_state("m", expect={"digest": "0" * 32})
    assert caught.value.differences == {"digest": ["0" * 32, digest]}


async def test_digests_are_asked_for_by_a_lease_of_ones_own(daemon: Daemon, checkpoint: Path) -> None:
    await daemon.load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client, Client(daemon.socket_path) as other:
        state = await client.fetch_state("m")
        with pytest.raises(LeaseNotFound):
            await (await other._live_session()).request(FetchDigests(lease=state._lease), FetchDigestsResponse)


async def test_the_old_generation_keeps_its_digests_when_a_new_one_comes(daemon: Daemon, checkpoint: Path) -> None:
    await daemon.load(checkpoint, name="m")
    async with Client(daemon.socket_path) as client:
        old = await client.fetch_state("m")
        before = await old.fetch_digests()
        await asyncio.to_thread(overwrite, checkpoint)
        await client.load(checkpoint, "m", replace=True)
        new = await client.fetch_state("m")
        assert new.digest != old.digest
        assert await old.fetch_digests() == before != await new.fetch_digests()


# -------------------------------------------------------------------------------------- files
def fetch_and_tell(peer: Peer, path: str, allow_stale: bool) -> None:
    """In another process, through the blocking client: what it got, or why not."""
    try:
        with blocking.fetch_state("m", socket_path=path, allow_stale=allow_stale) as state:
            peer.send(state.digest)
    except StaleState as error:
        peer.send(error)


async def test_an_engine_restarted_on_an_overwritten_checkpoint_is_told_and_who_holds_the_old_is_not_disturbed(
    daemon: Daemon, checkpoint: Path, tensors: Tensors, forge: Forge
) -> None:
    loaded = await daemon.load(checkpoint, name="m")
    before = os.stat(checkpoint)

    async def restart(*, allow_stale: bool) -> object:
        with forge.start(fetch_and_tell, daemon.socket_path, allow_stale) as engine:
            return await asyncio.to_thread(engine.receive)

    async with Client(daemon.socket_path) as client:
        held = await client.fetch_state("m")
        assert await restart(allow_stale=False) == loaded.digest

        await asyncio.to_thread(overwrite, checkpoint)
        error = await restart(allow_stale=False)
        assert isinstance(error, StaleState)
        assert (error.name, error.rank, error.path, error.others) == ("m", 0, str(checkpoint), [])
        assert error.differences == {"mtime_ns": [before.st_mtime_ns, os.stat(checkpoint).st_mtime_ns]}
        assert str(checkpoint) in str(error)
        assert await restart(allow_stale=True) == loaded.digest

        got = await held.import_tensors()
        assert all(torch.equal(got[name], tensors[name]) for name in tensors)
        async with asyncio.timeout(20):  # Who was refused has no lease, and who has ended has none any more.
            while daemon.status().states[0].leases != 1:  # noqa: ASYNC110 - the kernel tells of a connection's end
                await asyncio.sleep(0)

        await client.load(checkpoint, "m", replace=True)
        assert await restart(allow_stale=False) not in (loaded.digest, None)


@pytest.mark.parametrize(("known", "limit"), [(frozenset(), 64), (None, 0)], ids=["a file server's", "many"])
async def test_files_that_may_keep_one_waiting_are_looked_at_in_a_thread(
    daemon: Daemon, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, known: frozenset[str] | None, limit: int
) -> None:
    if known is not None:
        monkeypatch.setattr(files, "LOCAL_FILESYSTEMS", known)
    monkeypatch.setattr(fetch, "_FILES_AT_ONCE", limit)
    await daemon.load(checkpoint, name="m")
    threads: list[bool] = []

    def looking(origin: Origin) -> object:
        threads.append(asyncio._get_running_loop() is None)
        return files.changed_files(origin)

    monkeypatch.setattr(fetch, "changed_files", looking)
    async with Client(daemon.socket_path) as client:
        await client.fetch_state("m")
        await asyncio.to_thread(overwrite, checkpoint)
        with pytest.raises(StaleState):
            await client.fetch_state("m")
    assert threads == [True, True]


async def test_every_shard_is_watched_and_the_index(daemon: Daemon, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        save_file({name: torch.ones(3)}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: name for name in names}}))
    await daemon.load(folder, name="m")
    async with Client(daemon.socket_path) as client:
        await client.fetch_state("m")
        for file in (folder / names[1], index):
            await asyncio.to_thread(os.utime, file, ns=(0, 5))
        with pytest.raises(StaleState) as caught:
            await client.fetch_state("m")
    assert [caught.value.path, *caught.value.others] == [str(folder / names[1]), str(index)]


async def test_a_checkpoint_saved_anew_in_other_shards_is_told(daemon: Daemon, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    await daemon.load(folder, name="m")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    async with Client(daemon.socket_path) as client:
        with pytest.raises(StaleState) as caught:
            await client.fetch_state("m")
        assert caught.value.differences == {"file": ["there", "gone"]}
        shutil.rmtree(folder)  # Nothing is there that could be newer: the cache is what is left.
        await client.fetch_state("m")


async def test_a_state_that_was_built_has_no_files_to_go_stale(daemon: Daemon) -> None:
    await daemon.load(ModuleSource(lambda: nn.Linear(2, 2)), name="m")
    async with Client(daemon.socket_path) as client:
        await client.fetch_state("m")
        assert not (await client.status()).states[0].stale


async def test_the_status_says_which_states_are_stale(daemon: Daemon, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    shutil.copy(checkpoint, other)
    await daemon.load(checkpoint, name="a")
    await daemon.load(other, name="b")
    async with Client(daemon.socket_path) as client:

        async def stale() -> dict[str, bool]:
            return {state.name: state.stale for state in (await client.status()).states}

        assert await stale() == {"a": False, "b": False}
        await asyncio.to_thread(overwrite, other)
        assert await stale() == {"a": False, "b": True}
        await client.load(other, "b", replace=True)
        assert await stale() == {"a": False, "b": False}
