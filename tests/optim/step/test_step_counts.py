"""Step counts of fused optimizers: updated in one pass instead of torch's two, and kept if a skipped update raises."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from meshstep.optim.step.torch_engine import FusedStepCountMode, update_by_torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adamw, amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
FOUND = (0.0, 1.0, 0.0, 0.0, 1.0)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def run(kind: str, ours: bool) -> tuple[list[Tensor], list[str]]:
    """Return parameters and states after the steps of `FOUND`, some skipped, and the operators of the last step.

    ``ours``: step within `FusedStepCountMode`; otherwise with torch alone.
    """
    params = [nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(4)]
    optimizer = OPTIMIZERS[kind]([{"params": params[:1]}, {"params": params[1:], "lr": 0.2}])
    log = Operators()
    for found in FOUND:
        for param in params:
            param.grad = param.detach() / 7
        log.names.clear()
        with log:
            optimizer.found_inf = torch.tensor(found)
            with FusedStepCountMode(optimizer, optimizer.found_inf) if ours else nullcontext():
                optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*(param.detach() for param in params), *states], log.names


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_count_mode_gives_parameters_and_counts_of_torch(kind: str) -> None:
    (found, names), (expected, torchs) = run(kind, ours=True), run(kind, ours=False)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    if kind != "sgd":
        assert "aten._foreach_sub_.List" in torchs
    assert "aten._foreach_sub_.List" not in names
    assert names.count("aten._foreach_add_.Scalar") == 0


def test_step_count_mode_ignores_tensors_counted_by_hooks() -> None:
    """Hooks see torch's operators, and may use the same operators on lists of their own."""
    param, mine = nn.Parameter(torch.ones(2)), [torch.zeros(()), torch.zeros(())]
    param.grad = torch.ones(2)
    optimizer, found_inf = torch.optim.Adam([param], fused=True), torch.ones(())

    def hook(*_: object) -> None:
        torch._foreach_add_(mine, 1)
        torch._foreach_sub_(mine[:1], [found_inf])

    optimizer.register_step_post_hook(hook)
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    with FusedStepCountMode(optimizer, found_inf):
        optimizer.step()
    assert [float(count) for count in mine] == [0.0, 1.0]
    assert float(optimizer.state[param]["step"]) == 0.0


def test_step_count_mode_ignores_counts_incremented_by_a_tensor() -> None:
    """A future torch might subtract the skipped step but count in another way."""
    param = nn.Parameter(torch.ones(2))
    optimizer, found_inf = torch.optim.Adam([param], fused=True), torch.ones(())
    optimizer.state[param]["step"] = torch.tensor(3.0)
    with FusedStepCountMode(optimizer, found_inf):
        torch._foreach_add_([optimizer.state[param]["step"]], torch.ones(()))
        torch._foreach_sub_([optimizer.state[param]["step"]], [found_inf])
    assert float(optimizer.state[param]["step"]) == 3.0


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("bad_group", [0, 1])
@pytest.mark.parametrize("kind", ["adam", "adamw, amsgrad", pytest.param("adagrad", marks=pytest.mark.long)])
def test_skipped_update_that_raises_keeps_step_counts(kind: str, bad_group: int, steps: int) -> None:
    """Otherwise, the step counts of a rank whose update raises would differ from those of its replicas."""
    params = [nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(4)]
    optimizer = OPTIMIZERS[kind]([{"params": params[:1]}, {"params": params[1:]}])
    for step in range(steps + 1):
        for param in params:
            param.grad = param.detach() / 7
        if step < steps:
            update_by_torch(optimizer, torch.zeros(()), None)
    optimizer.param_groups[bad_group]["lr"] = "text"
    with pytest.raises(TypeError, match="fused"):
        update_by_torch(optimizer, torch.ones(()), None)
    counts = [float(state["step"]) for state in optimizer.state.values()]
    assert counts
    assert set(counts) == {float(steps)}
