"""`ParallelOptimizer` detects accelerate or a transformers Trainer around it, and keeps no caller objects alive."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.optim.recipe.accelerated import taken_over
from meshstep.parallel import ProcessGroupRegistry, Topology


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A wrapper like `accelerate.optimizer.AcceleratedOptimizer`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Trainer:
    def __init__(self, optimizer: Any, max_grad_norm: float) -> None:
        self.optimizer, self.args = optimizer, SimpleNamespace(max_grad_norm=max_grad_norm)


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register fake modules of accelerate and transformers, which contain the classes of this file."""
    for module, kind in (("accelerate.optimizer", AcceleratedOptimizer), ("transformers.trainer", Trainer)):
        fake = ModuleType(module)
        setattr(fake, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, module, fake)


def optimizer_of(model: torch.nn.Module) -> ParallelOptimizer[Any]:
    return ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), ProcessGroupRegistry(Topology(data=1)))


def test_detection_of_accelerate_holds_no_reference_to_batch_or_logits() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    taken_over(optimizer)
    accelerated = AcceleratedOptimizer(optimizer)
    batch = torch.full((4, 3), 2.0)
    logits = model(batch)
    seen = weakref.ref(batch), weakref.ref(logits)
    optimizer.backward(logits.square().mean())
    accelerated.step()
    del batch, logits
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


def test_step_by_accelerate_raises_unless_clipping_of_accelerate_is_replaced() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    accelerated = AcceleratedOptimizer(AcceleratedOptimizer(optimizer))
    optimizer.backward(model(torch.full((4, 3), 2.0)).square().mean())
    with pytest.raises(
        ValueError, match=r"rank 0: accelerate steps this optimizer, and its clip_grad_norm_ would clip"
    ):
        accelerated.step()
    taken_over(optimizer)
    accelerated.step()


def test_accelerate_wrapper_of_another_optimizer_is_ignored() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer, around_another = optimizer_of(model), AcceleratedOptimizer(optimizer_of(other))
    optimizer.backward(model(torch.full((4, 3), 2.0)).square().mean())
    optimizer.step()
    assert around_another.param_groups


def test_step_in_transformers_trainer_with_max_grad_norm_raises() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    trainer = Trainer(AcceleratedOptimizer(optimizer), 0.5)
    optimizer.backward(model(torch.full((4, 3), 2.0)).square().mean())
    with pytest.raises(ValueError, match=r"the Trainer has clipped the gradients by max_grad_norm=0\.5"):
        trainer.optimizer.step()
    trainer.args.max_grad_norm = 0.0
    trainer.optimizer.step()
