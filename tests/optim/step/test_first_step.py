"""Checks of the first step, and gradients that bypass `optimizer.backward` in the first and in later steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.amp import GradScaler, Mode, precision_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from small_models import parameter
from torch import nn
from world import World
from zero_models import ZERO1, ZERO2


def bypassed(mode: Mode, options: dict[str, Any], zeros: bool, in_window: bool = False) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        precision_of(mode).prepare(model, registry)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(inner, registry, precision=mode, **arguments(**options))
        before = model.weight.detach().clone()
        factor = 0.0 if zeros else 1.0
        for _ in range(2):
            if registry.rank("data") == 0 or not options or in_window:  # a rank may have no loss
                with optimizer.window() if in_window else nullcontext():
                    (model(torch.ones(2, 4)).float().sum() * factor).backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                assert torch.equal(before, model.weight)
                return str(error)
        return "no error"


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("fp16", {}),
        ("fp16", {"max_norm": 0.5}),
        ("fp16_naive", ZERO1),
        ("fp32", {"accumulation_steps": 2}),
        ("bf16", {"accumulation_steps": 2, **ZERO1}),
    ],
)
def test_bypassing_optimizer_backward_with_loss_scale_or_accumulation_raises_in_first_step(
    world: World, mode: Mode, options: dict[str, Any]
) -> None:
    for text in world.run(2, bypassed, mode, options, False):
        assert text.startswith("there are gradients, but ")
        assert "optimizer.backward(loss)" in text
        assert "with optimizer.window()" in text
    # Zero gradients are allowed, because a step on them creates states before loading.
    assert world.run(2, bypassed, mode, options, True) == ["no error"] * 2


@pytest.mark.parametrize(("mode", "options"), [("fp16", {}), ("fp16_naive", ZERO1)])
def test_unscaled_loss_within_window_context_in_first_step_raises(
    world: World, mode: Mode, options: dict[str, Any]
) -> None:
    for text in world.run(2, bypassed, mode, options, False, True):
        assert text.startswith("there are gradients, but their loss was not multiplied by the loss scale")
        assert "with optimizer.scale_loss(loss) as the loss" in text
    assert world.run(2, bypassed, mode, options, True, True) == ["no error"] * 2


def bypassed_on_one_rank(mode: Mode) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        precision_of(mode).prepare(model, registry)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry, precision=mode)
        loss = model(torch.ones(2, 4)).float().sum()
        if registry.rank("data") == 1:
            optimizer.backward(loss)
        else:
            loss.backward()
        with pytest.raises(RuntimeError, match="first step") as caught:
            optimizer.step()
        return str(caught.value)


def test_bypassing_optimizer_backward_on_one_rank_raises_error_with_micro_batch_counts(world: World) -> None:
    """The other rank scaled its loss, so the error is about the micro-batches, not about the loss scale."""
    for text in world.run(2, bypassed_on_one_rank, "fp16"):
        assert "the number of micro-batches is 0 on rank 0 and 1 on rank 1" in text


def bypassed_later(mode: Mode, options: dict[str, Any], by_optimizer: bool, in_window: bool = False) -> list[Any]:
    """Call ``loss.backward()`` after four correct windows: on rank 0, or within `window()` on both ranks (``in_window``).

    Return [error, number of steps between the first such call and the error].
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        precision_of(mode).prepare(model, registry)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(inner, registry, precision=mode, max_norm=0.5, **arguments(**options))
        micro_batches = options.get("accumulation_steps", 1)

        def window(bypass: bool) -> None:
            for _ in range(micro_batches):
                loss = model(torch.ones(2, 4)).float().square().mean()
                if not bypass:
                    optimizer.backward(loss)
                elif in_window:
                    with optimizer.window():
                        loss.backward()
                elif registry.global_rank == 0:  # a rank may have no loss
                    loss.backward()
                optimizer.step()

        for _ in range(3):
            window(False)
            optimizer.zero_grad()
        if "accumulation_steps" in options:
            assert optimizer.step(final=True) is None, "no window is open"
        window(False)
        before, found = model.weight.detach().clone(), []
        for step in range(40):
            optimizer.zero_grad() if by_optimizer else model.zero_grad()
            try:
                window(True)
            except RuntimeError as error:
                found = [str(error), step]
                break
        assert torch.equal(before, model.weight)
        optimizer.zero_grad()
        for _ in range(20):
            window(False)
            optimizer.zero_grad()
        assert not torch.equal(before, model.weight)
        return found


