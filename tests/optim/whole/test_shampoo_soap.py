"""SOAP, Shampoo and wrapped optimizers on owner ranks: updates on random layouts, collectives, and states."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_references
from home_runs import MAKES, at_homes, unbound
from hypothesis import given, settings
from hypothesis import strategies as st
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import SOAP, ParallelOptimizer, Shampoo, Sharded
from meshstep.optim.whole import Homes, WholeTensors
from meshstep.optim.whole.tensors import logical_tensors
from meshstep.parallel import P, ProcessGroupRegistry
from meshstep.parallel.layout.shard import Region
from planted import LAYOUTS, Layout, Planted, parts, run_step
from probes import collectives, no_host_reads
from properties import number_of_cases, repetitions
from torch import Tensor, nn
from whole_runs import STATES, WHOLE_LAYOUTS, alone, copies_differ, largest_error, trained
from whole_services import random_layouts, run_to
from world import World
from zero_models import small_buckets

EXACT = 1e-12
FLOAT64: dict[str, Any] = {"factor_dtype": torch.float64}

# Values ---------------------------------------------------------------------------------------------------------------


def plain(kind: Any, formula: Any, options: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> float:
    """Return the relative error of the optimizer in one process after ten steps, compared with its formula."""
    torch.manual_seed(0)
    ours = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    dense = [param.detach().clone() for param in ours.values()]
    states: list[dict[Any, Any]] = [{} for _ in ours]
    optimizer = kind(ours.items(), **options, **FLOAT64)
    for _ in range(10):
        for param in ours.values():
            param.grad = torch.randn_like(param)
        formula(dense, [param.grad for param in ours.values()], states, **options)
        optimizer.step()
    pairs = zip(ours.values(), dense, strict=True)
    return max(float((param.detach() - same).abs().max() / same.abs().max()) for param, same in pairs)


TWO = {"wide": (6, 10), "tall": (12, 4), "square": (5, 5), "bias": (7,), "gain": ()}
OPTIONS: list[tuple[Any, Any, dict[str, Any]]] = [
    (SOAP, whole_references.soap, {"precondition_frequency": 3}),
    (
        SOAP,
        whole_references.soap,
        {"betas": (0.8, 0.9), "shampoo_beta": 0.7, "precondition_frequency": 1, "max_precond_dim": 6},
    ),
    (SOAP, whole_references.soap, {"max_precond_dim": 5, "precondition_frequency": 2, "weight_decay": 0.3, "lr": 0.1}),
    (Shampoo, whole_references.shampoo, {"epsilon": 1e-6}),
    (
        Shampoo,
        whole_references.shampoo,
        {"betas": (0.8, 0.9), "precondition_frequency": 3, "epsilon": 1e-4, "grafting": "sgd"},
    ),
    (Shampoo, whole_references.shampoo, {"max_preconditioner_dim": 5, "weight_decay": 0.3, "epsilon": 1e-6, "lr": 0.1}),
    (Shampoo, whole_references.shampoo, {"grafting_beta2": 0.7, "grafting_epsilon": 0.1, "epsilon": 1e-6}),
]


@pytest.mark.parametrize(("kind", "formula", "options"), OPTIONS)
def test_soap_and_shampoo_in_single_process_match_formulas(kind: Any, formula: Any, options: dict[str, Any]) -> None:
    assert plain(kind, formula, options, TWO) <= EXACT


def test_first_shampoo_step_is_orthogonal_factor_of_gradient() -> None:
    """(G G^T)^(-1/4) G (G^T G)^(-1/4) = U V^T for G = U S V^T: an SVD gives the expected step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(5, 5, dtype=torch.float64))
    weight.grad = torch.randn(5, 5, dtype=torch.float64)
    Shampoo([weight], lr=1.0, grafting="sgd", **FLOAT64).step()
    u, _, vh = torch.linalg.svd(weight.grad)
    direction = u @ vh * (weight.grad.norm() / 5**0.5)
    torch.testing.assert_close(weight.detach(), -direction, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", [SOAP, Shampoo])
def test_soap_and_shampoo_of_stacks_and_blocks_match_separate_matrices(kind: Any) -> None:
    torch.manual_seed(0)
    shapes = {"stack": (3, 4, 6), "qkv": (12, 5)}
    fused = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}

    def apart(of: dict[str, Tensor]) -> list[Tensor]:
        return [*of["stack"], *of["qkv"].split([6, 2, 4])]

    single = [nn.Parameter(part.detach().clone()) for part in apart({**fused})]
    one, other = kind(fused.items(), lr=0.1, blocks={"q*": (6, 2, 4)}, **FLOAT64), kind(single, lr=0.1, **FLOAT64)
    for _ in range(5):
        grads = {name: torch.randn_like(param) for name, param in fused.items()}
        for name, param in fused.items():
            param.grad = grads[name]
        for matrix, grad in zip(single, apart(grads), strict=True):
            matrix.grad = grad.clone()
        one.step()
        other.step()
    for found, expected in zip(apart({**fused}), single, strict=True):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", [SOAP, Shampoo])
