"""``sum_order="fixed"``: sums, norms and runs on different numbers of data ranks, and rejected arguments."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf, sqrt
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense import collectives
from fixed_order_runs import CLIPS, FixedRun, resumed, trained
from meshstep.amp import Bf16
from meshstep.optim import SOAP, Adaptive, Bf16Compression, ByNorm, Clip, ParallelOptimizer, Sharded
from meshstep.optim.gradients.buckets import ALIGNMENT
from meshstep.optim.gradients.fixed_order import Node, TreeRanks, TreeSum, exchange, nodes_of, root_of
from meshstep.optim.norm.exact_norm import CHUNK, ExactNorm, chunk_powers, exact_summands
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

# The tree -------------------------------------------------------------------------------------------------------------


def reference_tree_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of one gradient per micro-batch in the order of the tree, computed recursively."""
    count = len(gradients)
    if count == 1:
        return gradients[0]
    half = 1 << ((count - 1).bit_length() - 1)
    return reference_tree_sum(gradients[:half]) + reference_tree_sum(gradients[half:])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 24])
def test_tree_sum_equals_recursive_reference_for_different_numbers_of_ranks(count: int) -> None:
    """The sums are bitwise equal for each number of ranks that divides the number ``count`` of micro-batches."""
    torch.manual_seed(count)
    leaves = [torch.randn(50) * 10 ** torch.randn(50) for _ in range(count)]
    wanted = reference_tree_sum(leaves)
    assert count < 4 or not torch.equal(
        wanted, sum(leaves[1:], leaves[0])
    )  # another order of additions rounds differently
    for ranks in (ranks for ranks in range(1, count + 1) if count % ranks == 0):
        per_rank, parts = count // ranks, dict[Node, Tensor]()
        for rank in range(ranks):
            tree = TreeSum()
            for number in range(rank * per_rank, (rank + 1) * per_rank):
                tree.add(number, [leaves[number].clone()])
            assert [*tree.nodes] == nodes_of(range(rank * per_rank, (rank + 1) * per_rank))
            parts |= {node: values[0] for node, values in tree.nodes.items() if values[0] is not None}
        assert torch.equal(root_of(parts, count), wanted)


def test_tree_sum_without_first_micro_batch_adds_the_others_in_the_order_of_the_tree() -> None:
    one, tiny = torch.ones(1), torch.full((1,), 2.0**-24)  # 1 + 2^-24 + 2^-24 is 1 in float32, 1 + 2^-23 is not
    parts = {Node(0, 1): one, Node(0, 2): tiny, Node(0, 3): tiny}
    expected = one + (tiny + tiny)
    assert torch.equal(root_of({node: value.clone() for node, value in parts.items()}, 4), expected)
    assert not torch.equal((one + tiny) + tiny, expected)


def test_tree_sum_with_missing_gradient_turns_negative_zero_into_zero() -> None:
    tree = TreeSum()
    tree.add(0, [torch.tensor([-0.0, 1.0]), None])
    tree.add(1, [None, None])
    ((kept, missing),) = tree.nodes.values()
    assert missing is None
    assert kept is not None
    assert not bool(kept[0].signbit())
    assert float(kept[1]) == 1.0


def test_rank_keeps_one_partial_sum_of_8_micro_batches_and_at_most_9_of_100() -> None:
    assert max(len(nodes_of(range(8 * rank, 8 * rank + 8))) for rank in range(4)) == 1
    assert max(len(nodes_of(range(100 * rank, 100 * rank + 100))) for rank in range(8)) <= 9


def test_exchange_frees_its_send_buffer_after_the_wait() -> None:
    """The returned function lives until the sums are complete, so the buffer would add to the peak memory."""
    buffers: list[weakref.ref[Tensor]] = []

    def all_to_all_single(received: Tensor, sent: Tensor, *_: Any, **__: Any) -> Any:
        received.copy_(sent)
        buffers.append(weakref.ref(sent))
        return mock.Mock()

    nodes = [Node(0, 0), Node(0, 2)]
    with mock.patch.object(dist, "all_to_all_single", all_to_all_single):
        wait = exchange([torch.ones(4), torch.ones(4)], [nodes], TreeRanks(("data",), None, 0, 1, 4))
    assert buffers[0]() is not None
    assert [node for node, _ in wait()] == nodes
    assert buffers[0]() is None