@pytest.mark.parametrize(
    ("mode", "options", "late", "by_optimizer"),
    [
        ("fp16", {}, 16, True),
        ("fp16", {}, 16, False),
        ("fp16", {"overlap": True}, 16, True),
        ("fp16", {"reduction": "per_group"}, 16, True),
        ("fp16", {"on_nonfinite": "raise"}, 0, True),
        ("fp16_naive", ZERO1, 16, True),
        ("fp16_naive", ZERO1, 16, False),
        ("fp16_naive", ZERO2, 16, True),
        ("fp32", {"accumulation_steps": 2}, 0, True),
        ("fp32", {"accumulation_steps": 2}, 0, False),
        ("bf16", {"accumulation_steps": 2, **ZERO1}, 0, True),
    ],
)
def test_bypassing_optimizer_backward_with_loss_scale_or_accumulation_raises_in_later_step(
    world: World, mode: Mode, options: dict[str, Any], late: int, by_optimizer: bool
) -> None:
    for text, step in world.run(2, bypassed_later, mode, options, by_optimizer):
        start = "some backward calls bypassed the optimizer: their loss was not multiplied by the loss scale"
        assert text.startswith("there are gradients, but " if "accumulation_steps" in options else start)
        assert "write optimizer.backward(loss) instead of loss.backward()" in text
        assert step == late


@pytest.mark.parametrize(
    ("mode", "options", "late"), [("fp16", {}, 16), ("fp16", {"on_nonfinite": "raise"}, 0), ("fp16_naive", ZERO2, 16)]
)
def test_unscaled_loss_within_window_context_in_later_step_raises_on_every_rank(
    world: World, mode: Mode, options: dict[str, Any], late: int
) -> None:
    for text, step in world.run(2, bypassed_later, mode, options, True, True):
        assert text.startswith(
            "some backward calls bypassed the optimizer: their loss was not multiplied by the loss scale"
        )
        assert step == late


def scaled_by_last_stage() -> tuple[int, float]:
    """Return the number of skipped steps and the weight of a stage after three windows. Only one stage scales a loss."""
    with ProcessGroupRegistry(Topology(pipe=4)) as registry:
        param = parameter(f"stage {registry.global_rank}", value=0.5)
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=0.25), registry, precision="fp16")
        for _ in range(3):
            if registry.global_rank == 3:
                optimizer.scale_loss(param.sum()).backward()
            else:
                assert optimizer.loss_scale is not None
                scale = float(optimizer.loss_scale.scale)
                param.grad = torch.full_like(param, scale)  # as the scaled loss of the last stage gives it
            optimizer.step()
            optimizer.zero_grad()
        optimizer.poll()
        return optimizer.skipped_steps, float(param.detach()[0])


def test_step_with_loss_scaled_by_one_stage_is_not_skipped(world: World) -> None:
    assert world.run(4, scaled_by_last_stage) == [(0, -0.25)] * 4


def stepped_twice(mode: Mode, options: dict[str, Any]) -> int:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        precision_of(mode).prepare(model, registry)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(inner, registry, precision=mode, **arguments(**options))
        for _ in range(20):
            optimizer.backward(model(torch.ones(2, 4)).float().mean())
            optimizer.step()
            optimizer.step(final=True)
            optimizer.zero_grad()
        return optimizer.skipped_steps


@pytest.mark.parametrize(
    ("mode", "options"), [("fp16", {}), ("fp16_naive", ZERO1), ("fp32", {"accumulation_steps": 1}), ("bf16", ZERO1)]
)
def test_second_step_with_same_gradients_is_not_skipped(world: World, mode: Mode, options: dict[str, Any]) -> None:
    assert world.run(2, stepped_twice, mode, options) == [0, 0]


