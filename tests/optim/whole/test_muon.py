"""Muon, compared with torch, its formula, and the dense update on random layouts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_references
from dtensors import registry_of
from hypothesis import given, settings
from hypothesis import strategies as st
from meshstep.amp import ApexFp16, Bf16, NaiveFp16
from meshstep.optim import (
    HalfStates,
    Muon,
    ParallelOptimizer,
    Sharded,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard, unshard
from planted import LAYOUTS, Layout, Planted, parts, run_step
from properties import number_of_cases
from torch import Tensor, nn
from whole_runs import STATES, WHOLE_LAYOUTS, alone, copies_differ, largest_error, muon, step_both, trained
from whole_services import beyond_sgd, changed_by_overflow, in_mode, random_layouts, run_to, without_host_reads
from world import World

EXACT = 1e-12


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_matches_torch(rule: Any, nesterov: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.8, "nesterov": nesterov}
    options |= {"adjust_lr_fn": rule, "ns_steps": 4}
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((6, 10), (12, 4), (5, 5))]
    theirs = [nn.Parameter(param.detach().clone()) for param in ours]
    one, other = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(10):
        step_both(one, ours, other, theirs)
    for param, same in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, same, rtol=1e-6, atol=1e-6)


def first_step(registry: ProcessGroupRegistry, scales: dict[str, float], **options: Any) -> dict[str, Tensor]:
    """Return the full updates for gradients that are multiplied by ``scales``."""
    generator, params, losses = torch.Generator().manual_seed(3), dict[str, nn.Parameter](), []
    for name, scale in scales.items():
        factors = shard(torch.randn(6, 10, generator=generator), P("tensor"), registry)
        params[name] = nn.Parameter(torch.zeros_like(factors))
        annotate(params[name], P("tensor"), name)
        losses.append((params[name] * (factors * scale)).sum())
    optimizer = ParallelOptimizer(
        Muon(params.items(), lr=1.0, ns_dtype=torch.float32, **options), registry, max_norm=1.0
    )
    optimizer.backward(torch.stack(losses).sum())
    optimizer.step()
    updates = {name: unshard(param.detach(), P("tensor"), registry) for name, param in params.items()}
    registry.close()
    return updates


def updates_of_scaled_gradients(scales: dict[str, float], **options: Any) -> dict[str, Tensor]:
    return first_step(ProcessGroupRegistry(Topology(tensor=2)), scales, **options)


def test_muon_update_of_matrix_is_not_affected_by_gradient_spike_of_another(world: World) -> None:
    """Because of the spike, clipping multiplies the other gradient by 1e-13."""
    quiet = world.run(2, updates_of_scaled_gradients, {"other": 1.0, "spike": 1.0})
    spiked = world.run(2, updates_of_scaled_gradients, {"other": 1.0, "spike": 2.0**40})
    assert all(float(update.norm()) > 1.5 for updates in quiet for update in updates.values())
    for before, after in zip(quiet, spiked, strict=True):
        for name, update in after.items():
            torch.testing.assert_close(update, before[name], rtol=1e-4, atol=1e-4)
            assert torch.equal(update, spiked[0][name])
    alone = first_step(ProcessGroupRegistry(Topology(tensor=1)), {"other": 1.0, "spike": 2.0**40})
    assert all(torch.equal(update, alone[name]) for name, update in spiked[0].items())
    floored = partial(updates_of_scaled_gradients, eps=1e-7)
    assert float(world.run(2, floored, {"other": 1.0, "spike": 2.0**40})[0]["other"].norm()) < 0.1


def test_muon_does_not_change_matrix_with_zero_gradient() -> None:
    updates = first_step(ProcessGroupRegistry(Topology(tensor=1)), {"zero": 0.0, "other": 1.0})
    assert torch.equal(updates["zero"], torch.zeros(6, 10))


@pytest.mark.parametrize("eps", [-1e-7, float("inf"), float("nan")])
def test_muon_rejects_invalid_eps(eps: float) -> None:
    with pytest.raises(ValueError, match=r"eps=.*: give a finite number >= 0, such as 0 \(the default\) or 1e-7"):
        Muon([nn.Parameter(torch.ones(2, 2))], eps=eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_update_does_not_depend_on_strides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    full = torch.randn(6, 10, dtype=dtype)
    ways = [full.clone(), full.t().contiguous().t(), torch.zeros(6, 20, dtype=dtype)[:, ::2].copy_(full)]
    params = [nn.Parameter(way) for way in ways]
    optimizer: Any = Muon(params, lr=0.1)
    for skipped in (0.0, 1.0, 0.0):
        before, grad = [param.detach().clone() for param in params], torch.randn(6, 10, dtype=dtype)
        for param in params:
            param.grad = grad.clone() if skipped == 0 else grad / 0
        optimizer.found_inf = torch.tensor(skipped)
        optimizer.step()
        assert all(torch.equal(one, param) == bool(skipped) for one, param in zip(before, params, strict=True))
    for param in params[1:]:
        torch.testing.assert_close(param, params[0])


def test_muon_in_single_process_matches_formula() -> None:
    torch.manual_seed(0)
    ours = {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64))
        for name, shape in {"w": (6, 10), "tall": (12, 4), "bias": (7,), "embed": (9, 4)}.items()
    }
    plain = {name: param.detach().clone() for name, param in ours.items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in ours}
    optimizer = Muon(ours.items(), lr=0.03, ns_dtype=None, adamw={"lr": 0.01, "weight_decay": 0.3})
    for _ in range(10):
        grads = {name: torch.randn_like(param) for name, param in ours.items()}
        for name, param in ours.items():
            param.grad = grads[name]
        optimizer.step()
        plain_step: Any = whole_references.muon
        plain_step(*([one[name] for name in ("w", "tall")] for one in (plain, grads, states)), lr=0.03)
        plain_step = partial(whole_references.adamw, lr=0.01, weight_decay=0.3)
        plain_step(*([one[name] for name in ("bias", "embed")] for one in (plain, grads, states)))
    for name, param in ours.items():
        torch.testing.assert_close(param.detach(), plain[name], rtol=EXACT, atol=EXACT)


def test_muon_of_stacks_blocks_and_convolutions_matches_separate_matrices() -> None:
    torch.manual_seed(0)
    shapes = {"stack": (3, 4, 6), "qkv": (12, 5), "heads": (8, 5), "kernel": (6, 2, 3, 3)}
    fused = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    apart = [
        *(nn.Parameter(part.clone()) for part in fused["stack"].detach()),
        *(nn.Parameter(part.clone()) for part in fused["qkv"].detach().split([6, 2, 4])),
        *(nn.Parameter(part.clone()) for part in fused["heads"].detach().chunk(4)),
        nn.Parameter(fused["kernel"].detach().flatten(1).clone()),
    ]
    options: dict[str, Any] = {"lr": 0.1, "ns_dtype": None}
    one = Muon(fused.items(), blocks={"qkv": (6, 2, 4), "he*": 4}, **options)
    other = Muon(apart, **options)
    for _ in range(3):
        for param in fused.values():
            param.grad = torch.randn_like(param)
        grads = {name: param.grad for name, param in fused.items() if param.grad is not None}
        of = [
            *grads["stack"],
            *grads["qkv"].split([6, 2, 4]),
            *grads["heads"].chunk(4),
            grads["kernel"].flatten(1),
        ]
        for param, grad in zip(apart, of, strict=True):
            param.grad = grad.clone()
        one.step()
        other.step()
    found = [
        *fused["stack"].detach(),
        *fused["qkv"].detach().split([6, 2, 4]),
        *fused["heads"].detach().chunk(4),
        fused["kernel"].detach().flatten(1),
    ]
    for whole, part in zip(found, apart, strict=True):
        torch.testing.assert_close(whole, part.detach(), rtol=EXACT, atol=EXACT)


# Layouts --------------------------------------------------------------------------------------------------------------


def unbound(params: Iterable[Any]) -> Muon:
    """Disable binding, so that every shard is treated as a matrix. This is wrong."""
    optimizer = muon(params, blocks={})
    optimizer.bind = lambda rows, registry: None  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("name", ["tensor", "grid", "fused blocks", "sequence", "2.5-D", "3-D"])
def test_muon_that_treats_shards_as_matrices_differs_from_dense_update(world: World, name: str) -> None:
    layout = WHOLE_LAYOUTS[name]
    by_rank = world.run(layout.topology.world_size, trained, layout, unbound)
    assert largest_error(by_rank, alone(layout, muon)) > 1e-3


@settings(max_examples=number_of_cases(6))
@given(st.lists(random_layouts(), min_size=5, max_size=5))
def test_muon_matches_dense_update_on_random_layouts(world: World, cases: list[tuple[Layout, str]]) -> None:
    run = [(layout, muon, STATES[state], 4) for layout, state in cases]
    found = world.run_each(trained, [(case[0].topology.world_size, case) for case in run])
    for (layout, state), by_rank in zip(cases, found, strict=True):
        assert largest_error(by_rank, alone(layout, muon, 4)) <= EXACT, (layout, state)
        assert copies_differ(by_rank) == [], (layout, state)


class Net(nn.Module):
    """Unsharded matrices, a stack and vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 6)
        self.experts = nn.Parameter(torch.randn(2, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        return torch.einsum("bi,eij->bej", x, self.experts).square().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def fully_sharded(tensor: int) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    axes = {"data": 2, **({"tensor": tensor} if tensor > 1 else {})}
    with registry_of(tuple(axes.items())) as registry:
        net = Net(6 + tensor).double()
        if tensor > 1:
            plan: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(net, registry.device_mesh(*axes)["tensor"], plan)
        mesh = registry.device_mesh(*axes)["data"]
        fully_shard(net.first, mesh=mesh)
        fully_shard(net, mesh=mesh)
        annotate(net.experts, P(), "experts")
        optimizer = ParallelOptimizer(
            Muon(net.named_parameters(), lr=0.1, ns_dtype=None), registry, data_parallel=net, max_norm=0.5
        )
        for step in range(6):
            optimizer.zero_grad()
            optimizer.backward(net(batch(registry.rank("data"), step)))
            optimizer.step()
        return {
            name: param.full_tensor() if isinstance(param, DTensor) else param.detach()
            for name, param in net.named_parameters()
        }


@pytest.mark.parametrize("tensor", [1, 2])
def test_muon_with_fully_shard_matches_dense_update(world: World, tensor: int) -> None:
    net = Net(6 + tensor).double()
    optimizer = Muon(net.named_parameters(), lr=0.1, ns_dtype=None)
    for step in range(6):
        optimizer.zero_grad()
        (sum(net(batch(rank, step)) for rank in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    for found in world.run(2 * tensor, fully_sharded, tensor):
        for name, param in net.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=EXACT, atol=EXACT)


# Collectives, host synchronization, skipped steps ---------------------------------------------------------------------


def test_muon_step_needs_at_most_two_all_to_alls(world: World) -> None:
    for name, state, expected in (
        ("one rank", "whole", {}),
        ("tensor", "whole", {"all_to_all_single": 2}),  # shards to the owner ranks, then updates back
        ("data", "whole", {"all_to_all_single": 1}),  # parameters are replicated: only updates are sent
        ("data", "ZeRO-1", {"all_to_all_single": 2}),  # slices of the gradients to the owner ranks, then updates back
        ("data x tensor", "ZeRO-2", {"all_to_all_single": 2}),
    ):
        layout = WHOLE_LAYOUTS[name]
        for found in world.run(layout.topology.world_size, beyond_sgd, layout, [muon], STATES[state]):
            assert found == [expected], (name, state)


@pytest.mark.parametrize("state", ["whole", "ZeRO-2"])
def test_third_muon_step_needs_no_host_synchronization(world: World, state: str) -> None:
    world.run(4, without_host_reads, LAYOUTS["data x tensor"], [muon], STATES[state])


def test_overflow_on_one_rank_leaves_muon_unchanged(world: World) -> None:
    layout = LAYOUTS["data x tensor"]
    cases: list[Any] = [
        (layout, [muon], torch.float32, {}),
        (layout, [muon], torch.float64, STATES["ZeRO-2"]),
        (layout, [muon], torch.float32, {"precision": NaiveFp16(init_scale=64.0)}),
        (layout, [muon], torch.float32, {"precision": ApexFp16(opt_level="O3")}),
    ]
    assert world.run_each(changed_by_overflow, [(4, case) for case in cases]) == [[[[]]] * 4] * 4


@pytest.mark.long
@pytest.mark.parametrize("precision", [Bf16(), NaiveFp16(init_scale=64.0)], ids=["bf16", "fp16"])
def test_muon_with_master_weights_matches_dense_update_and_replicas_stay_equal(world: World, precision: Any) -> None:
    """Gradients are exact in both dtypes, also scaled, so the master weights differ from the dense run only by float32
    rounding."""
    layout = LAYOUTS["data x tensor"]
    by_rank = world.run(4, in_mode, layout, [muon], {"precision": precision, **STATES["ZeRO-2"]})
    assert largest_error([own for (own,) in by_rank], alone(layout, muon, 5)) < 2e-4
    by_rank = world.run(4, in_mode, layout, [muon], {"precision": precision, "accumulation_steps": 2}, 2)
    assert largest_error([own for (own,) in by_rank], alone(layout, muon, 5, 2)) < 2e-4
    assert copies_differ([own for (own,) in by_rank]) == []


# Resuming -------------------------------------------------------------------------------------------------------------


def test_muon_resumes_on_another_layout(world: World, tmp_path: Path) -> None:
    """Neither layout has a data axis, so the full gradients are equal on both layouts."""
    rows = Layout((("tensor", 2),), {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor")})
    columns = Layout((("row", 2), ("col", 2)), {"up": P("row", "col"), "down": P("col"), "table": P("col")})
    world.run(2, run_to, rows, muon, tmp_path / "one", range(4), False, STATES["offload"])
    by_rank = world.run(4, run_to, columns, muon, tmp_path / "one", range(4, 10), True, {"states": Sharded("row")})
    assert largest_error(by_rank, alone(columns, muon)) <= EXACT


# Rejected arguments, and copies ---------------------------------------------------------------------------------------


def test_muon_rejects_invalid_options() -> None:
    matrix, vector = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    with pytest.raises(ValueError, match=r"momentum=1\.5"):
        Muon([matrix], momentum=1.5)
    with pytest.raises(ValueError, match="give 'original'"):
        Muon([matrix], adjust_lr_fn="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"contains beta; the options are"):
        Muon([matrix], adamw={"beta": 1})
    with pytest.raises(ValueError, match=r"Muon would step some parameters .* and AdamW others"):
        Muon([matrix]).add_param_group({"params": [nn.Parameter(torch.randn(2, 2)), vector]})
    optimizer = Muon([{"params": [vector], "algorithm": "muon"}])
    vector.grad = torch.ones(4)
    with pytest.raises(ValueError, match="is not a matrix"):
        optimizer.step()
    wrong_blocks: list[int | list[int]] = [3, 0, -1, []]
    for blocks in wrong_blocks:
        optimizer = Muon([("qkv", matrix)], blocks={"qkv": blocks})
        with pytest.raises(ValueError, match="a list of sizes >= 1 that add up to"):
            optimizer.step()
    with pytest.raises(ValueError, match="is 'adam': give 'muon' or 'adamw'"):
        Muon([{"params": [matrix], "algorithm": "adam"}])


def refused(states: Any) -> str:
    with ProcessGroupRegistry(LAYOUTS["tensor"].topology) as registry:
        model = Planted(LAYOUTS["tensor"], registry.global_rank)
        precision: Any = Bf16(stochastic_rounding=True) if states is None else "fp32"
        if states is None:
            precision.prepare(model, registry)
        with pytest.raises(ValueError, match="uses collectives in each call") as error:
            ParallelOptimizer(muon(model.named_parameters()), registry, precision=precision, states=states or ())
        return str(error.value)


def test_tensor_parallel_muon_rejects_half_states_and_stochastic_rounding(world: World) -> None:
    assert all("HalfStates" in text for text in world.run(2, refused, HalfStates()))
    assert all("stochastic rounding" in text for text in world.run(2, refused, None))


def test_muon_step_raises_if_a_parameter_was_removed_from_a_param_group() -> None:
    param = nn.Parameter(torch.randn(4, 3))
    param.grad = torch.ones(4, 3)
    optimizer = Muon([param, nn.Parameter(torch.randn(2, 2))])
    optimizer.step()
    del optimizer.param_groups[0]["params"][1]
    with pytest.raises(RuntimeError, match="in the param groups of Muon changed from 2 to 1;"):
        optimizer.step()


def twice() -> str:
    """Return the error for two parameters of one name on this rank."""
    with ProcessGroupRegistry(Topology(pipe=1)) as registry:
        copies = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
        for param in copies:
            annotate(param, P(), "table")
        with pytest.raises(ValueError, match="table") as error:
            ParallelOptimizer(Muon(copies, lr=0.1), registry)
        return str(error.value)


def test_muon_rejects_two_parameters_with_same_name(world: World) -> None:
    text = world.run(1, twice)[0]
    assert "two parameters on rank 0 have the name table (full shape (4, 3))" in text
    assert "to tie them, make them one parameter" in text


def several(layout: Layout) -> Any:
    """Use Muon for matrices and AdamW for the other parameters, as one optimizer."""
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank, torch.float64)
        held = dict(model.named_parameters())
        matrices = Muon([(n, p) for n, p in held.items() if p.dim() > 1], lr=0.1, ns_dtype=None, blocks={"up": 2})
        rest = [(n, p) for n, p in held.items() if p.dim() < 2]
        vectors = torch.optim.AdamW(rest, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer = ParallelOptimizer([matrices, vectors], registry, states=Sharded("data"))
        for step in range(10):
            run_step(model, optimizer, step)
            optimizer.step()
        return parts(layout, optimizer)


def test_muon_combined_with_adamw_matches_dense_update(world: World) -> None:
    layout = LAYOUTS["data x tensor"]
    assert largest_error(world.run(4, several, layout), alone(layout, muon)) <= EXACT


def test_muon_assigns_parameters_by_name_shape_or_group_option() -> None:
    params = {name: nn.Parameter(torch.randn(4, 3)) for name in ("w", "embed.weight", "lm_head.weight", "heads.q")}
    params["bias"] = nn.Parameter(torch.randn(4))
    groups = Muon([*params.items()], lr=0.5, adamw={"lr": 0.1}).param_groups
    assert [(group["algorithm"], group["param_names"], group["lr"]) for group in groups] == [
        ("muon", ["w", "heads.q"], 0.5),
        ("adamw", ["embed.weight", "lm_head.weight", "bias"], 0.1),
    ]
    (group,) = Muon([{"params": [params["w"]], "algorithm": "adamw", "lr": 0.2}], adamw={"lr": 0.1}).param_groups
    assert (group["algorithm"], group["lr"]) == ("adamw", 0.2)


def test_copied_muon_continues_identically() -> None:
    torch.manual_seed(0)
    params = {"up": nn.Parameter(torch.randn(8, 3)), "bias": nn.Parameter(torch.randn(4))}
    for param in params.values():
        param.grad = torch.randn_like(param)
    optimizer = muon(params.items())
    optimizer.step()
    same = copy.deepcopy(optimizer)
    for param in (param for group in same.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    for param in params.values():
        param.grad = torch.ones_like(param)
    same.step()
    optimizer.step()
    copied = [param for group in same.param_groups for param in group["params"]]
    for one, other in zip(params.values(), copied, strict=True):
        assert torch.equal(one, other)


def test_muon_keeps_frozen_parameters_and_steps_matrix_with_gradient_on_one_rank(world: World) -> None:
    for frozen, moved in world.run(2, frozen_and_missing):
        assert frozen
        assert moved


def frozen_and_missing() -> tuple[bool, bool]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(2, 3)) for name in ("frozen", "missing", "there")})
        model["frozen"].requires_grad_(False)
        for name, param in model.items():
            annotate(param, P("tensor"), name)
        optimizer = ParallelOptimizer(Muon(model.named_parameters(), lr=0.1, ns_dtype=None), registry)
        loss = model["there"].square().sum()
        if registry.rank("tensor") == 0:
            loss = loss + (model["missing"] * torch.arange(6).view(2, 3)).sum()
        optimizer.backward(loss)
        optimizer.step()
        there = not torch.equal(model["missing"].detach(), torch.ones(2, 3))
        return torch.equal(model["frozen"].detach(), torch.ones(2, 3)), there