# The exact norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1, 2])
@pytest.mark.parametrize("spread", [0, 6, 20])
def test_exact_sum_is_accurate_and_equal_for_four_divisions_into_shards(norm_type: int, spread: int) -> None:
    torch.manual_seed(spread)
    values = torch.randn(1003) * 10.0 ** (-spread * torch.rand(1003))
    true = float(sum(abs(Fraction(float(value))) ** norm_type for value in values))
    found = set()
    for cuts in ((1003,), (8, 995), (504, 496, 3), (96,) * 10 + (43,)):
        powers = [chunk_powers([part], norm_type) for part in values.split(cuts)]
        top = torch.stack([power.amax() for power in powers]).amax()
        sums = [8 * exact_summands(power, top).sum(1) for power in powers]
        for ordered in (sums, sums[::-1]):
            levels = sum(ordered[1:], ordered[0])
            found.add(float((levels[0] + levels[1]) + levels[2]))
    assert len(found) == 1
    assert found.pop() == pytest.approx(true, rel=1e-14)


def test_alignment_of_shards_is_a_multiple_of_the_chunk_size() -> None:
    assert ALIGNMENT % CHUNK == 0


# Runs -----------------------------------------------------------------------------------------------------------------

RUNS = {
    "fp32": FixedRun(),
    "fp32, ZeRO-1, weights": FixedRun(states="zero1", weighted=True),
    "fp32, 12 micro-batches, p = 1": FixedRun(total=12, norm_type=1.0),
    "fp32, 8 micro-batches, p = inf": FixedRun(total=8, norm_type=inf, states="zero1"),
    "bf16, ZeRO-1 and offload, AdaGC": FixedRun(
        precision="bf16", states="zero1 offloaded", clip="adagc", weighted=True
    ),
    "bf16, ZClip, SGD": FixedRun(precision="bf16", clip="zclip", optimizer="SGD"),
    "fp16, ZeRO-1, ZClip": FixedRun(precision="fp16", states="zero1", clip="zclip"),
    "fp16, offload, thresholds of groups, overflow": FixedRun(
        precision="fp16", states="offloaded", clip="groups", fault="overflow"
    ),
    "fp32, ZeRO-1, overflow": FixedRun(states="zero1", fault="overflow", weighted=True),
    "Muon, ZeRO-1": FixedRun(optimizer="Muon", states="zero1", total=12),
    "missing micro-batch": FixedRun(states="zero1", fault="missing", weighted=True),
    "missing gradient": FixedRun(states="zero1", fault="unused"),
    "fp32, ZeRO-2, weights": FixedRun(states="zero2", weighted=True),
    "bf16, ZeRO-2 and offload, AdaGC": FixedRun(precision="bf16", states="zero2 offloaded", clip="adagc", total=12),
    "fp16, ZeRO-2, overflow": FixedRun(precision="fp16", states="zero2", fault="overflow", clip="zclip"),
    "missing micro-batch and ZeRO-2": FixedRun(states="zero2", fault="missing", weighted=True),
    "missing gradient and ZeRO-2": FixedRun(states="zero2", fault="unused", optimizer="SGD"),
}
RANKS = (1, 2, 3, 4, 6, 8)


def hashes(world: World, run: FixedRun, ranks: tuple[int, ...]) -> list[tuple[object, ...]]:
    """Train on each number of data ranks in ``ranks`` that divides the number of micro-batches ``run.total``.

    Return, per number of data ranks, the results of the ranks of one model replica. Assert that all replicas have equal
    results.
    """
    found: list[tuple[object, ...]] = []
    for data_ranks in (ranks for ranks in ranks if run.total % ranks == 0):
        of_model = run.ranks_per_replica
        results = world.run(data_ranks * of_model, trained, run, data_ranks)
        assert results == results[:of_model] * data_ranks  # the data axis is the outer one
        assert len({result[1:] for result in results}) == 1
        found.append(tuple(results[:of_model]))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_fixed_order_weights_and_states_are_bitwise_equal_on_up_to_four_data_ranks(name: str, world: World) -> None:
    run = RUNS[name]
    found = hashes(world, run, (1, 2, 3, 4))
    assert len({*found}) == 1


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor", "pipe"])
@pytest.mark.parametrize("states", ["whole", "zero1"])
def test_fixed_order_hashes_with_tensor_or_pipeline_axis_are_equal_on_1_to_3_data_ranks(
    states: str, axis: str, world: World
) -> None:
    run = FixedRun(axis=axis, states=states, clip="adagc", weighted=True, total=6)
    assert len({*hashes(world, run, (1, 2, 3))}) == 1


