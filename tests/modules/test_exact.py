"""Export, attach in another process, bind: what comes out is the module that went in."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.modules.random_modules import build, portrait, scramble
from tests.processes import Forge, Peer
from wcache_async import Client, Daemon
from wcache_async.sources.module import ModuleSource

SEEDS = range(60)


def bind_and_portray(peer: Peer, path: str, seeds: list[int], device: str, backend: str) -> None:
    """In another process: build each module without its values, bind it, and tell what it is."""

    async def main() -> None:
        async with Client(path, backends=[backend]) as client:
            for seed in seeds:
                if device == "meta":
                    with torch.device("meta"):
                        module = build(seed)
                else:
                    module = build(seed)
                scramble(module)
                state = await client.fetch_state(f"m{seed}")
                await state.bind(module)
                peer.send(portrait(module))

    asyncio.run(main())


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("backend", ["shm_fd", "torch_ipc"])
async def test_a_bound_module_cannot_be_told_from_the_original(
    forge: Forge, short_tmp: Path, backend: str, device: str
) -> None:
    async with Daemon(short_tmp / "wcache.sock", backend=backend) as daemon:
        for seed in SEEDS:
            await daemon.load(ModuleSource(lambda seed=seed: build(seed)), name=f"m{seed}")  # type: ignore[misc]
        with forge.start(bind_and_portray, daemon.socket_path, list(SEEDS), device, backend) as child:
            for seed in SEEDS:
                got = await asyncio.to_thread(child.receive)
                expected = portrait(build(seed))
                different = {name: (expected.get(name), got.get(name)) for name in expected.keys() | got.keys()}
                assert not {n: pair for n, pair in different.items() if pair[0] != pair[1]}, f"seed {seed}"


def test_the_portrait_sees_every_kind_of_difference() -> None:
    """Among the random modules there are all the things a portrait must tell."""
    text = " ".join(" ".join(portrait(build(seed)).values()) for seed in SEEDS)
    for word in ("NON_PERSISTENT_BUFFER", "ATTRIBUTE", "grad=True", "training=False", "float4_e2m1fn_x2", "(0,"):
        assert word in text
    tied = [name for seed in SEEDS for name, told in portrait(build(seed)).items() if f"is={name} " not in told + " "]
    assert any("c" in name for name in tied)
    assert "overlaps={'" in text
