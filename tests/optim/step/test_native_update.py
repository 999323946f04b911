"""Updates of torch's optimizers by the compiled loops, on torch's states; changes between steps are detected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_steps import CHANGES, MAKE, SHAPES, changed, close, gradients, model_of, of
from loops import using
from meshstep.optim import ParallelOptimizer
from meshstep.optim.kernels.choice import Kernels
from meshstep.optim.step import c_engine as again
from meshstep.optim.step.c_engine import ADAM, loops_for, numbers_in
from meshstep.optim.step.update import steps_on_device
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

KERNELS: tuple[Kernels, ...] = ("auto", "torch")


@pytest.fixture(autouse=True)
def _the_loops() -> Iterator[None]:
    """Use the compiled loops, overriding the environment variable."""
    with using("auto"):
        yield


class Calls:
    """Counts the tensors that the compiled loops step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, update = 0, again.update_by_loops

        def counted(loops: Any, kind: Any, columns: Any, *args: Any) -> None:
            self.rows += len(columns.numels)
            update(loops, kind, columns, *args)

        monkeypatch.setattr(again, "update_by_loops", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("name", MAKE)
def test_native_loop_update_gives_states_and_weights_of_torch(name: str, calls: Calls) -> None:
    """Keys, dtypes and shapes are equal, and values up to rounding, over ten steps with one skipped step."""
    found = dict[str, tuple[dict[str, Any], list[Tensor]]]()
    for kernels in KERNELS:
        with using(kernels):
            model = model_of()
            optimizer = of(model, MAKE[name])
            for step in range(10):
                gradients(model, step)
                if step in (3, 4):
                    model[1].grad = None  # missing in two steps
                if step == 6:
                    model[0].grad[1, 1] = torch.nan
                optimizer.step()
            found[kernels] = optimizer.optimizer.state_dict(), [param.detach() for param in model]
        if kernels == "auto":
            # Adagrad of torch 2.11 supports neither `grad_scale` nor `found_inf`.
            assert calls.rows >= 8 * len(SHAPES) - 2 or not steps_on_device(optimizer.optimizer)
            calls.rows = 0
    assert calls.rows == 0
    assert found["auto"][0]["state"].keys() == found["torch"][0]["state"].keys()
    close(found["auto"], found["torch"])


def test_float64_and_bfloat16_parameters_are_stepped_by_torch_kernels(calls: Calls) -> None:
    """The param group has float64 and half-precision parameters in addition to float32 parameters."""
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    plain, half = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    params = [wide, plain, half]
    start = [param.detach().clone() for param in params]
    declare(nn.ParameterList(params), {"*": P()})
    optimizer = ParallelOptimizer(MAKE["AdamW"](params), ProcessGroupRegistry(Topology()), max_norm=1.0)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert calls.rows == 2
    assert all(float((new.detach() - old).abs().min()) > 1e-3 for new, old in zip(params, start, strict=True))
    close(plain.detach().double(), wide.detach())


@pytest.mark.parametrize("name", ["AdamW", "SGD, Nesterov", "Adagrad"])
def test_parameter_with_gaps_is_stepped_without_writing_between_elements(name: str) -> None:
    """torch's fused kernels would write to the memory between the elements."""
    memory = torch.ones(4, 6)
    param, dense = nn.Parameter(memory[:, ::2]), nn.Parameter(torch.ones(4, 3))
    declare(nn.ParameterList([param, dense]), {"*": P()})
    optimizer = ParallelOptimizer(MAKE[name]([param, dense]), ProcessGroupRegistry(Topology()), max_norm=0.5)
    for _ in range(2):
        param.grad, dense.grad = (torch.arange(12.0).view(4, 3) for _ in range(2))
        optimizer.step()
    close(param.detach(), dense.detach())
    assert bool((memory[:, 1::2] == 1).all())
    assert float((param.detach() - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["AdamW", "SGD, dampening"])
def test_channels_last_parameters_and_gradients_are_stepped_as_by_unfused_torch(calls: Calls, name: str) -> None:
    """States may be channels_last too, and gradients may have other strides than their parameter; torch's fused
    kernels alone would pair wrong elements."""
    found = []
    for kernels in ("auto", "torch", "not fused"):
        with using("auto" if kernels == "auto" else "torch"):
            model = model_of()
            model[1].data = model[1].data.contiguous(memory_format=torch.channels_last)
            optimizer = of(model, MAKE[name])
            optimizer.param_groups[0]["fused"] = kernels != "not fused"
            for step in range(3):
                gradients(model, step)
                grads = [param.grad for param in model]
                assert grads[0] is not None
                assert grads[1] is not None
                model[0].grad = grads[0].t().contiguous().t()
                if step != 1:
                    model[1].grad = grads[1].contiguous(memory_format=torch.channels_last)
                optimizer.step()
            found.append([param.detach() for param in model])
    assert calls.rows in (3 * len(SHAPES), 2 * len(SHAPES))  # 2: with dampening, torch runs the first step
    close(found[0], found[2])
    close(found[1], found[2])


@pytest.mark.parametrize("change", CHANGES)
def test_native_loop_update_after_tensors_changed_between_steps_matches_torch(change: str) -> None:
    """Cached addresses must not be used after a change."""
    found = changed(change, KERNELS)
    close(found[0], found[1])


@pytest.mark.parametrize("betas", [(0.7, 0.95), [0.7, 0.95], torch.tensor([0.7, 0.95], dtype=torch.float64)])
def test_numbers_in_reads_betas_from_tuple_list_or_tensor(betas: Any) -> None:
    model = model_of()
    optimizer = of(model, MAKE["AdamW"])
    optimizer.param_groups[0]["betas"] = betas
    assert numbers_in(optimizer.param_groups[0], ADAM) == [0.01, 0.7, 0.95, 1e-8, 0.1, 1.0, 0.0]


def test_momentum_set_to_zero_gives_weights_and_buffers_of_torch() -> None:
    """As in torch, a step with momentum 0 neither uses nor changes the buffers."""
    found = []
    for kernels in KERNELS:
        with using(kernels):
            model = model_of()
            optimizer = of(model, MAKE["SGD, dampening"])
            for step in range(6):
                optimizer.param_groups[0]["momentum"] = 0.9 if step < 3 else 0
                gradients(model, step)
                optimizer.step()
            buffers = [optimizer.state[param]["momentum_buffer"] for param in model]
            found.append([*(param.detach() for param in model), *buffers])
    close(found[0], found[1])


def test_step_of_smaller_view_at_same_address_writes_only_to_view(calls: Calls) -> None:
    """The cached row describes the previous memory of the parameter, so the step must not use it."""
    whole = torch.ones(4, 6)
    param = nn.Parameter(whole)
    declare(nn.ParameterList([param]), {"*": P()})
    optimizer = ParallelOptimizer(MAKE["SGD"]([param]), ProcessGroupRegistry(Topology()))
    for view in (whole, whole, whole[:, :4], whole[:2]):
        param.data = view
        before = whole.clone()
        param.grad = torch.ones(view.shape)
        optimizer.step()
        param.data.add_(0.1)  # undoes the step of lr=0.1
        close(whole, before)
    assert calls.rows == 4  # for the view with gaps, the loops step a dense copy


def test_step_after_deleting_momentum_buffers_matches_torch() -> None:
    found = []
    for kernels in KERNELS:
        with using(kernels):
            model = model_of()
            optimizer = of(model, MAKE["SGD, dampening"])
            for step in range(5):
                if step == 3:
                    for state in optimizer.state.values():
                        del state["momentum_buffer"]
                gradients(model, step)
                optimizer.step()
            found.append([param.detach() for param in model])
    close(found[0], found[1])


def test_optimizer_with_step_hook_or_replaced_step_is_stepped_by_torch(calls: Calls) -> None:
    model = model_of()
    inner = MAKE["AdamW"](list(model))
    optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()))
    assert loops_for(inner) is not None
    seen = []
    hook = inner.register_step_post_hook(lambda *args: seen.append(1))
    gradients(model, 0)
    optimizer.step()
    assert (seen, calls.rows) == ([1], 0)
    hook.remove()
    torch.optim.lr_scheduler.StepLR(inner, 1)  # the schedule wraps step() to count calls
    optimizer.step()
    assert (seen, calls.rows) == ([1], 0)


