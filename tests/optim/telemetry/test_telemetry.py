"""Telemetry: collectives of a measured step, labels, rejected arguments, and resuming."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import arguments
from dense import collectives
from fully_sharded import Net, data, sharded_net
from meshstep.amp import precision_of
from meshstep.optim import (
    Measurement,
    Monitor,
    NoiseScale,
    ParallelOptimizer,
    Report,
    Sharded,
    SpectralNorms,
    Telemetry,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from planted import LAYOUTS, Layout, Planted, run_step
from probes import no_host_reads
from torch import nn
from world import World

GRID, BOTH = LAYOUTS["grid"], LAYOUTS["data x tensor"]


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.named_parameters(), lr=0.25, fused=True, **options)


def alone(model: nn.Module, **options: Any) -> ParallelOptimizer[Any]:
    declare(model, {"*": P()})
    return ParallelOptimizer(sgd(model), ProcessGroupRegistry(Topology()), **options)


def last(telemetry: Telemetry) -> Measurement:
    assert telemetry.last is not None
    return telemetry.last


# Cost -----------------------------------------------------------------------------------------------------------------


def beyond_a_plain_step(layout: Layout, options: dict[str, Any]) -> list[Counter[str]]:
    """Return which collectives four steps add to those of a plain step; the second and fourth are measured."""
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank)
        optimizer = ParallelOptimizer(sgd(model), registry, max_norm=1.0)
        counts: list[Counter[str]] = []
        for step in range(6):
            if step == 2:
                telemetry = Telemetry(optimizer, every=2, **options)
            run_step(model, optimizer, step)
            with collectives() as seen, no_host_reads() if step > 1 else collectives():
                optimizer.step()
            counts.append(seen)
        assert last(telemetry).step == 4
        return [count - counts[1] for count in counts[2:]]


@pytest.mark.long
def test_measured_step_adds_expected_collectives_and_no_host_synchronization(world: World) -> None:
    ways: list[tuple[Layout, dict[str, Any], int]] = [
        (GRID, {}, 1),
        (BOTH, {"by": "parameter"}, 1),
        (BOTH, {"spectral": SpectralNorms(iterations=3)}, 1 + 2 * 3),
        (BOTH, {"noise": NoiseScale()}, 1 + 1),  # one more for the bias, whose gradient is partial over tensor
        (LAYOUTS["data"], {"noise": NoiseScale()}, 1),
    ]
    found = world.run_each(beyond_a_plain_step, [(w.topology.world_size, (w, options)) for w, options, _ in ways])
    for (layout, options, more), ranks in zip(ways, found, strict=True):
        for counts in ranks:
            measured = [sum(count.values()) for count in counts]
            assert measured == [0, more, 0, more], (layout, options)


def test_closed_telemetry_measures_nothing_and_can_be_replaced() -> None:
    model = nn.Linear(3, 2)
    optimizer = alone(model)
    telemetry = Telemetry(optimizer, every=1)
    with pytest.raises(ValueError, match=r"already has a Telemetry; call telemetry.close\(\)"):
        Telemetry(optimizer)
    telemetry.close()
    telemetry.close()
    optimizer.backward(model(torch.ones(3)).sum())
    optimizer.step()
    assert telemetry.last is None
    Telemetry(optimizer)


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "scale"), [("fp16", 2.0**16), ("bf16", 1.0)])
def test_telemetry_measures_master_weights_and_counts_underflow_of_scaled_gradients(mode: str, scale: float) -> None:
    model = nn.ParameterList([torch.tensor([3.0, 4.0, 12.0, 0.0])])
    precision_of(mode).prepare(model, ProcessGroupRegistry(Topology()))
    optimizer = alone(model, precision=mode, max_norm=0.5)
    telemetry = Telemetry(optimizer, every=1)
    # Multiplied by the loss scale 2^16, the second element is a normal number in float16, and the third is not.
    gradient = torch.tensor([0.0, 2.0**-29, 2.0**-31, 1.0])
    for _ in range(2):
        optimizer.zero_grad()
        before = optimizer.stepped_tensors()[0].tensor.detach().double().clone()
        optimizer.backward((model[0].float() * gradient).sum())
        stats = optimizer.step()
        after = optimizer.stepped_tensors()[0].tensor.detach().double()
        found = last(telemetry).to_dict()
        assert found["param_norm/total"] == pytest.approx(float(before.norm()), rel=1e-12)
        assert found["grad_norm/total"] == pytest.approx(float(stats.total_norm), rel=1e-12)
        assert found["grad_norm/total"] == pytest.approx(1.0, rel=1e-12)
        assert found["update_norm/total"] == pytest.approx(float((after - before).norm()), rel=1e-12)
        assert found["grad_zeros/total"] == 0.25
        assert found["grad_underflow/total"] == (0.5 if scale > 1 else 0.75)


def test_telemetry_measures_skipped_step_with_zero_update() -> None:
    model = nn.ParameterList([torch.tensor([3.0, 4.0])])
    optimizer = alone(model)
    telemetry = Telemetry(optimizer, every=1)
    optimizer.backward(model[0].sum() * math.inf)
    stats = optimizer.step()
    found = last(telemetry).to_dict()
    assert bool(stats.skipped)
    assert found["update_norm/total"] == found["update_ratio/total"] == 0
    assert not math.isfinite(found["grad_norm/total"])
    assert found["param_norm/total"] == 5


def test_telemetry_measures_gradients_before_explicit_clip() -> None:
    model = nn.ParameterList([torch.tensor([3.0, 4.0])])
    optimizer = alone(model)
    telemetry = Telemetry(optimizer, every=1)
    optimizer.backward(model[0].square().sum() / 2)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    found = last(telemetry).to_dict()
    assert found["grad_norm/total"] == pytest.approx(5, rel=1e-12)
    assert found["update_norm/total"] == pytest.approx(0.25, rel=1e-6)


def test_grad_zeros_counts_missing_gradient_and_leaves_out_frozen_parameter() -> None:
    model = nn.ParameterList([torch.ones(2), torch.ones(6), torch.ones(8)])
    model[2].requires_grad_(False)
    optimizer = alone(model)
    telemetry = Telemetry(optimizer, every=1, by="parameter")
    optimizer.backward((model[0] * torch.tensor([0.0, 1.0])).sum())
    optimizer.step()
    found = last(telemetry).to_dict()
    assert found["grad_zeros/total"] == 7 / 8
    assert found["grad_zeros/0"] == 1 / 2
    assert found["grad_zeros/1"] == 1
    assert math.isnan(found["grad_zeros/2"])
    assert found["param_norm/total"] == pytest.approx(4)  # includes the frozen parameter


# DTensors -------------------------------------------------------------------------------------------------------------


def on_fully_sharded() -> tuple[list[dict[str, float]], str]:
    """Return the figures of two steps, and the error for a noise scale."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        net = sharded_net(registry)
        optimizer = ParallelOptimizer(sgd(net), registry, data_parallel=net)
        with pytest.raises(ValueError, match="NoiseScale needs each data rank's gradients") as refused:
            Telemetry(optimizer, noise=NoiseScale())
        telemetry = Telemetry(optimizer, every=1, by="parameter", spectral=SpectralNorms())
        found = []
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(net(data(step).chunk(2)[registry.global_rank]).mean())
            optimizer.step()
            found.append(last(telemetry).to_dict())
        return found, str(refused.value)