@pytest.mark.long
def test_fixed_order_weights_do_not_depend_on_state_placement(world: World) -> None:
    """Without ZeRO-2, each of 2 ranks exchanges two partial sums, and each of 3 ranks exchanges one."""
    runs = [FixedRun(states=states, weighted=True) for states in ("whole", "zero1", "zero2", "zero1 offloaded")]
    assert len({world.run(ranks, trained, run, ranks)[0] for ranks in (2, 3) for run in runs}) == 1


def test_states_sharded_over_one_of_two_data_axes_keep_the_fixed_order(world: World) -> None:
    whole, one, both = world.run(4, on_two_data_axes, 2)[0]
    assert whole == one == both == world.run(1, on_two_data_axes, 8)[0][0]


def on_two_data_axes(per_rank: int) -> list[int]:
    """Return the state hash with replicated states and, on four ranks, with ZeRO-1 over one data axis and ZeRO-2 over
    both."""
    found, world_size = [], 8 // per_rank
    topology = Topology(dp=2, fsdp=2, aliases={"data": ("dp", "fsdp")}) if world_size == 4 else Topology()
    registry = ProcessGroupRegistry(topology)
    placements: list[Any] = [(), Sharded("fsdp"), Sharded("data", gradients=True)] if world_size == 4 else [()]
    for states in placements:
        model = nn.Linear(13, 7)
        with torch.no_grad():
            model.weight.copy_(torch.arange(91.0).view(7, 13).sin())
            model.bias.zero_()
        declare(model, {"*": P()})
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.1, fused=True)
        optimizer = ParallelOptimizer(
            sgd, registry, max_norm=0.5, accumulation_steps=per_rank, sum_order="fixed", states=states
        )
        for local in range(per_rank):
            number = registry.global_rank * per_rank + local
            optimizer.backward(model(torch.arange(13.0).add(number).cos()).square().mean())
        optimizer.step()
        found.append(int(optimizer.state_hash()))
        if world_size == 4:
            with pytest.raises(ValueError, match="give Sharded an alias of all data axes, or leave gradients=True out"):
                ParallelOptimizer(
                    torch.optim.SGD(model.named_parameters(), lr=0.1),
                    registry,
                    accumulation_steps=per_rank,
                    sum_order="fixed",
                    states=Sharded("fsdp", gradients=True),
                )
    registry.close()
    return found


def test_exact_norm_without_any_gradient_is_zero() -> None:
    with ProcessGroupRegistry(Topology(data=1)) as registry:
        model = nn.Linear(4, 3)
        declare(model, {"*": P()})
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(sgd, registry)
        assert float(ExactNorm(optimizer.plan, registry)([None, None]).total) == 0


@pytest.mark.parametrize(
    ("states", "in_backward", "in_step"),
    [
        ((), {}, {"all_to_all_single": 1, "all_gather_single": 1}),
        (Sharded("data"), {}, {"all_to_all_single": 1, "all_gather_single": 1}),
        (Sharded("data", gradients=True), {"all_to_all_single": 1}, {"all_gather_single": 1}),
    ],
)
def test_fixed_order_exchanges_and_all_gathers_once_per_step_with_and_without_zero(
    world: World, states: Any, in_backward: dict[str, int], in_step: dict[str, int]
) -> None:
    """The other collectives of a step are those of the norm, which do not depend on the placement."""
    results = world.run(2, collectives_of_step, states)
    for backward, step, _ in results:
        assert backward == in_backward
        assert {name: count for name, count in step.items() if name != "all_reduce"} == in_step
    assert sum(numel for *_, numel in results) == (2 * 91 if states == () else 91)


def collectives_of_step(states: Any) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the numbers of collectives in a backward and in a step, and the number of stepped gradient elements."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(13, 7, bias=False)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(
            torch.optim.SGD(model.named_parameters(), lr=0.1),
            registry,
            accumulation_steps=1,
            sum_order="fixed",
            states=states,
            check_replicas=False,
        )
        for _ in range(2):
            optimizer.zero_grad()
            with collectives() as backward:
                optimizer.backward(model(torch.ones(13)).sum())
            assert model.weight.grad is None  # `FixedOrderSum.take` has moved it into the partial sums
            with collectives() as step:
                optimizer.step()
        numel = sum(param.grad.numel() for param in optimizer.param_groups[0]["params"] if param.grad is not None)
        return dict(backward), dict(step), numel


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_hundred_fixed_order_steps_have_equal_hash_on_up_to_eight_data_ranks(name: str, world: World) -> None:
    assert len({*hashes(world, replace(RUNS[name], steps=100), RANKS)}) == 1