def by_others(mode: Mode, options: dict[str, Any], way: str) -> list[float]:
    """Return weights after three windows. Each micro-batch has two backward calls in `window()`, or one backward call of
    the summed loss."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        precision_of(mode).prepare(model, registry)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(inner, registry, precision=mode, **arguments(**options))
        generator = torch.Generator().manual_seed(registry.rank("data"))
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(options.get("accumulation_steps", 1)):
                inputs = torch.randn(2, 5, 4, generator=generator)
                if way == "window":
                    with optimizer.window():
                        for x in inputs:
                            optimizer.scale_loss(model(x).float().square().mean()).backward()
                else:
                    optimizer.backward(sum(model(x).float().square().mean() for x in inputs))
            assert optimizer.step() is not None
        return [float(value) for value in model.weight.flatten()]


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, ZERO1, ZERO2, {"accumulation_steps": 3}])
@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16"])
def test_two_backwards_in_optimizer_window_match_one_optimizer_backward_of_summed_loss(
    world: World, mode: Mode, options: dict[str, Any]
) -> None:
    window, own = (world.run(2, by_others, mode, options, way) for way in ("window", "backward"))
    assert window[0] == window[1]
    assert window[0] == pytest.approx(
        own[0], rel=1e-5 if mode == "fp32" else 2e-2, abs=1e-6 if mode == "fp32" else 2e-3
    )
    without = world.run(2, by_others, mode, {}, "backward")
    if "accumulation_steps" in options:
        assert own[0] != pytest.approx(without[0], rel=1e-5), "accumulation must average over micro-batches"


def interrupted_window() -> list[str]:
    with ProcessGroupRegistry(Topology(data=1)) as registry:
        a = parameter("a")
        optimizer = ParallelOptimizer(torch.optim.SGD([a], lr=1.0), registry, accumulation_steps=2)
        said = []

        def schedule() -> None:
            with optimizer.window():
                a.sum().backward()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            schedule()
        with pytest.raises(RuntimeError, match="zero_grad") as caught:
            optimizer.step()
        said.append(str(caught.value))
        optimizer.zero_grad()
        for _ in range(2):
            optimizer.backward(a.sum() * 3)
        assert optimizer.step() is not None
        return [*said, str(float(a.detach()[0]))]


def test_zero_grad_after_failed_window_restarts_window() -> None:
    said, value = interrupted_window()
    assert "repeat all micro-batches since the last step" in said
    assert float(value) == -3.0


def without_gradients(cause: str, options: dict[str, Any]) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        nn.init.constant_(model.weight, 0.5)
        declare(model, {"*": P()})
        inner = torch.optim.SGD([model.weight], lr=0.1)
        optimizer = ParallelOptimizer(inner, registry, **arguments(**options))
        if cause == "replaced":
            model.weight = nn.Parameter(model.weight.detach().clone())
        nothing_here = cause == "none on rank 1" and registry.global_rank == 1
        optimizer.backward(None if nothing_here else model(torch.ones(2, 4)).sum())
        if cause == "main_grad":
            weight: Any = model.weight
            weight.main_grad, weight.grad = weight.grad, None
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return "no error"


WHOLE: list[dict[str, Any]] = [{}, ZERO1, {"offload": 1.0}, {"accumulation_steps": 1}]
OVERLAP: dict[str, Any] = {"overlap": True}


@pytest.mark.parametrize(
    ("cause", "said", "options"),
    [
        *(("main_grad", "param.main_grad", options) for options in WHOLE),
        *(("replaced", "model.parameters() after", options) for options in (*WHOLE, ZERO2, OVERLAP)),
    ],
)
def test_step_with_no_gradient_on_any_rank_raises(world: World, cause: str, said: str, options: dict[str, Any]) -> None:
    for text in world.run(2, without_gradients, cause, options):
        assert text.startswith("no parameter of the optimizer has a gradient on any rank")
        assert said in text


@pytest.mark.parametrize("options", [ZERO2, OVERLAP], ids=["ZeRO-2", "overlap"])
@pytest.mark.parametrize("one_rank", [False, True])
def test_step_after_reduction_during_backward_does_not_raise_for_missing_gradients(
    world: World, options: dict[str, Any], one_rank: bool
) -> None:
    cause = "none on rank 1" if one_rank else "nothing"
    assert world.run(2, without_gradients, cause, options) == ["no error"] * 2


# Precision modes and gradient scalers ---------------------------------------------------------------------------------


def unprepared(mode: Mode, prepared: bool) -> str:
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        model = nn.Linear(4, 3) if registry.rank("pipe") else nn.BatchNorm1d(4)
        if prepared and registry.rank("pipe"):
            precision_of(mode).prepare(model, registry)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        try:
            ParallelOptimizer(inner, registry, precision=mode)
        except ValueError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("mode", ["bf16", "fp16_naive"])
def test_precision_mode_without_prepare_raises(world: World, mode: Mode) -> None:
    for text in world.run(2, unprepared, mode, False):
        assert "prepare(model)" in text
        assert repr(mode) in text
    # One prepared stage is enough: the modules of another stage may all be float32 in the mode.
    assert world.run(2, unprepared, mode, True) == ["no error"] * 2


def scaled_by(kind: str, overflow: bool, options: dict[str, Any]) -> tuple[str, float, float]:
    """Return the error, the weight after two steps, and the scale."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = parameter("w", 3, value=1.0)
        optimizer = ParallelOptimizer(torch.optim.SGD([w], lr=0.5, fused=True), registry, **arguments(**options))
        scaler: Any = (
            torch.amp.GradScaler("cpu", init_scale=8.0) if kind == "torch" else GradScaler(registry, init_scale=8.0)
        )
        text = "no error"
        for step in range(2):
            optimizer.zero_grad()
            factor = float("inf") if overflow and step == 1 and registry.rank("data") == 1 else 1.0
            scaler.scale((w.square() * 0.5).sum() * factor).backward()
            try:
                scaler.step(optimizer)
            except RuntimeError as error:
                text = str(error)
                break
            scaler.update()
        return text, float(w.detach()[0]), scaler.get_scale()