def test_telemetry_with_fully_shard_matches_dense_model(world: World) -> None:
    (found, said), (other, _) = world.run(2, on_fully_sharded)
    assert found == other
    assert "the module in data_parallel= averages gradients" in said
    net = Net().double()
    optimizer = alone(net)
    telemetry = Telemetry(optimizer, every=1, by="parameter", spectral=SpectralNorms())
    for step in range(2):
        optimizer.zero_grad()
        optimizer.backward(net(data(step)).mean())
        params = [param.detach().clone() for param in net.parameters()]
        optimizer.step()
        dense = last(telemetry).to_dict()
        assert dense["param_norm/total"] == pytest.approx(float(torch.cat([p.flatten() for p in params]).norm()))
        assert found[step] == pytest.approx(dense, rel=1e-12)


# Labels ---------------------------------------------------------------------------------------------------------------


def labels(model: nn.Module, by: Any) -> list[str]:
    optimizer = alone(model)
    telemetry = Telemetry(optimizer, every=1, by=by)
    optimizer.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    return [name.partition("/")[2] for name in last(telemetry).names if name.startswith("param_norm")]


def test_telemetry_figures_are_labeled_by_parameter_layer_group_or_glob() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))

    assert labels(model(), "layer") == ["0", "1.0", "1.1", "total"]
    assert labels(model(), "parameter")[:2] == ["0.weight", "0.bias"]
    assert labels(model(), "group") == ["group_0", "total"]
    assert labels(model(), {"biases": "*.bias", "inner": "1.*"}) == ["biases", "inner", "total"]