def test_soap_and_shampoo_keep_two_square_matrices_per_dim_of_tensor(kind: Any) -> None:
    kernel = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = kind([kernel], lr=torch.tensor(0.1))
    for _ in range(3):
        kernel.grad = torch.randn_like(kernel)
        optimizer.step()
    squares = [tuple(value.shape) for value in optimizer.state[kernel].values() if value.dim() == 2]
    assert squares == [(4, 4)] * 2 + [(3, 3)] * 2 + [(2, 2)] * 4
    assert bool(kernel.isfinite().all())


def test_owner_rank_optimizers_leave_parameter_without_gradient_unchanged() -> None:
    for make in MAKES.values():
        params = {name: nn.Parameter(torch.ones(4, 4)) for name in ("one", "two")}
        optimizer = make(params.items())
        for _ in range(3):
            params["one"].grad = torch.randn(4, 4)
            optimizer.step()
        assert bool((params["one"] != 1).any())
        assert bool((params["two"] == 1).all())


# Layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MAKES))
def test_optimizers_that_treat_shards_as_full_tensors_differ_from_dense_update(world: World, kind: str) -> None:
    for name in ("tensor", "grid"):
        layout = WHOLE_LAYOUTS[name]
        by_rank = world.run(layout.topology.world_size, trained, layout, unbound(kind))
        assert largest_error(by_rank, alone(layout, MAKES[kind])) > 1e-3


@settings(max_examples=number_of_cases(5))
@given(st.lists(st.tuples(random_layouts(), st.sampled_from(list(MAKES))), min_size=5, max_size=5))
def test_owner_rank_optimizers_match_dense_update_on_random_layouts(
    world: World, cases: list[tuple[tuple[Layout, str], str]]
) -> None:
    run = [(layout, MAKES[kind], STATES[state], 5) for (layout, state), kind in cases]
    found = world.run_each(trained, [(case[0].topology.world_size, case) for case in run])
    for ((layout, state), kind), by_rank in zip(cases, found, strict=True):
        assert largest_error(by_rank, alone(layout, MAKES[kind], 5)) <= EXACT, (layout, state, kind)
        assert copies_differ(by_rank) == [], (layout, state, kind)


# Cost of a step -------------------------------------------------------------------------------------------------------


def counted(kind: str, layout: Layout, options: dict[str, Any]) -> tuple[Counter[str], int, list[str]]:
    """Return the collectives of one step in addition to those of SGD, the number of rank sets that share this rank's
    tensors, and the states that it owns."""
    counts, kept, peers = [], [], []
    for make in (MAKES[kind], partial(torch.optim.SGD, lr=0.1, fused=True)):
        with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
            model = Planted(layout, registry.global_rank)
            optimizer = ParallelOptimizer(make(model.named_parameters()), registry, max_norm=1.0, **options)
            for step in range(3):
                run_step(model, optimizer, step)
                with collectives() as seen:
                    optimizer.step()
            counts.append(seen)
            if make is MAKES[kind]:
                inner: Any = optimizer.optimizer
                kept = at_homes(optimizer)
                peers = [one.ranks for one in inner.tensors.tensors if inner.boxes(one) and len(one.ranks) > 1]
    return counts[0] - counts[1], len(set(peers)), kept


