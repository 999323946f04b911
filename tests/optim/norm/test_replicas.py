"""The check for replicas that differ between ranks: what it accepts, and the parameter and mesh axis that its error
names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.optim import ReplicaMismatchError
from meshstep.optim.norm.replicas import CHUNK, TensorHash, _find_minorities
from meshstep.parallel import ProcessGroupRegistry, Topology
from optimizers import optimizer_for, snapshot
from scenarios import SCENARIOS, backward, batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from world import World


def disturbed(what: str) -> str:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        model, optimizer = optimizer_for("data x tensor", registry, check_replicas=True)
        moved = registry.coordinate["tensor"] == 1
        if what == "parameter" and moved:
            with torch.no_grad():
                model.norm.weight[2] += 1e-6  # type: ignore[union-attr, index, operator]
        before = snapshot(model, optimizer)
        backward(SCENARIOS["data x tensor"], model, optimizer, batch(0))
        if what == "gradient" and moved:
            model.down.bias.grad[0] *= -1  # type: ignore[union-attr, index, operator]
        try:
            optimizer.step()
        except ReplicaMismatchError as error:
            unchanged = all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
            return ", ".join(map(str, error.mismatches)) + ("" if unchanged else " and stepped")
        return "no error"


def test_replica_check_accepts_equal_replicas(world: World) -> None:
    assert world.run(4, disturbed, "nothing") == ["no error"] * 4


def test_replica_check_names_diverged_gradient(world: World) -> None:
    assert world.run(4, disturbed, "gradient") == ["down.bias: the gradient differs along axis 'tensor'"] * 4


def test_replica_check_names_diverged_parameter(world: World) -> None:
    for report in world.run(4, disturbed, "parameter"):
        assert report.startswith("norm.weight: the parameter differs along axis 'tensor'")
        assert "stepped" not in report


class Largest(TorchDispatchMode):
    """Records the size in bytes of the largest tensor created in this mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in before:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_hashing_creates_no_tensor_larger_than_one_chunk(dtype: torch.dtype) -> None:
    """The largest tensor that hashing creates has eight bytes per word of a chunk."""
    tensor = torch.ones(3 * CHUNK + 5, dtype=dtype)
    with Largest() as memory:
        TensorHash(torch.device("cpu"))([tensor])
    assert memory.nbytes == 8 * CHUNK


@pytest.mark.parametrize(
    ("hashes", "ranks"),
    [
        ([7, 7, 7], None),
        ([7, 7, 8], (2,)),
        ([7, 8], (0, 1)),
        ([8, 7, 7, 9], (0, 3)),
        ([7, 7, 8, 8, 9], (0, 1, 2, 3, 4)),  # a tie: 7 and 8 are the most frequent hashes
    ],
)
def test_replica_check_reports_ranks_without_most_frequent_hash_or_all_on_tie(
    hashes: list[int], ranks: tuple[int, ...] | None
) -> None:
    held: Any = [{"parameter": {(): bits}} for bits in hashes]
    assert [*_find_minorities("parameter", held)] == ([] if ranks is None else [(ranks, len(hashes))])