def test_hash_with_usual_sum_order_depends_on_number_of_data_ranks(world: World) -> None:
    """Negative control of the tests of equal hashes."""
    run = FixedRun(clip="norm")
    plain = [world.run(ranks, trained, replace(run, order="any"), ranks)[0] for ranks in (1, 3)]
    assert plain[0][0] != plain[1][0]
    assert plain[0][1] != plain[1][1]


def test_fixed_order_hash_depends_on_step_count_and_clipping() -> None:
    run = FixedRun(clip="norm")
    assert len({trained(replace(run, **change), 1)[1] for change in ({}, {"steps": 4}, {"clip": "none"})}) == 3


def test_fixed_order_changes_last_norm_by_rounding_only(world: World) -> None:
    """One run has weights of micro-batches, and ZeRO-1."""
    for run in (FixedRun(), FixedRun(weighted=True, states="zero1")):
        fixed, usual = (world.run(2, trained, replace(run, order=order), 2)[0][2] for order in ("fixed", "any"))
        assert fixed == pytest.approx(usual, rel=1e-5)
        assert fixed != usual or run.total == 2


def test_fixed_order_run_resumed_on_other_rank_counts_has_hash_of_uninterrupted_run(
    world: World, tmp_path: Path
) -> None:
    run = FixedRun(precision="bf16", states="zero1", clip="zclip", steps=6, weighted=True)
    world.run(4, resumed, run, 4, tmp_path, 0, 2)
    world.run(3, resumed, run, 3, tmp_path, 2, 4)
    last = world.run(2, resumed, run, 2, tmp_path, 4, 6)[0]
    assert last[:3] == trained(run, 1)[:3]


@pytest.mark.parametrize(("norm_type", "of_weight", "of_bias"), [(1, 6, 2), (2, sqrt(6), sqrt(2)), (inf, 1, 1)])
def test_fixed_order_reports_the_norm_of_each_parameter(norm_type: float, of_weight: float, of_bias: float) -> None:
    model, optimizer = make(norm_type=norm_type, per_parameter_norms=True)
    optimizer.backward(model(torch.ones(1, 3)).sum())
    norms = [float(norm) for norm in optimizer.step().parameter_norms.values()]
    assert norms == pytest.approx([of_weight, of_bias])


# Errors ---------------------------------------------------------------------------------------------------------------


def test_fixed_order_rejects_optimizer_whose_rounding_depends_on_ranks() -> None:
    model = nn.Linear(3, 2)
    soap = SOAP(model.named_parameters())
    with pytest.raises(ValueError, match=r"SOAP with sum_order='fixed': its results depend on the number of ranks"):
        ParallelOptimizer(soap, ProcessGroupRegistry(Topology()), accumulation_steps=1, sum_order="fixed")


def make(**options: Any) -> tuple[nn.Linear, ParallelOptimizer[Any]]:
    model = nn.Linear(3, 2)
    options = {"accumulation_steps": 1, "sum_order": "fixed", **options}
    return model, ParallelOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), ProcessGroupRegistry(Topology()), **options
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation_steps": None}, "give accumulation_steps=1"),
        ({"overlap": True}, "overlap=True with sum_order='fixed'"),
        ({"average_data": False}, "average_data=False with sum_order='fixed'"),
        ({"data_parallel": nn.Linear(1, 1)}, "leave data_parallel out and don't wrap the model"),
        ({"compression": Bf16Compression()}, "compression=... with sum_order='fixed'"),
        ({"norm_type": 3.0}, "give 1, 2 or inf"),
        ({"reduction": "per_group"}, "which needs reduction='packed': leave reduction= out"),
        ({"max_norm": Adaptive(0.01)}, "which sum_order='fixed' does not compute: give a number"),
        ({"sum_order": "tree"}, "give 'any' or 'fixed'"),
        ({"states": Sharded("data", compression=Bf16Compression())}, "leave compression= out"),
    ],
)
def test_fixed_order_rejects_unsupported_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(".", r"\.")):
        make(**options)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (Adaptive(0.01), "of weights, which sum_order='fixed' does not compute"),
        (ByNorm(1.0, 3.0), r"norm_type=3\.0 with sum_order='fixed'"),
    ],
    ids=["per unit", "p = 3"],
)
def test_fixed_order_rejects_unsupported_rule_that_is_set_or_called_later(clip: Clip, message: str) -> None:
    model = nn.Linear(3, 2)
    declare(model, {"*": P()})
    adam = torch.optim.AdamW(model.parameters())
    optimizer = ParallelOptimizer(
        adam, ProcessGroupRegistry(Topology()), accumulation_steps=2, sum_order="fixed", max_norm=0.5
    )
    with pytest.raises(ValueError, match=message):
        optimizer.max_norm = clip
    assert optimizer.max_norm == 0.5
    optimizer.backward(model(torch.ones(1, 3)).sum())
    with pytest.raises(ValueError, match=r"norm_type=3\.0 with sum_order='fixed'"):
        optimizer.clip_grad_by_norm(1.0, norm_type=3.0)  # would clip in `step`, because the window is not full
    optimizer.backward(model(torch.ones(1, 3)).sum())
    stats = optimizer.step()
    assert stats is not None
    assert float(stats.total_norm) > 0.5