@pytest.mark.long
def test_owner_rank_step_needs_at_most_two_all_to_alls_per_rank_set(world: World) -> None:
    """Each optimizer state is on one owner rank."""
    cases = [
        (kind, LAYOUTS[name], STATES[state])
        for kind in repetitions(list(MAKES), "steps", default=2)
        for name, state in (("tensor", "whole"), ("data", "ZeRO-1"), ("data x tensor", "ZeRO-2"))
    ]
    for (kind, layout, _), by_rank in zip(
        cases, world.run_each(counted, [(case[1].topology.world_size, case) for case in cases]), strict=True
    ):
        for count, peers, _ in by_rank:
            assert count.keys() == {"all_to_all_single"}, kind
            assert 2 <= count["all_to_all_single"] <= 2 * peers, kind
            assert kind == "adafactor" or peers == 1, "all ranks hold a part of every matrix"
        ((_, _, dense),) = world.run(1, counted, kind, LAYOUTS["one rank"], {})
        assert sum((Counter(kept) for *_, kept in by_rank), Counter()) == Counter(dense), layout


def without_reads(kind: str, layout: Layout, options: dict[str, Any]) -> None:
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        optimizer = ParallelOptimizer(MAKES[kind](model.named_parameters()), registry, max_norm=1.0, **options)
        for step in range(5):
            run_step(model, optimizer, step)
            if step < 2:
                optimizer.step()
                continue
            with no_host_reads():
                optimizer.step()


@pytest.mark.long
def test_soap_and_shampoo_steps_after_second_need_no_host_synchronization(world: World) -> None:
    """This holds in steps with and without new preconditioners."""
    cases = [
        (kind, LAYOUTS["data x tensor"], STATES[state])
        for kind in repetitions(("soap", "shampoo"), "reads")
        for state in ("whole", "ZeRO-2")
    ]
    world.run_each(without_reads, [(4, case) for case in cases])


# Overflow and precision -----------------------------------------------------------------------------------------------


def skipped(kind: str, dtype: torch.dtype, options: dict[str, Any], first: int) -> bool:
    """Return whether a run with an overflow on one rank at step ``first`` ends like a run without it."""
    layout, results = LAYOUTS["data x tensor"], []
    for overflow in (False, True):
        with ProcessGroupRegistry(layout.topology) as registry:
            model = Planted(layout, registry.global_rank, dtype)
            if "precision" in options:
                options["precision"].prepare(model, registry)
            optimizer = ParallelOptimizer(MAKES[kind](model.named_parameters()), registry, max_norm=1.0, **options)
            for step in range(7):
                if overflow and step == first:
                    optimizer.zero_grad()
                    optimizer.backward(model(2) * (torch.inf if registry.global_rank == 1 else 1.0))
                    stats = optimizer.step()
                    assert stats is not None
                    assert bool(stats.skipped)
                run_step(model, optimizer, step)
                optimizer.step()
            results.append(parts(layout, optimizer))
    return all(
        torch.equal(one.value, other.value)
        and all(
            torch.equal(one.state[key], other.state[key]) for key in one.state if isinstance(one.state[key], Tensor)
        )
        for one, other in zip(*results, strict=True)
    )


@pytest.mark.long
def test_owner_rank_optimizer_run_with_overflow_matches_run_without_skipped_step(world: World) -> None:
    """With SOAP, the first step creates bases, and the fourth and seventh renew them; skipped steps must not count."""
    cases: list[Any] = [
        (kind, dtype, options, first)
        for kind in repetitions(list(MAKES), "overflow", default=2)
        for dtype, options, first in (
            (torch.float32, {"precision": NaiveFp16(init_scale=64.0)}, 0),
            (torch.float64, STATES["ZeRO-2"], 3),
            (torch.float32, {}, 5),
        )
    ]
    for case, found in zip(cases, world.run_each(skipped, [(4, case) for case in cases]), strict=True):
        assert found == [True] * 4, case


def in_mode(kind: str, options: dict[str, Any], micros: int) -> Any:
    layout = LAYOUTS["data x tensor"]
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        model = Planted(layout, registry.global_rank)
        if "precision" in options:
            options["precision"].prepare(model, registry)
        optimizer = ParallelOptimizer(MAKES[kind](model.named_parameters()), registry, **options)
        for step in range(6):
            run_step(model, optimizer, step, micros)
            optimizer.step()
        return parts(layout, optimizer)


