"""Non-contiguous parameters whose states and master weights were loaded, or created before the memory format changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_steps import MAKE, close
from loops import using
from meshstep.amp import Bf16
from meshstep.optim import HalfStates, Offloaded, ParallelOptimizer, Sharded, load_checkpoint, save_checkpoint
from meshstep.optim.kernels.choice import Kernels
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

STEPS = 3
OPTIMIZERS = ("AdamW", "Adam, amsgrad, maximize", "SGD, Nesterov", "SGD, dampening", "Adagrad")
MODES: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "split masters": {"precision": Bf16(split_masters=True)},
    "half states": {"states": HalfStates()},
    "offloaded": {"states": Offloaded()},
    "offloaded masters": {"states": Offloaded(), "precision": "bf16"},
}
EVENTS = ("checkpoint", "state dict", "state dict of torch")


def with_gaps(tensor: Tensor) -> Tensor:
    """Return a copy that is a strided view with other elements in between."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2].copy_(tensor)


def expanded_then_cloned(tensor: Tensor) -> Tensor:
    """Return values that are equal along the first dim, in the layout of a clone of an expanded tensor."""
    return tensor[:1].expand(tensor.shape).clone()


LAYOUTS: Mapping[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "channels_last": ((4, 3, 2, 5), lambda tensor: tensor.contiguous(memory_format=torch.channels_last)),
    "channels_last_3d": ((2, 3, 2, 4, 2), lambda tensor: tensor.contiguous(memory_format=torch.channels_last_3d)),
    "transposed": ((6, 5), lambda tensor: tensor.t().contiguous().t()),
    "expanded": ((5, 3, 4), lambda tensor: expanded_then_cloned(tensor.transpose(0, 2)).transpose(0, 2)),
    "contiguous": ((7,), torch.clone),
}
GAPS = ((4, 3), with_gaps)
"""Shape and layout of a parameter with gaps between elements, into which a fused kernel would write."""


class Model(nn.ParameterList):
    """One parameter per layout.

    ``options`` of the optimizer determine the dtype. If ``lying`` is False, parameters are contiguous until `lay_out`.
    ``gaps`` adds a parameter with gaps between its elements in memory.
    """

    def __init__(self, options: Mapping[str, Any], *, lying: bool = True, gaps: bool = False) -> None:
        generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if "precision" in options else torch.float32
        self.changes, params = list[Callable[[Tensor], Tensor]](), list[nn.Parameter]()
        for shape, change in [*LAYOUTS.values(), *([GAPS] * gaps)]:
            value = change(torch.randn(shape, generator=generator).to(dtype))
            params.append(nn.Parameter(value if lying else value.contiguous()))
            self.changes.append(change)
        super().__init__(params)
        declare(self, {"*": P()})

    def lay_out(self) -> None:
        """Give contiguous parameters their layouts, as ``model.to(memory_format=...)`` does."""
        for param, change in zip(self, self.changes, strict=True):
            new = param.detach().clone()
            param.data = change(new)
            param.data.copy_(new)


def gradients(model: Model, step: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 + step + 1000 * rank)
    for param in model:
        dtype = param.grad_dtype or param.dtype
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype)


def train(model: Model, optimizer: ParallelOptimizer[Any], steps: range, rank: int = 0) -> None:
    for step in steps:
        optimizer.zero_grad()
        gradients(model, step, rank)
        optimizer.step()


def optimizer_of(
    model: Model, name: str, options: Mapping[str, Any], registry: ProcessGroupRegistry | None = None
) -> ParallelOptimizer[Any]:
    return ParallelOptimizer(
        MAKE[name](list(model)), registry or ProcessGroupRegistry(Topology()), max_norm=0.7, **options
    )


def loaded(
    event: str, name: str, options: Mapping[str, Any], old: tuple[Model, ParallelOptimizer[Any]], path: Path
) -> tuple[Model, ParallelOptimizer[Any]]:
    model = Model(options, gaps=len(old[0]) > len(LAYOUTS))
    optimizer = optimizer_of(model, name, options)
    if event == "checkpoint":
        save_checkpoint(path, *old)
        load_checkpoint(path, model, optimizer)
        return model, optimizer
    model.load_state_dict(old[0].state_dict())
    state = contiguous(deepcopy(old[1].state_dict()))
    if event == "state dict":
        optimizer.load_state_dict(state)
    else:
        optimizer.optimizer.load_state_dict({key: value for key, value in state.items() if key != "meshstep"})
    return model, optimizer


def contiguous(value: Any) -> Any:
    """Make all tensors of a state dict contiguous, as another program may write it."""
    if isinstance(value, Tensor):
        return value.contiguous()
    if isinstance(value, dict):
        return {key: contiguous(entry) for key, entry in value.items()}
    return value


def values(model: Model) -> list[Tensor]:
    return [param.detach().contiguous() for param in model]


