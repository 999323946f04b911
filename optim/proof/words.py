"""What a finding says: the mistake that is the likeliest, and what to write."""

from __future__ import annotations

from collections.abc import Sequence

from ...parallel.layout.spec import P
from .findings import Cause


def words(cause: Cause, axes: Sequence[str], factor: float, spec: P | None, where: str | None) -> str:
    """Args: spec: What it is instead. where: What localises a wrong backward."""
    over = " x ".join(map(repr, axes)) or "some axis"
    either = " or ".join(map(repr, axes)) or "no axis of this size"
    becomes = "" if spec is None else f"; it is {spec}"
    text = {
        "split, not declared": f"each rank of {over} has a piece of its own{becomes}",
        "declared split, but a copy": f"but the ranks of {over} have the same values and move together{becomes}",
        "a sum is missing": (
            f"each rank of {over} has only a term of its gradient: an all-reduce over {over} is missing in backward "
            f"(`copy_to` where a copy enters split work), or nobody has declared P(partial=...){becomes}"
        ),
        "counted several times": (
            f"the gradient is {factor:.4f} times too large: summed twice, or over {either}, along which it is complete"
            f"{becomes}"
        ),
        "divided too often": (
            f"the gradient is {1 / factor if factor else 0:.4f} times too small: averaged over {either}, where it is to be "
            "summed"
        ),
        "added on every rank": (
            f"the loss has it once for each rank of {over}, as a bias that every rank adds before the sum over {over}: add "
            "it after the sum, or on one rank; or its gradient is averaged where it is to be summed"
        ),
        "held by others": f"other ranks hold it than its spec says{becomes}",
        "no gradient comes": "the loss depends on it, and no gradient comes: it is detached on the way",
        "copies differ": f"its values differ along {over}, where they are declared copies: start from the same weights, "
        "or declare it split where each rank has its own, as experts are",
        "backward is wrong": "no layout makes its gradient the derivative of the loss"
        + (f": ranks of {over} that should have the same gradient have others" if axes else ""),
        "forward differs": (
            f"ranks of {over} compute different things that should be one and the same: a sum or a gather over {over} is "
            "missing in forward or made over another axis, copies of a parameter differ, or ranks have other batches"
        ),
    }[cause]
    return text if where is None or cause == "copies differ" else f"{text} (see {where})"