class OtherRule(torch.optim.AdamW):
    """A user-defined subclass of a supported optimizer."""


def test_native_loops_reject_subclassed_unfused_and_unsupported_optimizers() -> None:
    params = list(model_of())
    assert loops_for(OtherRule(params, fused=True)) is None
    assert loops_for(torch.optim.AdamW(params)) is None
    assert loops_for(torch.optim.NAdam(params)) is None


def test_row_cache_holds_no_reference_to_states_of_deleted_optimizer() -> None:
    import gc
    import weakref

    model = model_of()
    optimizer = of(model, MAKE["AdamW"])
    gradients(model, 0)
    optimizer.step()
    gone = weakref.ref(optimizer.state[model[0]]["exp_avg"])
    del optimizer
    gc.collect()
    assert gone() is None


def _with_other_kernels(registry: ProcessGroupRegistry) -> str:
    of_rank = nn.ParameterList([nn.Parameter(torch.ones(3))])
    declare(of_rank, {"*": P()})
    with using("torch" if registry.global_rank == 1 else "auto"):
        try:
            ParallelOptimizer(MAKE["AdamW"](list(of_rank)), registry)
        except ValueError as error:
            return str(error)
    return "made"


def _agreed(topology: Topology) -> str:
    with ProcessGroupRegistry(topology) as registry:
        return _with_other_kernels(registry)


def test_different_kernels_on_ranks_raise_on_every_rank(world: World) -> None:
    """Otherwise replicas would diverge by rounding."""
    for said in world.run(2, _agreed, Topology(data=2)):
        assert "kernels (use_kernels or MESHSTEP_KERNELS)" in said
        assert "'native'" in said
        assert "'torch'" in said