@pytest.fixture(autouse=True, params=["auto", "torch"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    chosen: Kernels = request.param
    with using(chosen):
        yield


@pytest.mark.default_cases(60)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_with_non_contiguous_parameters_is_bitwise_identical(
    name: str, mode: str, event: str, tmp_path: Path
) -> None:
    options = MODES[mode]
    if event == "state dict of torch" and mode != "fp32":
        pytest.skip("torch's state dict has no master weights")
    check_resumed(Model(options), name, options, event, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_of_model_with_memory_gaps_in_a_parameter_is_bitwise_identical(mode: str, tmp_path: Path) -> None:
    for name in ("AdamW", "SGD, Nesterov"):
        check_resumed(Model(MODES[mode], gaps=True), name, MODES[mode], "checkpoint", tmp_path / name)


def check_resumed(model: Model, name: str, options: Mapping[str, Any], event: str, tmp_path: Path) -> None:
    optimizer = optimizer_of(model, name, options)
    train(model, optimizer, range(STEPS))
    again, resumed = loaded(event, name, options, (model, optimizer), tmp_path)
    for of_model, of_optimizer in ((model, optimizer), (again, resumed)):
        train(of_model, of_optimizer, range(STEPS, 2 * STEPS))
    assert all(torch.equal(new, old) for new, old in zip(values(again), values(model), strict=True))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "half states"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_after_memory_format_change_match_steps_of_unchanged_parameters(name: str, mode: str) -> None:
    """For example, a user may call ``model.to(memory_format=torch.channels_last)`` after making the optimizer."""
    found = []
    for changes in (True, False):
        model = Model(MODES[mode], lying=False)
        optimizer = optimizer_of(model, name, MODES[mode])
        train(model, optimizer, range(STEPS))
        if changes:
            model.lay_out()
        train(model, optimizer, range(STEPS, 2 * STEPS))
        found.append(values(model))
    close(found[0], found[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_existing_torch_states_get_strides_of_parameters_with_changed_memory_format(name: str) -> None:
    """The torch optimizer steps, the parameters change their layout, and then the optimizer is wrapped."""
    found = []
    for changes in (True, False):
        model = Model({}, lying=False)
        inner = MAKE[name](list(model))
        for step in range(STEPS):
            gradients(model, step)
            inner.step()
        if changes:
            model.lay_out()
        optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), max_norm=0.7)
        for param, state in optimizer.state.items():
            shaped = [value for value in state.values() if isinstance(value, Tensor) and value.shape == param.shape]
            assert all(value.stride() == param.stride() for value in shaped)
        train(model, optimizer, range(STEPS, 2 * STEPS))
        found.append(values(model))
    close(found[0], found[1])


def laid_out_anew_on_ranks(mode: str, name: str, gradients_too: bool) -> list[float]:
    """Return the distances of weights from a contiguous run, if layouts are set before or between the steps."""
    options = {**MODES[mode], "states": Sharded("data", gradients=gradients_too)}
    found = []
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        for changes in ("before", "between", "never"):
            model = Model(MODES[mode], lying=changes == "before")
            optimizer = optimizer_of(model, name, options, registry)
            for step in range(2 * STEPS):
                if step == STEPS and changes == "between":
                    model.lay_out()
                if step == STEPS:
                    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(step + 1000 * registry.global_rank)
                loss = sum((param.float() * torch.randn(param.shape, generator=generator)).sum() for param in model)
                assert isinstance(loss, Tensor)
                optimizer.backward(loss)
                optimizer.step()
            found.append(values(model))
    return [
        float((one.double() - other.double()).abs().max())
        for of_run in found[:2]
        for one, other in zip(of_run, found[2], strict=True)
    ]


@pytest.mark.parametrize("gradients_too", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "split masters"])
def test_zero1_and_zero2_after_memory_format_change_match_contiguous_run(
    world: World, mode: str, gradients_too: bool
) -> None:
    for name in ("AdamW", "SGD, Nesterov"):
        for far in world.run(2, laid_out_anew_on_ranks, mode, name, gradients_too):
            assert max(far) < 1e-6, (name, far)


def test_transposed_view_at_same_address_gives_steps_of_contiguous_copy() -> None:
    """The view has the same memory as before, but its elements have another order."""
    for states in ((), Offloaded()):
        found = []
        for transposed in (True, False):
            param = nn.Parameter(torch.arange(16.0).view(4, 4))
            declare(nn.ParameterList([param]), {"*": P()})
            optimizer = ParallelOptimizer(
                MAKE["AdamW"]([param]), ProcessGroupRegistry(Topology()), max_norm=0.7, states=states
            )
            for step in range(4):
                if step == 2:
                    param.data = param.data.t() if transposed else param.data.t().contiguous()
                param.grad = torch.arange(16.0).sin().view(4, 4)
                optimizer.step()
            found.append(param.detach().contiguous())
        close(found[0], found[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_gaps_in_a_parameter_keep_updates_bitwise_identical(name: str) -> None:
    """Replicas on other ranks may have no gaps, and must get bitwise equal updates. The same holds for the other
    parameters of the rank."""
    found = []
    for change in (with_gaps, torch.clone):
        params = [
            nn.Parameter(torch.arange(12.0).view(4, 3).sin()),
            nn.Parameter(change(torch.arange(12.0).view(4, 3).cos())),
        ]
        declare(nn.ParameterList(params), {"*": P()})
        optimizer = ParallelOptimizer(MAKE[name](params), ProcessGroupRegistry(Topology()), max_norm=0.7)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        found.append([param.detach().contiguous() for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_steps_of_non_contiguous_parameters_with_contiguous_gradients_match_contiguous_run(name: str) -> None:
    """Fused kernels ignore strides. Dampened SGD makes its first step on another path."""
    results = []
    for lying in (True, False):
        model = Model({}, lying=lying)
        train(model, optimizer_of(model, name, {}), range(2))
        results.append(values(model))
    for laid_out, plain in zip(*results, strict=True):
        torch.testing.assert_close(laid_out, plain)
