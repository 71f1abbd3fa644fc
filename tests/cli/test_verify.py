"""wcache verify: what a client sees against the checkpoint, and each difference named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.commands import Wcache


def test_a_state_equals_its_checkpoint(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint):
        ran = wcache("verify", checkpoint)
        told = wcache("verify", checkpoint, "--name", "tiny", "--json").json
    assert ran.code == 0
    assert ran.out == f"tiny:0 generation 1 through shm_fd equals {checkpoint}: 4 tensors, 3.00 KiB, every byte\n"
    assert (told["equal"], told["differences"], told["tensors"], told["bytes"]) == (True, [], 4, 3076)


def test_a_cast_state_equals_its_checkpoint_cast_alike_and_no_other(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint, "--dtype", "bfloat16"):
        assert wcache("verify", checkpoint, "--dtype", "bfloat16").code == 0
        ran = wcache("verify", checkpoint)
    assert ran.code == 1
    first = f"tiny:0 generation 1 through shm_fd differs from {checkpoint} in 3 tensors; compared were 4 tensors, "
    assert ran.out.startswith(f"{first}3.00 KiB:\n")
    assert "embed.weight: dtype: checkpoint float32, client bfloat16" in ran.out
    assert ran.err == "The state says dtype=bfloat16: if it was loaded with --dtype, give that here too\n"


def test_one_altered_byte_is_named_with_its_offset(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint):
        data = bytearray(checkpoint.read_bytes())
        # safetensors lays the largest dtypes first, and of these the names in order: embed.weight ends last but
        # one, so find its bytes instead of computing where they are.
        start = bytes(data).index(load_file(checkpoint)["embed.weight"].numpy().tobytes())
        before = data[start + 1234]
        data[start + 1234] ^= 0x55
        checkpoint.write_bytes(data)
        ran = wcache("verify", checkpoint)
        told = wcache("verify", checkpoint, "--json")
    assert ran.code == told.code == 1
    assert ran.out.splitlines()[1:] == [
        f"  embed.weight: bytes at byte 1234: checkpoint 0x{before ^ 0x55:02x}, client 0x{before:02x}"
    ]
    (difference,) = told.json["differences"]
    assert (difference["tensor"], difference["what"], difference["offset"]) == ("embed.weight", "bytes", 1234)


def test_names_and_shapes_that_differ_are_all_named(
    wcache: Wcache, checkpoint: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    other = dict(tensors)
    other["added"] = torch.zeros(1)
    other["scale"] = torch.zeros(2)
    del other["empty"]
    save_file(other, tmp_path / "other.safetensors")
    with wcache.serve(checkpoint):
        ran = wcache("verify", tmp_path / "other.safetensors", "--name", "tiny")
    assert ran.code == 1
    assert ran.out.splitlines()[1:] == [
        "  added: missing: checkpoint float32[1], client none",
        "  empty: unexpected: checkpoint none, client float32[0, 4]",
        "  scale: shape: checkpoint [2], client []",
    ]


def test_a_checkpoint_that_is_gone_is_exit_code_5(wcache: Wcache, checkpoint: Path) -> None:
    with wcache.serve(checkpoint):
        checkpoint.unlink()
        ran = wcache("verify", checkpoint)
    assert (ran.code, ran.out) == (5, "")
    assert ran.err.startswith(f"wcache: cannot load {checkpoint}: No such file or directory")


@pytest.mark.parametrize(("argv", "code"), [(["verify", "/none"], 3), (["fetch", "m"], 3)])
def test_no_daemon_is_exit_code_3(wcache: Wcache, argv: list[str], code: int) -> None:
    assert wcache(*argv).code == code
