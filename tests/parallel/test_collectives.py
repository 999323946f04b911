"""The differentiable collectives: values by rank, gradients by the adjoint identity, dtypes, trivial groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense import collectives
from meshstep.parallel import (
    ProcessGroupRegistry,
    Topology,
    all_gather_to,
    all_to_all,
    broadcast_from,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from meshstep.parallel.mesh.collectives import _chunk
from torch import Tensor
from world import World

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

MAPS: dict[str, Callable[[Tensor, ProcessGroupRegistry], Tensor]] = {
    "reduce_from": lambda x, r: reduce_from(x, r, "tensor"),
    "all_gather_to 0": lambda x, r: all_gather_to(x, r, "tensor", dim=0),
    "all_gather_to -1": lambda x, r: all_gather_to(x, r, "tensor", dim=-1),
    "reduce_scatter_to 0": lambda x, r: reduce_scatter_to(x, r, "tensor", dim=0),
    "reduce_scatter_to 1": lambda x, r: reduce_scatter_to(x, r, "tensor", dim=1),
    "broadcast_from": lambda x, r: broadcast_from(x, r, "tensor", root=1),
    "all_to_all 0": lambda x, r: all_to_all(x, r, "tensor", split_dim=0),
    "all_to_all 0 1": lambda x, r: all_to_all(x, r, "tensor", split_dim=0, concat_dim=-1),
    "all_to_all 1 0": lambda x, r: all_to_all(x, r, "tensor", split_dim=1, concat_dim=0),
}


def values(dtype: torch.dtype) -> dict[str, list[float]]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype) + 10 * registry.rank("tensor")
        kept = mine.clone()
        results = {name: function(mine, registry) for name, function in MAPS.items()}
        results["copy_to"] = copy_to(mine, registry, "tensor")
        results["gather_from 1"] = gather_from(mine, registry, "tensor", dim=1)
        results["scatter_to 1"] = scatter_to(mine, registry, "tensor", dim=1)
        assert torch.equal(mine, kept)
        assert all(result.dtype is dtype for result in results.values())
        return {name: result.flatten().tolist() for name, result in results.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_return_values_computed_by_hand(world: World, dtype: torch.dtype) -> None:
    first, second = world.run(2, values, dtype)
    assert first == {
        "reduce_from": [12, 14, 16, 18],
        "all_gather_to 0": [1, 2, 3, 4, 11, 12, 13, 14],
        "all_gather_to -1": [1, 2, 11, 12, 3, 4, 13, 14],
        "gather_from 1": [1, 2, 11, 12, 3, 4, 13, 14],
        "reduce_scatter_to 0": [12, 14],
        "reduce_scatter_to 1": [12, 16],
        "scatter_to 1": [1, 3],
        "broadcast_from": [11, 12, 13, 14],
        "all_to_all 0": [1, 2, 11, 12],
        "all_to_all 0 1": [1, 2, 11, 12],
        "all_to_all 1 0": [1, 3, 11, 13],
        "copy_to": [1, 2, 3, 4],
    }
    assert second["all_to_all 0"] == second["all_to_all 0 1"] == [3, 4, 13, 14]
    assert second["all_to_all 1 0"] == [2, 4, 12, 14]
    assert second["reduce_scatter_to 0"] == [16, 18]
    assert second["reduce_scatter_to 1"] == [14, 18]
    assert second["scatter_to 1"] == [12, 14]
    assert second["broadcast_from"] == [11, 12, 13, 14]


UNEVEN: dict[str, Callable[[Tensor, ProcessGroupRegistry], Tensor]] = {
    "scatter_to": lambda x, r: scatter_to(x, r, "tensor", dim=1, uneven=True),
    "reduce_scatter_to": lambda x, r: reduce_scatter_to(x, r, "tensor", dim=1, uneven=True),
    "gather_from": lambda x, r: gather_from(x[:, : 2 - r.rank("tensor")], r, "tensor", dim=1, length=3),
    "all_gather_to": lambda x, r: all_gather_to(x[:, : 2 - r.rank("tensor")], r, "tensor", dim=1, length=3),
}


def uneven_values() -> dict[str, Any]:
    """Return values and input gradients of each map.

    The output gradients are 1, 2, 3 on rank 0, and ten times that on rank 1.
    """
    results = {}
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        for name, function in UNEVEN.items():
            mine = (torch.tensor([[1.0, 2.0, 3.0]]) + 10 * registry.rank("tensor")).requires_grad_()
            output = function(mine, registry)
            given = torch.arange(1.0, 1 + output.numel()).view_as(output) * 10 ** registry.rank("tensor")
            (grad,) = torch.autograd.grad(output, mine, given)
            results[name] = output.flatten().tolist(), grad.flatten().tolist()
        with pytest.raises(
            ValueError,
            match=r"but this rank's shard of length=7 over mesh axis tensor=2 has length [34]; give the length",
        ):
            gather_from(torch.zeros(2), registry, "tensor", dim=0, length=7)
    with (
        pytest.raises(
            ValueError,
            match="uneven=True and length= need exactly one mesh axis, found row x col; call the function once per axis",
        ),
        ProcessGroupRegistry(Topology(row=1, col=2)) as registry,
    ):
        scatter_to(torch.zeros(3), registry, "row", "col", dim=0, uneven=True)
    return results


def test_collectives_of_uneven_shards_return_hand_computed_values_and_gradients(world: World) -> None:
    first, second = world.run(2, uneven_values)
    assert first == {  # shards of lengths 2 and 1
        "scatter_to": ([1, 2], [1, 2, 10]),
        "reduce_scatter_to": ([12, 14], [1, 2, 10]),
        "gather_from": ([1, 2, 11], [1, 2, 0]),
        "all_gather_to": ([1, 2, 11], [11, 22, 0]),
    }
    assert second == {
        "scatter_to": ([13], [1, 2, 10]),
        "reduce_scatter_to": ([16], [1, 2, 10]),
        "gather_from": ([1, 2, 11], [30, 0, 0]),
        "all_gather_to": ([1, 2, 11], [33, 0, 0]),
    }


def scattered_and_gathered_rows() -> None:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        rows = torch.arange(6.0).view(3, 2)
        shard = scatter_to(rows, registry, "tensor", dim=0, uneven=True)
        assert torch.equal(shard, rows.chunk(2)[registry.rank("tensor")])
        assert torch.equal(gather_from(shard, registry, "tensor", dim=0, length=3), rows)


def test_uneven_shards_along_first_dim_keep_length_of_other_dims(world: World) -> None:
    world.run(2, scattered_and_gathered_rows)


def adjoints(differentiate_again: bool) -> None:
    """Check <f(x), y> = <x, f*(y)>, summed over all ranks, where backward computes f*. If ``differentiate_again``, check
    instead that the backward of f* computes f."""
    with ProcessGroupRegistry(Topology(tensor=dist.get_world_size())) as registry:
        torch.manual_seed(registry.global_rank)
        for name, function in MAPS.items():
            x = torch.randn(12, 8, dtype=torch.float64).t().requires_grad_()
            output = function(x, registry)
            y = torch.randn_like(output, requires_grad=True)
            (grad,) = torch.autograd.grad(output, x, y, create_graph=differentiate_again)
            if differentiate_again:
                (again,) = torch.autograd.grad(grad, y, x.detach())
                torch.testing.assert_close(again, output.detach(), rtol=1e-12, atol=1e-12)
            elif name == "reduce_from":  # f(x) is equal on all ranks, so backward returns y without a sum
                assert torch.equal(grad, y)
            else:
                products = torch.stack([(output * y).sum(), (x * grad).sum()]).detach()
                dist.all_reduce(products)
                torch.testing.assert_close(products[0], products[1], rtol=1e-12, atol=1e-12)


def test_collective_backward_is_adjoint_of_forward_except_for_reduce_from(world: World) -> None:
    world.run(4, adjoints, False)


def test_collective_backward_can_be_differentiated(world: World) -> None:
    # Only two ranks, because torch imports sympy for second derivatives, which takes one second per rank.
    world.run(2, adjoints, True)


def replicated_gradients() -> None:
    with ProcessGroupRegistry(Topology(tensor=4)) as registry:
        rank = registry.rank("tensor")
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)  # replicated, because ranks have equal seeds
        weight = torch.randn(4, 8, dtype=torch.float64)
        (expected,) = torch.autograd.grad((x * weight).tanh().sum(), x)
        # Ranks share the work between `copy_to` and `reduce_from`.
        part = scatter_to(weight, registry, "tensor", dim=1)
        shares = copy_to(x, registry, "tensor")[:, 2 * rank : 2 * rank + 2] * part
        (grad,) = torch.autograd.grad(reduce_from(shares.tanh().sum(), registry, "tensor"), x)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
        # Ranks share the work between `scatter_to` and `gather_from`.
        pieces = (scatter_to(x, registry, "tensor", dim=-1) * part).tanh()
        (grad,) = torch.autograd.grad(gather_from(pieces, registry, "tensor", dim=1).sum(), x)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
        # `sum` gives an expanded gradient, and `scale` has 0 dims.
        scale = torch.tensor(2.0, requires_grad=True)
        torch.autograd.backward(copy_to(scale, registry, "tensor").expand(3).sum())
        assert scale.grad == 12.0


def test_gradients_of_replicated_tensors_match_unsharded_computation(world: World) -> None:
    world.run(4, replicated_gradients)


def over_two_axes() -> list[float]:
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        mine = torch.tensor([float(registry.global_rank)])
        joined: list[float] = all_gather_to(mine, registry, "col", "row", dim=0).tolist()
        assert reduce_from(mine, registry, "row", "col").item() == 6.0
        assert scatter_to(torch.arange(4.0), registry, "row", "col", dim=0).item() == registry.global_rank
        return joined


def test_collectives_over_several_axes_use_topology_order(world: World) -> None:
    assert world.run(4, over_two_axes) == [[0.0, 1.0, 2.0, 3.0]] * 4


def uneven(axes: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """Send a section of length i * j along dim 1 from rank i to rank j, so rank 0 sends and receives nothing.

    Return both rows of the result, which are equal.
    """
    with ProcessGroupRegistry(Topology(row=2, col=2, aliases={"grid": ("row", "col")})) as registry:
        rank, sizes = registry.rank(*axes), [registry.rank(*axes) * other for other in range(registry.size(*axes))]
        rows = torch.tensor([10.0 * rank + other for other, size in enumerate(sizes) for _ in range(size)])
        x = rows.repeat(2, 1).double().requires_grad_()  # [2, rows]
        output = all_to_all(x, registry, *axes, split_dim=1, split_sizes=sizes, concat_sizes=sizes)
        y = torch.arange(output.numel(), dtype=torch.float64).view_as(output) + 100 * rank
        (grad,) = torch.autograd.grad(output, x, y)
        products = torch.stack([(output * y).sum(), (x * grad).sum()]).detach()
        dist.all_reduce(products)
        assert products[0] == products[1]
        assert torch.equal(all_to_all(output, registry, *axes, split_dim=1, split_sizes=sizes, concat_sizes=sizes), x)
        return output[0].tolist(), output[1].tolist()


@pytest.mark.parametrize("axes", [("col",), ("row", "col"), ("grid",)])
def test_all_to_all_sends_uneven_and_empty_sections(world: World, axes: tuple[str, ...]) -> None:
    for rank, found in enumerate(world.run(4, uneven, axes)):
        ranks = 2 if axes == ("col",) else 4
        index = rank % ranks
        expected = [10.0 * other + index for other in range(ranks) for _ in range(other * index)]
        assert found == (expected, expected)


def heads_and_tokens() -> None:
    """Exchange 3 heads and 5 tokens: from all heads of some tokens to some heads of all tokens, and back."""
    with ProcessGroupRegistry(Topology(cp=2)) as registry:
        full = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)  # [batch, head, token, feature]
        heads, tokens = [2, 1], [1, 4]
        mine = full.split(tokens, 2)[registry.rank("cp")].clone().requires_grad_()
        whole = all_to_all(mine, registry, "cp", split_dim=1, concat_dim=-2, split_sizes=heads, concat_sizes=tokens)
        assert torch.equal(whole, full.split(heads, 1)[registry.rank("cp")])
        weight = torch.randn(full.shape, generator=torch.Generator().manual_seed(0))
        again = all_to_all(
            whole * weight.split(heads, 1)[registry.rank("cp")],
            registry,
            "cp",
            split_dim=2,
            concat_dim=1,
            split_sizes=tokens,
            concat_sizes=heads,
        )
        expected = weight.split(tokens, 2)[registry.rank("cp")]
        assert torch.equal(again, mine * expected)
        (grad,) = torch.autograd.grad(again.sum(), mine)
        assert torch.equal(grad, expected)


def test_all_to_all_changes_the_sharded_dim(world: World) -> None:
    world.run(2, heads_and_tokens)


def test_collectives_over_one_rank_return_the_input_itself() -> None:
    registry = ProcessGroupRegistry(Topology(tensor=1))
    x = torch.randn(3, 4, requires_grad=True)
    functions = dict(MAPS)
    functions["broadcast_from"] = lambda x, r: broadcast_from(x, r, "tensor")
    functions["copy_to"] = lambda x, r: copy_to(x, r, "tensor")
    functions["scatter_to"] = lambda x, r: scatter_to(x, r, "tensor", dim=1)
    for function in functions.values():
        assert function(x, registry) is x


def rejected() -> None:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        with pytest.raises(
            ValueError, match=r"dim 1 of a tensor of shape \(2, 3\) has length 3.*pad the dim to a multiple"
        ):
            reduce_scatter_to(torch.zeros(2, 3), registry, "tensor", dim=-1)
        with pytest.raises(ValueError, match="is not a multiple of 2, the size of mesh axis tensor"):
            scatter_to(torch.zeros(3), registry, "tensor", dim=0)
        with pytest.raises(ValueError, match="out of range"):
            gather_from(torch.zeros(2), registry, "tensor", dim=1)
        with pytest.raises(
            ValueError, match=r"root=2 is not an index in the group over mesh axis tensor; give an index from 0 to 1"
        ):
            broadcast_from(torch.zeros(2), registry, "tensor", root=2)
        rows = torch.zeros(3, 2)
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "is not a multiple of 2, the size of mesh axis tensor"),
            ({"split_sizes": [1, 2]}, "give concat_sizes too"),
            (
                {"split_sizes": [1, 1], "concat_sizes": [1, 1]},
                r"split_sizes \[1, 1\] add up to 2, but dim 0 .*\(3, 2\) has length 3",
            ),
            (
                {"split_sizes": [3], "concat_sizes": [3, 3]},
                r"split_sizes is \[3\]; give one length >= 0 per rank of the group of 2",
            ),
            ({"split_sizes": [4, -1], "concat_sizes": [4, 4]}, "give one length >= 0"),
            (
                {"split_sizes": [1, 2], "concat_sizes": [7, 8]},
                r"concat_sizes\[[01]\] is [78], but the section that this rank keeps has length [12] along dim 0; give the "
                "lengths that the ranks of the group pass in split_sizes for this rank",
            ),
            (
                {"concat_dim": 1, "split_sizes": [1, 2], "concat_sizes": [5, 5]},
                r"concat_sizes\[[01]\] is 5, but the section that this rank keeps has length 2 along dim 1; give the "
                "lengths of the ranks' tensors along dim 1",
            ),
        ]
        for wrong, said in cases:
            with pytest.raises(ValueError, match=said):
                all_to_all(rows, registry, "tensor", split_dim=0, **wrong)


def test_collectives_reject_bad_input_on_every_rank(world: World) -> None:
    world.run(2, rejected)


def counted() -> dict[str, dict[str, int]]:
    result = {}
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        for name, function in MAPS.items():
            x = torch.ones(4, 4, requires_grad=True)
            with collectives() as seen:
                torch.autograd.backward(function(x, registry).sum())
            result[name] = dict(seen)
    return result


def test_collectives_issue_at_most_one_operation_in_forward_and_one_in_backward(world: World) -> None:
    counts = world.run(2, counted)[0]
    both = {"all_gather_single": 1, "reduce_scatter_single": 1}
    assert counts == {
        "reduce_from": {"all_reduce": 1},
        "all_gather_to 0": both,
        "all_gather_to -1": both,
        "reduce_scatter_to 0": both,
        "reduce_scatter_to 1": both,
        "broadcast_from": {"broadcast": 1, "reduce": 1},
        **{key: {"all_to_all_single": 2} for key in ("all_to_all 0", "all_to_all 0 1", "all_to_all 1 0")},
    }


def test_uneven_chunks_match_torch_chunk_and_are_empty_on_remaining_ranks() -> None:
    """A dim of 5 over 4 ranks has chunks of 2, 2, 1 and 0 elements; `torch.chunk` returns only the first three."""
    for length in range(12):
        chunks = [_chunk(length, mock.Mock(axes=("tensor",), size=4, rank=rank)) for rank in range(4)]
        wanted = [len(chunk) for chunk in torch.arange(length).chunk(4)] if length else [0]
        assert [own for _, own in chunks] == wanted + [0] * (4 - len(wanted))
