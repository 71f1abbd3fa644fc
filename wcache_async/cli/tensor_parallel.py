"""The options of tensor parallelism, and the states that they make of one checkpoint."""

import os
from typing import Annotated

import typer

__all__ = ["TpPlanFile", "TpSize", "share_of", "shares"]

Scalar = None | bool | int | float | str

TpSize = Annotated[
    int | None,
    typer.Option(
        "--tp-size",
        min=1,
        metavar="T",
        show_default=False,
        help="Cut MODEL, of safetensors, for tensor parallelism: ranks 0 to T-1 hold a share each.",
    ),
]
TpPlanFile = Annotated[
    str,
    typer.Option(
        "--tp-plan",
        metavar="FILE",
        show_default=False,
        help='How to cut: JSON, patterns of names to styles, e.g. {"layers.*.mlp.up_proj": "colwise"}; styles are '
        "colwise, rowwise, replicated, packed_colwise. Default: transformers' plan for MODEL's config.json.",
    ),
]


def shares(tp_size: int | None, tp_plan: str, *, rank: int, source: str) -> list[tuple[int, dict[str, Scalar]]]:
    """The rank of each state that one checkpoint makes, and the options its source takes for it."""
    if tp_size is not None and rank:
        raise typer.BadParameter(f"--tp-size {tp_size} makes ranks 0 to {tp_size - 1}", param_hint="--rank")
    numbers = [rank] if tp_size is None else range(tp_size)
    return [(number, share_of(tp_size, tp_plan, rank=number, source=source)) for number in numbers]


def share_of(tp_size: int | None, tp_plan: str, *, rank: int, source: str) -> dict[str, Scalar]:
    """The options of a source for one rank's share; none without `tp_size`."""
    if tp_size is None:
        if tp_plan:
            raise typer.BadParameter("it needs --tp-size", param_hint="--tp-plan")
        return {}
    if rank >= tp_size:
        raise typer.BadParameter(f"--tp-size {tp_size} makes ranks 0 to {tp_size - 1}", param_hint="--rank")
    if source not in ("auto", "safetensors"):
        raise typer.BadParameter(f"only safetensors are cut, not what --source {source} loads", param_hint="--tp-size")
    if tp_plan and not os.path.isfile(tp_plan):
        raise typer.BadParameter(f"there is no file {tp_plan}", param_hint="--tp-plan")
    plan = os.path.abspath(tp_plan) if tp_plan else ""
    return {"tp_size": tp_size, "tp_rank": rank, "tp_plan": plan}