def test_torch_grad_scaler_is_rejected_and_meshstep_grad_scaler_accepted(world: World) -> None:
    for text, weight, _ in world.run(2, scaled_by, "torch", True, {}):
        assert "meshstep.amp.GradScaler(registry)" in text
        assert weight == 1.0
    assert world.run(2, scaled_by, "ours", False, {}) == [("no error", 0.25, 8.0)] * 2
    assert world.run(2, scaled_by, "ours", True, {}) == [("no error", 0.5, 4.0)] * 2
    # Two steps with lr=0.5, each with a gradient whose three equal elements are clipped to norm 0.5.
    clipped = 1.0 - 0.5 * 0.5 / 3**0.5 * 2
    for text, weight, _ in world.run(2, scaled_by, "ours", False, {"max_norm": 0.5}):
        assert text == "no error"
        assert weight == pytest.approx(clipped, rel=1e-5)


def test_grad_scaler_with_zero1_is_rejected(world: World) -> None:
    for text, weight, _ in world.run(2, scaled_by, "ours", False, ZERO1):
        assert "can't unscale the gradients" in text
        assert weight == 1.0


def late_gradient(fused: bool) -> list[float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        a, b = parameter("a", 3, value=1.0), parameter("b", 2, P(owned={"data": 1}), value=1.0)
        mine = registry.rank("data") == 1
        inner = torch.optim.SGD([a, b] if mine else [a], lr=0.1, momentum=0.9, dampening=0.3, fused=fused)
        optimizer = ParallelOptimizer(inner, registry, max_norm=0.5)
        for step in range(4):
            optimizer.zero_grad()
            loss = a.square().sum()
            if mine and step:
                loss = loss + b.pow(3).sum()
            optimizer.backward(loss)
            optimizer.step()
        return [float(value) for param in (a, b) for value in param.detach()]


def test_fused_sgd_of_parameter_with_late_first_gradient_matches_unfused_sgd(world: World) -> None:
    fused, plain = (world.run(2, late_gradient, kind) for kind in (True, False))
    for one, other in zip(fused, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def step_without_gradients(options: dict[str, Any]) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(4, 3)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        precision_of("bf16").prepare(model, registry)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1, weight_decay=0.1)
        optimizer = ParallelOptimizer(inner, registry, precision="bf16", **arguments(**options))
        before = model.weight.detach().clone()
        try:
            optimizer.step()
        except RuntimeError as error:
            assert torch.equal(before, model.weight)
            if registry.global_rank == 0:  # a rank may have no loss
                optimizer.backward(model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
            else:
                optimizer.backward(None)
            assert float(optimizer.step().total_norm) > 0
            optimizer.zero_grad()
            optimizer.step()  # only the first step is checked
            return str(error)
        return "no error"


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5}, ZERO1, ZERO2, {"overlap": True}])
def test_first_step_without_backward_raises(world: World, options: dict[str, Any]) -> None:
    for text in world.run(2, step_without_gradients, options):
        assert text.startswith(
            "step() or a clip was called before optimizer.backward, and no parameter of the optimizer has a gradient"
        )


def step_after_a_group_was_added() -> float:
    model, more = nn.Linear(4, 3), nn.Parameter(torch.ones(2))
    declare(model, {"*": P()})
    declare(nn.ParameterDict({"more": more}), {"*": P()})
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [("more", more)]})
        return float(optimizer.step().total_norm)


def test_later_step_without_backward_does_not_raise(world: World) -> None:
    assert world.run(2, step_after_a_group_was_added) == [0.0, 0.0]


def checks_after_steps() -> list[int]:
    """Return the number of replica checks before and after each of three steps. The first step has an infinite norm."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        param = nn.Parameter(torch.zeros(3))
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=1.0), registry)
        found = [len(optimizer._clipper.checks)]
        for factor in (torch.inf, 1.0, 1.0):
            optimizer.zero_grad()
            optimizer.backward((param * factor).sum())
            optimizer.step()
            found.append(len(optimizer._clipper.checks))
        return found


def test_replica_checks_are_dropped_after_first_finite_norm(world: World) -> None:
    """A check holds all gradients of the first step, and costs a pass over parameters and gradients."""
    assert world.run(2, checks_after_steps) == [[1, 1, 0, 0]] * 2