@pytest.mark.long
def test_owner_rank_optimizers_with_master_weights_or_accumulation_match_reference_runs(world: World) -> None:
    """Gradients are exact in bfloat16, so the master weights equal the weights of the float32 run."""
    for kind in repetitions(list(MAKES), "modes", default=2):
        modes: list[dict[str, Any]] = [{}, {"precision": Bf16()}, {"precision": Bf16(), **STATES["ZeRO-2"]}]
        plain, *masters = world.run_each(in_mode, [(4, (kind, options, 1)) for options in modes])
        bits = [torch.cat([part.value for part in own]) for own in plain]
        for by_rank in masters[:1]:
            for own, expected in zip(by_rank, bits, strict=True):
                assert torch.equal(torch.cat([part.value for part in own]), expected), kind
        assert copies_differ(masters[1]) == []
        by_rank = world.run(4, in_mode, kind, {"accumulation_steps": 2}, 2)
        assert largest_error(by_rank, alone(LAYOUTS["data x tensor"], MAKES[kind], 6, 2)) < 2e-6, kind
        assert copies_differ(by_rank) == []


# Resuming -------------------------------------------------------------------------------------------------------------

ROWS = Layout((("tensor", 2),), {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor")})
COLUMNS = Layout((("row", 2), ("col", 2)), {"up": P("row", "col"), "down": P("col"), "table": P("col")})


@pytest.mark.long
@pytest.mark.parametrize("kind", list(MAKES))
def test_owner_rank_optimizers_resume_bitwise_identically_on_another_layout(
    world: World, tmp_path: Path, kind: str
) -> None:
    """Neither layout has a data axis, so the full gradients are equal on both layouts. The owner ranks differ."""
    world.run(2, run_to, ROWS, MAKES[kind], tmp_path / "one", range(5), False, STATES["offload"])
    by_rank = world.run(
        4, run_to, COLUMNS, MAKES[kind], tmp_path / "one", range(5, 10), True, {"states": Sharded("row")}
    )
    assert largest_error(by_rank, alone(COLUMNS, MAKES[kind])) == 0
    assert copies_differ(by_rank) == []
    kept = Counter((part.key, key) for own in by_rank for part in own for key in part.state if "." in key)
    assert set(kept.values()) == {1}, "every state must have one owner rank"
    world.run(4, run_to, COLUMNS, MAKES[kind], tmp_path / "two", range(5), False, {"states": Sharded("row")})
    by_rank = world.run(2, run_to, ROWS, MAKES[kind], tmp_path / "two", range(5, 10), True, {})
    assert largest_error(by_rank, alone(ROWS, MAKES[kind])) == 0


def from_own_state(kind: str, dtype: torch.dtype, reload: bool) -> list[Any]:
    """Return this rank's shards after seven steps. If ``reload``, each rank loads its own `state_dict` into a new optimizer
    before the sixth step."""
    layout, options = LAYOUTS["data x tensor"], STATES["ZeRO-1"]
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        model = Planted(layout, registry.global_rank, dtype)

        def made() -> ParallelOptimizer[Any]:
            return ParallelOptimizer(MAKES[kind](model.named_parameters()), registry, **options)

        optimizer = made()
        for step in range(7):
            if step == 5 and reload:
                saved = optimizer.state_dict()
                optimizer = made()
                optimizer.load_state_dict(saved)
            run_step(model, optimizer, step)
            optimizer.step()
        return parts(layout, optimizer)


@pytest.mark.long
def test_owner_rank_optimizers_resume_from_own_state_dict(world: World) -> None:
    for kind in repetitions(list(MAKES), "own state", default=2):
        layout = LAYOUTS["data x tensor"]
        assert (
            largest_error(world.run(4, from_own_state, kind, torch.float64, True), alone(layout, MAKES[kind], 7)) == 0
        )
        # Here the float64 states belong to float32 parameters.
        pair = world.run_each(from_own_state, [(4, (kind, torch.float32, reload)) for reload in (False, True)])
        for one, other in zip(*pair, strict=True):
            assert all(torch.equal(a.value, b.value) for a, b in zip(one, other, strict=True)), kind


def later_group(kind: str) -> list[str]:
    """Add a group after states exist; these states must stay on their owner ranks. Return the states of this rank."""
    layout = LAYOUTS["tensor"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank, torch.float64)
        named = dict(model.named_parameters())
        first = [(name, named.pop(name)) for name in ("table", "kernel")]
        optimizer = ParallelOptimizer(MAKES[kind](first), registry)
        run_step(model, optimizer, 0)
        optimizer.step()
        before = at_homes(optimizer)
        optimizer.add_param_group({"params": list(named.items())})
        for param in named.values():
            param.requires_grad_(True)
        for step in range(1, 3):
            run_step(model, optimizer, step)
            optimizer.step()
        after = at_homes(optimizer)
        assert set(before) <= set(after)
        return after


def test_adding_param_group_moves_no_state_to_other_rank(world: World) -> None:
    for kind in MAKES:
        one, other = world.run(2, later_group, kind)
        assert one
        assert other


def frozen(kind: str) -> bool:
    layout = LAYOUTS["tensor"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        up = model.get_parameter("up").requires_grad_(False)
        before = up.detach().clone()
        optimizer = ParallelOptimizer(MAKES[kind](model.named_parameters()), registry)
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(step))
            optimizer.step()
        return torch.equal(up, before) and not optimizer.state.get(up)


def test_owner_rank_optimizers_leave_frozen_parameters_unchanged_and_create_no_state(world: World) -> None:
    for kind in MAKES:
        assert world.run(2, frozen, kind) == [True, True]


def stepped_alone(kind: str) -> str:
    layout = LAYOUTS["tensor"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        optimizer = MAKES[kind](model.named_parameters())
        if registry.global_rank == 1:
            model(0).backward()
            optimizer.step()
        with pytest.raises(ValueError, match="on rank 1") as caught:
            ParallelOptimizer(optimizer, registry)
        return str(caught.value)


def test_full_tensor_optimizer_stepped_unwrapped_on_one_rank_raises_on_every_rank(world: World) -> None:
    for kind in MAKES:
        one, other = world.run(2, stepped_alone, kind)
        assert one == other
        assert "has states on rank 1 from a step or load_state_dict without ParallelOptimizer" in one


# Options and assignment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SOAP, Shampoo])
def test_soap_and_shampoo_owner_ranks_have_balanced_cost(kind: Any) -> None:
    """Four ranks share three large matrices, and eight small matrices that together cost as much as one large matrix."""
    shapes = [(128, 128)] * 3 + [(64, 64)] * 8
    named = {f"w{index}": shape for index, shape in enumerate(shapes)}
    optimizer = kind([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    region = {
        name: Region(shape, tuple(((0, size),) for size in shape), 0, shape[0] * shape[1])
        for name, shape in named.items()
    }
    said = {name: optimizer.metadata_for(name, shape, {}, None) for name, shape in named.items()}
    everything = logical_tensors(
        [[(name, torch.float32, said[name], region[name]) for name in named] for _ in range(4)]
    )
    homes = Homes(WholeTensors([], everything, None), optimizer.boxes, optimizer.cost)
    total = sum(optimizer.cost(shape) for shape in shapes)
    assert sum(homes.load.values()) == pytest.approx(total)
    assert max(homes.load.values()) < 1.1 * total / 4


def test_soap_and_shampoo_reject_invalid_options() -> None:
    matrix = nn.Parameter(torch.randn(4, 3))
    for kind, options, says in (
        (SOAP, {"betas": (1.0, 0.5)}, r"betas=\(1\.0, 0\.5\)"),
        (SOAP, {"precondition_frequency": 0}, "precondition_frequency=0"),
        (SOAP, {"factor_dtype": torch.bfloat16}, r"torch\.float32 or torch\.float64"),
        (SOAP, {"lr": -1.0}, r"lr=-1\.0"),
        (SOAP, {"shampoo_beta": 1.0}, r"shampoo_beta=1\.0"),
        (Shampoo, {"betas": (0.9, 0.0)}, r"betas=\(0\.9, 0\.0\)"),
        (Shampoo, {"grafting": "lamb"}, "give 'adam' or 'sgd'"),
        (Shampoo, {"precondition_frequency": 0}, "precondition_frequency=0"),
    ):
        with pytest.raises(ValueError, match=says):
            kind([matrix], **options)