def test_fixed_order_rejects_gradients_that_exist_before_backward() -> None:
    model, optimizer = make()
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="parameters have gradients before the backward"):
        optimizer.backward(model(torch.ones(1, 3)).sum())
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(1, 3)).sum())
    assert float(optimizer.step()) == pytest.approx(sqrt(8))  # six weights and two biases with gradient 1


def test_fixed_order_rejects_parameter_sharded_over_data_ranks(world: World) -> None:
    assert all(world.run(2, error_of_sharded_parameter))


def error_of_sharded_parameter() -> bool:
    model = nn.Linear(3, 2)
    declare(model, {"*": P("data")})
    with pytest.raises(ValueError, match="contains the data axis 'data', but sum_order='fixed' supports only"):
        ParallelOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            ProcessGroupRegistry(Topology(data=2)),
            accumulation_steps=1,
            sum_order="fixed",
        )
    return True


def test_tested_fixed_order_runs_cover_every_clip_rule() -> None:
    assert {run.clip for run in RUNS.values()} >= CLIPS.keys() - {"none"}


def test_fixed_order_rejects_dtensor_on_every_rank(world: World) -> None:
    assert all(world.run(2, error_of_dtensor))


def error_of_dtensor() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    with pytest.raises(
        ValueError, match="weight is a DTensor, and sum_order='fixed' sums gradients of plain tensors only"
    ):
        ParallelOptimizer(
            torch.optim.SGD([("weight", weight)], lr=0.1),
            ProcessGroupRegistry(Topology(tensor=2)),
            accumulation_steps=1,
            sum_order="fixed",
        )
    return True


def test_fixed_order_rejects_unsupported_sharding_axes_also_on_ranks_without_parameters(world: World) -> None:
    assert all(world.run(8, error_of_one_stage))


def error_of_one_stage() -> bool:
    topology = Topology(pipe=2, dp=2, fsdp=2, aliases={"data": ("dp", "fsdp")})
    with ProcessGroupRegistry(topology) as registry:
        model = nn.Linear(3, 2)
        declare(model, {"*": P()})
        params: Any = [*model.named_parameters()] if registry.coordinate["pipe"] == 0 else [{"params": []}]
        with pytest.raises(ValueError, match="give Sharded an alias of all data axes, or leave gradients=True out"):
            ParallelOptimizer(
                torch.optim.SGD(params, lr=0.1),
                registry,
                accumulation_steps=1,
                sum_order="fixed",
                states=Sharded("fsdp", gradients=True),
            )
    return True


@pytest.mark.parametrize("order", ["any", "fixed"])
def test_gradients_with_main_grads_false_keep_dtype_of_bfloat16_parameters(order: Any) -> None:
    """Fixed-order sums are float32, but a bfloat16 parameter without float32 gradients accepts a bfloat16 gradient only."""
    precision = Bf16(main_grads=False)
    model = nn.Linear(3, 2)
    declare(precision.prepare(model), {"*": P()})
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = ParallelOptimizer(
        sgd, ProcessGroupRegistry(Topology()), precision=precision, accumulation_steps=1, sum_order=order
    )
    optimizer.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    optimizer.step()
    assert model.weight.grad is None or model.weight.grad.dtype == torch.bfloat16
    assert model.weight.tolist() == [[0.5] * 3] * 2