def in_groups(layout: Layout) -> dict[str, float]:
    """Return the figures per param group. Their norms must equal the group norms of `GradStats`."""
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.groups(), lr=0.25, fused=True), registry)
        telemetry = Telemetry(optimizer, every=1, by="group")
        run_step(model, optimizer, 0)
        stats = optimizer.step()
        found = last(telemetry).to_dict()
        for group in range(2):
            assert found[f"grad_norm/group_{group}"] == pytest.approx(float(stats.group_norms[group]), rel=1e-12)
        return found


def test_telemetry_per_group_reports_norms_over_all_ranks_on_every_rank(world: World) -> None:
    for name in ("pipe, tied", "diagonal"):
        first, *others = world.run(LAYOUTS[name].topology.world_size, in_groups, LAYOUTS[name])
        assert all(other == first for other in others)


# Rejected arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "give a whole number of steps >= 1"),
        ({"by": "module"}, "give 'parameter', 'layer', 'group', or labels with globs"),
        ({"by": {"mlp": "mlp.*"}}, "matches no parameter; give a glob for one of 0.weight"),
        ({"by": {"total": "*"}}, "has the label 'total', which is reserved for the full model; give another label"),
        ({"spectral": SpectralNorms(iterations=0)}, "give a whole number >= 1"),
        ({"spectral": SpectralNorms(globs="*")}, "give a tuple of globs"),  # type: ignore[arg-type]
        (
            {"spectral": SpectralNorms(("*.weight", "head"))},
            "'head' matches no parameter; give a glob for one of 0.weight",
        ),
        ({"noise": NoiseScale()}, "NoiseScale needs at least two data ranks"),
        ({"noise": NoiseScale(decay=1.0)}, "give a number >= 0 and < 1"),
        ({"noise": NoiseScale(samples=0)}, "give a finite number > 0"),
    ],
)
def test_telemetry_rejects_invalid_arguments(options: dict[str, Any], said: str) -> None:
    optimizer = alone(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=said):
        Telemetry(optimizer, **options)
    Telemetry(optimizer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"by": {"mlp": ["0.*"]}},
            r"^by= at label 'mlp' has the list \['0.\*'\], expected one glob \(a string\); write one label per glob",
        ),
        ({"by": {"mlp": ("0.*",)}}, "^by= at label 'mlp' has the tuple"),
        ({"by": {3: "0.*"}}, "^by= has the label 3 of type int, expected a string; write"),
        (
            {"spectral": SpectralNorms((["*.weight"],))},  # type: ignore[arg-type]
            r"^SpectralNorms\(globs=...\) at index 0 has the list \['\*.weight'\], expected one glob",
        ),
    ],
)
def test_telemetry_rejects_globs_and_labels_that_are_not_strings(options: dict[str, Any], said: str) -> None:
    optimizer = alone(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(TypeError, match=said):
        Telemetry(optimizer, **options)
    Telemetry(optimizer)


@pytest.mark.parametrize(("name", "kind"), [("spectral", "SpectralNorms"), ("noise", "NoiseScale")])
def test_telemetry_rejects_true_as_an_option(name: str, kind: str) -> None:
    optimizer = alone(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(TypeError, match=rf"{name}=True: give {kind}\(\)"):
        Telemetry(optimizer, **{name: True})  # type: ignore[arg-type]


def test_telemetry_rejects_parameter_named_like_reserved_label_total() -> None:
    optimizer = alone(nn.ParameterDict({"total": nn.Parameter(torch.ones(3))}))
    for by in ("layer", "parameter"):
        with pytest.raises(ValueError, match=f"by='{by}' has the label 'total', .* give labels with globs"):
            Telemetry(optimizer, by=by)
    Telemetry(optimizer, by={"all": "*"})


def refused(options: dict[str, Any], every: int) -> str:
    """Return the text of the error that `Telemetry` raises on this rank (empty: none). If ``every`` is 0, each rank
    gives a different interval."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(sgd(model), registry, **options)
        try:
            Telemetry(optimizer, every=every or registry.global_rank + 1, noise=NoiseScale())
        except ValueError as error:
            return str(error)
        return ""


def test_telemetry_rejects_different_intervals_and_noise_scale_if_local_gradients_are_missing(world: World) -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"states": Sharded("data", gradients=True)}, 1, "leave gradients=True out"),
        ({"overlap": True}, 1, "leave overlap out"),
        ({"average_data": False}, 1, "remove that code and average_data=False"),
        ({}, 0, "every= of Telemetry"),
    ]
    found = world.run_each(refused, [(2, (options, every)) for options, every, _ in cases])
    for (_, _, said), texts in zip(cases, found, strict=True):
        assert all(said in text for text in texts), texts


# Resuming -------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"every": 2, "spectral": SpectralNorms(), "noise": NoiseScale(), "by": "parameter"}


def train(layout: Layout, folder: Path, steps: range, load: bool) -> dict[str, float]:
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(sgd(model, momentum=0.5), registry, max_norm=1.5)
        telemetry = Telemetry(optimizer, **OPTIONS)
        if load:
            telemetry.load_state_dict(load_checkpoint(folder, model, optimizer))
        for step in steps:
            run_step(model, optimizer, step)
            optimizer.step()
        if not load:
            save_checkpoint(folder, model, optimizer, extra=telemetry.state_dict())
        return last(telemetry).to_dict()


@pytest.mark.long
def test_resumed_telemetry_reports_same_figures_as_uninterrupted_run(world: World, tmp_path: Path) -> None:
    whole = world.run(4, train, BOTH, tmp_path / "whole", range(6), False)[0]
    world.run(4, train, BOTH, tmp_path / "half", range(3), False)
    assert world.run(4, train, BOTH, tmp_path / "half", range(3, 6), True)[0] == whole
    # Another layout with the same data ranks has the same losses.
    other = Layout(BOTH.axes, {**BOTH.specs, "up": P(None, "tensor"), "kernel": P("tensor")})
    moved = world.run(4, train, other, tmp_path / "half", range(3, 6), True)[0]
    assert moved == pytest.approx(whole, rel=1e-11)


def test_telemetry_rejects_state_without_required_keys() -> None:
    telemetry = Telemetry(alone(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"give the result of Telemetry\.state_dict\(\)"):
        telemetry.load_state_dict({"step": 3})


def test_telemetry_measures_added_parameters() -> None:
    model = nn.ParameterList([torch.tensor([[3.0, 0.0], [0.0, 4.0]])])
    optimizer = alone(model)
    telemetry = Telemetry(optimizer, every=1, by="parameter", spectral=SpectralNorms(iterations=40))
    added = nn.Parameter(torch.tensor([12.0]))
    declare(nn.ParameterList([added]), {"*": P()})
    for step in range(2):
        if step:
            optimizer.add_param_group({"params": [("added", added)]})
        optimizer.zero_grad()
        optimizer.backward((model[0].sum() + added.sum()) * 1e-9)
        optimizer.step()
        found = last(telemetry).to_dict()
        assert found["param_norm/total"] == pytest.approx(13 if step else 5)
        assert found["spectral_norm/0"] == pytest.approx(4)
    assert found["param_norm/added"] == 12


# Reports --------------------------------------------------------------------------------------------------------------


def test_monitor_reports_contain_telemetry_of_last_measured_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = alone(model, max_norm=1e-3)
    telemetry = Telemetry(optimizer, every=3)
    reports: list[Report] = []
    monitor = Monitor(optimizer.registry, reports.append, every=2, telemetry=telemetry)
    for step in range(8):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(3)).sum() * (math.inf if step == 5 else 1.0))
        stats = optimizer.step()
        with no_host_reads() if step % 2 == 0 else collectives():
            monitor(stats, 1.0)
    assert [report.measured_step for report in reports] == [None, 3, 6, None]
    assert reports[1].figures.keys() == {*last(telemetry).names}
    assert reports[1].scalars()["update_ratio/total"] == reports[1].figures["update_ratio/total"]
    assert reports[1].scalars()["grad_norm/total"] == reports[1].grad_norm
    assert [(report.clipped, report.skipped) for report in reports] == [(1, 0), (1, 0), (0.5, 0.5), (1, 0)]


def on_ranks_of_a_mode() -> list[float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(sgd(model), registry, **arguments(precision="fp16"))
        telemetry = Telemetry(optimizer, every=1, noise=NoiseScale(samples=2))
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(torch.full((2, 4), 1.0 + registry.global_rank)).sum() / 2)
            optimizer.step()
        return [float(value) for value in last(telemetry).values]


def test_noise_scale_with_fp16_matches_formula_of_unscaled_gradients(world: World) -> None:
    """The gradient of a weight is 1 on one rank and 2 on the other: mean square 5/2, square of the mean 9/4."""
    found, other = world.run(2, on_ranks_of_a_mode)
    assert found == other
    weights, biases = 12, 3  # the gradient of a bias is 1 on both ranks
    small, big = 2.5 * weights + biases, 2.25 * weights + biases
    signal, trace = 2 * big - small, (small - big) / (1 / 2 - 1 / 4)
    assert found[-3:] == pytest.approx([trace / signal, signal, trace], rel=1e-9)


def of_layers_that_declare_themselves(named: bool) -> tuple[list[str], str]:
    """Return the names of the figures, and the error for a pattern without match."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
        for layer in model:
            declare(layer, {"weight": P(), "bias": P()})
        torch.manual_seed(0)
        for param in model.parameters():
            nn.init.normal_(param)
        params: Any = model.named_parameters() if named else model.parameters()
        optimizer = ParallelOptimizer(torch.optim.SGD(params, lr=0.1), registry)
        telemetry = Telemetry(optimizer, every=1, by="parameter", spectral=SpectralNorms())
        optimizer.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        assert telemetry.last is not None
        names = [name.partition("/")[2] for name in telemetry.last.names if name.startswith("param_norm/")]
        with pytest.raises(ValueError, match="matches no parameter") as caught:
            ParallelOptimizer(torch.optim.SGD([*model.parameters()], lr=0.1), registry, max_norm={"1.weight": 1.0})
        return names, str(caught.value)


@pytest.mark.parametrize("named", [False, True])
def test_layers_with_equal_parameter_names_get_distinct_labels(world: World, named: bool) -> None:
    own = ["weight", "bias", "weight (2)", "bias (2)"]
    expected = ["0.weight", "0.bias", "1.weight", "1.bias"] if named else own
    for names, error in world.run(2, of_layers_that_declare_themselves, named):
        assert sorted(names) == sorted([*expected, "total"])
        assert "which declare(...) or model.named_parameters() gave to the parameters" in error


# Gradients in a fixed order -------------------------------------------------------------------------------------------


def norms_in_fixed_order(size: int) -> tuple[float, float]:
    """Return the gradient norm of 4 micro-batches over all data ranks, from `GradStats` and from `Telemetry`."""
    with ProcessGroupRegistry(Topology(data=size)) as registry:
        model = nn.Linear(3, 2)
        nn.init.ones_(model.weight)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(sgd(model), registry, accumulation_steps=4 // size, sum_order="fixed")
        telemetry = Telemetry(optimizer, every=1)
        for _ in range(4 // size):
            optimizer.backward(model(torch.ones(3)).sum())
        stats = optimizer.step()
        assert stats is not None
        return float(stats.total_norm), last(telemetry).to_dict()["grad_norm/total"]


def test_gradient_norm_with_fixed_sum_order_is_of_mean_gradient(world: World) -> None:
    for size in (1, 2, 4):
        for measured, figure in world.run(size, norms_in_fixed_order, size):
            assert measured == pytest.approx(math.sqrt(8), rel=1e-6)
            assert figure == pytest.approx(math.sqrt(8), rel=1e-6)
