"""Errors of operations that a CUDA graph of a step cannot repeat, and `poll`, which reports errors of replays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_graph import CpuGraph, capturing
from graph_runs import Run, Setting
from meshstep.amp import Bf16, Fp32, GradScaler, NaiveFp16
from meshstep.optim import (
    SOAP,
    Clip,
    ClipState,
    Fingerprints,
    GradStats,
    HalfStates,
    Monitor,
    Norms,
    Offloaded,
    PerParameter,
    Replayable,
    Skip,
    Telemetry,
    clip_grad_norm_,
)
from meshstep.optim.whole import whole
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from precision_modes import differences, snapshot
from torch import Tensor
from world import World

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _torchs_kernels(torchs_kernels: None) -> None:
    """Use torch's kernels, because `CpuGraph` records and replays torch operators."""


def run_of(steps: int = 3, *, inner: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Run:
    precision = options.pop("precision", Fp32())
    fused = {"fused": True} if inner is torch.optim.AdamW else {}
    run = Run(Setting(precision, options, lambda params, lr: inner(params, lr=lr, **fused)), CPU)
    for number in range(steps):
        micro_batches = options.get("accumulation_steps", 1)
        for _ in range(micro_batches):
            run.optimizer.backward(run.loss(run.batch(3 + number)))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


def wrapped(params: Any, lr: Any) -> torch.optim.Optimizer:
    return whole(torch.optim.Adafactor(params, lr=float(lr)))


def half_a_window() -> Run:
    return run_of(accumulation_steps=2)


def with_a_rate_that_is_a_number() -> Run:
    run = run_of()
    run.optimizer.param_groups[0]["lr"] = 0.25
    return run


def with_telemetry() -> Run:
    run = run_of()
    Telemetry(run.optimizer)
    return run


REFUSED: dict[str, tuple[Callable[[], Run], str]] = {
    "the first step": (lambda: run_of(0), "no step was made since .*, and the first step checks gradients on the host"),
    "copies": (
        lambda: run_of(check_replicas=True),
        "check_replicas=True synchronizes the host",
    ),
    "fingerprints": (
        lambda: run_of(check_replicas=Fingerprints()),
        r"check_replicas=Fingerprints\(\.\.\.\) counts steps in Python",
    ),
    "veto": (
        lambda: run_of(commit=lambda: True),
        "commit= is called in Python: leave it out",
    ),
    "replay": (lambda: run_of(states=Replayable()), "Replayable reads on the host whether an update is skipped"),
    "telemetry": (with_telemetry, r"Telemetry counts and measures steps in Python: close\(\) it"),
    "raise": (lambda: run_of(on_nonfinite="raise"), "on_nonfinite='raise' reads the norm.*call poll"),
    "offloaded": (lambda: run_of(states=Offloaded(0.5)), "Offloaded waits for the GPU and steps on the CPU"),
    "half states": (lambda: run_of(states=HalfStates()), "HalfStates seeds its random bits on the host"),
    "rounding": (lambda: run_of(precision=Bf16(stochastic_rounding=True)), "stochastic rounding seeds its random bits"),
    "RMSprop": (
        lambda: run_of(inner=torch.optim.RMSprop),
        "RMSprop decides on the host whether to skip: create RMSprop with fused",
    ),
    "SOAP": (lambda: run_of(inner=SOAP), "SOAP counts steps on the host"),
    "whole": (lambda: run_of(inner=wrapped), "AnyOptimizer reads the skip flag on the host"),
    "a rate": (with_a_rate_that_is_a_number, r"the lr of param group 0 is 0.25.*lr=torch.tensor\(0.25, device='cpu'\)"),
    "half a window": (
        half_a_window,
        "1 of accumulation_steps=2 micro-batches have run, and replays would not count them",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_capturing_unsupported_step_raises_with_reason(what: str) -> None:
    make, message = REFUSED[what]
    run = make()
    run.optimizer.backward(run.loss(run.batch(5)))
    before = snapshot(run.model, run.optimizer)
    assert re.search(message, "; ".join(run.optimizer.not_captured()))
    calls: list[Callable[[], object]] = [run.optimizer.step, lambda: run.optimizer.clip_grad_by_norm(1.0)]
    for call in calls:
        with capturing(), pytest.raises(RuntimeError, match=rf"can't be captured in a CUDA graph here: .*{message}"):
            call()
    assert differences(before, snapshot(run.model, run.optimizer)) == []
    while run.optimizer.step() is None:  # the failed capture must not affect later steps
        run.optimizer.backward(run.loss(run.batch(6)))
    assert differences(before, snapshot(run.model, run.optimizer)) != []


def test_not_captured_returns_no_reasons_for_capturable_step() -> None:
    run = Run(Setting(Fp32(), {}), CPU)
    run.steps(range(3, 5))
    assert run.optimizer.not_captured() == []


def test_capture_error_lists_both_of_two_reasons() -> None:
    run = run_of(states=Offloaded(1.0), on_nonfinite="raise")
    with capturing(), pytest.raises(RuntimeError, match=r"on_nonfinite='raise'.*; Offloaded waits"):
        run.optimizer.step()


def test_capturing_step_of_grad_scaler_raises() -> None:
    run = run_of()
    scaler = GradScaler(ProcessGroupRegistry(Topology()), device="cpu")
    torch.autograd.backward(scaler.scale(run.loss(run.batch(5))))
    with capturing(), pytest.raises(RuntimeError, match="a GradScaler calls step\\(\\): leave the scaler out"):
        scaler.step(run.optimizer)


class ByLast(Clip):
    """Clip to the norm of the previous step."""

    last: Tensor | float = 1.0

    def factors(self, norms: Norms) -> Tensor:
        before, self.last = self.last, norms.total
        return (before / norms.total).clamp(max=1.0)


def test_capturing_clip_rule_with_python_state_raises() -> None:
    run = run_of(max_norm=ByLast())
    run.optimizer.backward(run.loss(run.batch(5)))
    with capturing(), pytest.raises(RuntimeError, match=r"ByLast assigns a new object to last.*changed in place"):
        run.optimizer.step()


def test_capturing_first_call_of_clip_grad_norm_raises() -> None:
    """The first call of `clip_grad_norm_` copies numbers from the host."""
    param = torch.nn.Parameter(torch.ones(3))
    declare(torch.nn.ParameterList([param]), {"*": P()})
    param.grad = torch.ones(3)
    clip, registry = ClipState(PerParameter(1.0)), ProcessGroupRegistry(Topology())
    with capturing(), pytest.raises(RuntimeError, match=r"no recent step \(or clip_grad_norm_ call\) created"):
        clip_grad_norm_([param], clip, registry)
    clip_grad_norm_([param], clip, registry)
    with capturing():
        clip_grad_norm_([param], clip, registry)


def test_capturing_monitor_call_raises() -> None:
    run = run_of()
    assert run.optimizer.last_stats is not None
    with capturing(), pytest.raises(RuntimeError, match="call it after each replay"):
        Monitor(ProcessGroupRegistry(Topology()))(run.optimizer.last_stats)


@pytest.mark.parametrize("warmed_up", [False, True])
def test_capturing_weighted_micro_batch_requires_tensor_weight_and_earlier_eager_use(warmed_up: bool) -> None:
    run = run_of()
    if warmed_up:
        run.optimizer.backward(run.loss(run.batch(5)), weight=torch.tensor(2.0))
        run.optimizer.step()
        run.optimizer.zero_grad()
    wrong: list[float | Tensor] = [3, 3.0] if warmed_up else [3, torch.tensor(3.0)]
    for weight in wrong:
        with (
            capturing(),
            pytest.raises(RuntimeError, match=r"captures a micro-batch with weight=.*give weight= a 0-dim tensor"),
        ):
            run.optimizer.backward(run.loss(run.batch(5)), weight=weight)
        assert run.optimizer._window.micro_batches == 0
    if warmed_up:
        with capturing():
            run.optimizer.backward(run.loss(run.batch(5)), weight=torch.tensor(3.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reduction": "per_group"},
            "this CUDA graph capture needs a constant tensor that no recent step",
        ),
        ({"max_norm": 1.0}, r"a parameter of shape \(3,\) has its first gradient in a step that is captured"),
    ],
    ids=["constants", "states"],
)
def test_capturing_first_gradient_of_parameter_raises(options: dict[str, Any], message: str) -> None:
    """Constants and states for a new gradient would be copied from the host, or created again in every replay."""
    run = Run(Setting(Fp32(), options), CPU)
    for _ in range(2):
        run.optimizer.backward(run.loss(run.batch(5)))
        run.model.get_parameter("last.bias").grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.optimizer.backward(run.loss(run.batch(5)))
    before = snapshot(run.model, run.optimizer)
    with capturing(), pytest.raises(RuntimeError, match=message):
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert differences(before, snapshot(run.model, run.optimizer)) == []
    run.steps(range(5, 7))


def undecided() -> str:
    """Capture on two ranks after only skipped steps, when replicas have not been compared yet. Return the error."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        run = Run(Setting(NaiveFp16(init_scale=2.0**8), {"max_norm": 0.5}), CPU, registry)
        run.steps(range(9, 11))
        run.optimizer.zero_grad()
        run.optimizer.backward(run.loss(run.batch(12)))
        with capturing(), pytest.raises(RuntimeError) as caught:
            run.optimizer.step()
        run.optimizer.step()  # compares the replicas
        run.replays(range(13, 14), CpuGraph())
        return str(caught.value)


def test_capture_before_replicas_were_compared_raises(world: World) -> None:
    for message in world.run(2, undecided):
        assert "replicas have not been compared yet in a step with a finite norm" in message


# poll -------------------------------------------------------------------------------------------------------------------


def replayed_overflows(on_nonfinite: Skip, count: int) -> tuple[Run, CpuGraph, GradStats]:
    run = Run(Setting(Fp32(), {"on_nonfinite": on_nonfinite}), CPU)
    run.steps(range(3, 5))
    graph, static = CpuGraph(), run.batch(9)
    run.optimizer.zero_grad()
    with graph.captured():
        run.optimizer.backward(run.loss(static))
        stats = run.optimizer.step()
    assert stats is not None
    for _ in range(count):
        graph.replay()
    return run, graph, stats


def test_poll_after_replays_raises_error_of_skipped_steps() -> None:
    run, graph, _ = replayed_overflows(Skip(max_consecutive=5), 4)
    run.optimizer.poll()
    graph.replay()
    with pytest.raises(FloatingPointError, match=r"^5 steps in a row were skipped.*that are not finite now: first"):
        run.optimizer.poll()
    assert run.optimizer.skipped_steps == 5


def test_stats_of_captured_step_contain_values_of_replay() -> None:
    run, graph, stats = replayed_overflows(Skip(), 1)
    assert run.optimizer.last_stats is stats
    assert stats.found_inf == 1
    assert run.optimizer.grad_norm is not None
    assert not run.optimizer.grad_norm.isfinite()
    assert "replay" in (GradStats.__doc__ or "")
    graph.replay()


def test_poll_reports_backward_that_bypassed_optimizer() -> None:
    run = Run(Setting(NaiveFp16(init_scale=2.0**8)), CPU)
    run.steps(range(3, 5))
    run.optimizer.zero_grad()
    run.loss(run.batch(5)).backward()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"The steps with these gradients were skipped; write optimizer.backward"):
        run.optimizer.poll()
    run.optimizer.poll()  # reported only once


def polled(overflows: bool) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        run = Run(Setting(Fp32(), {"on_nonfinite": Skip(max_consecutive=2)}), CPU, registry)
        run.steps(range(9, 11) if overflows else range(12, 14))
        try:
            run.optimizer.poll()
        except FloatingPointError as error:
            return str(error)
        return ""


def test_poll_raises_same_error_on_every_rank(world: World) -> None:
    assert world.run(2, polled, False) == ["", ""]
    first, second = world.run(2, polled, True)
    assert first == second
    assert first.startswith("2 steps in a row")
