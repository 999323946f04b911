"""Observers of the steps of a `ParallelOptimizer`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer, StepObserver
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
from world import World


class Recorder(StepObserver):
    """Records the gradient or the weight at each call."""

    def __init__(self, name: str, log: list[tuple[str, str, float]], weight: torch.Tensor) -> None:
        self.name, self.log, self.weight = name, log, weight

    def _note(self, what: str, value: torch.Tensor | None) -> None:
        self.log.append((self.name, what, float("nan") if value is None else float(value)))

    def local_grads(self, window: Any) -> None:
        self._note("local", self.weight.grad)

    def reduced_grads(self, window: Any) -> None:
        self._note("reduced", self.weight.grad)

    def update(self, request: Any, update: Any) -> None:
        self._note("before", self.weight.detach())
        update(request)
        self._note("after", self.weight.detach())


def observed(options: dict[str, Any]) -> list[tuple[str, str, float]]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 4.0)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, fused=True), registry, **arguments(**options)
        )
        log: list[tuple[str, str, float]] = []
        first, second = (Recorder(name, log, model.weight) for name in ("first", "second"))
        optimizer.add_observer(first)
        optimizer.add_observer(second)
        assert optimizer.observers == (first, second)
        for step in range(2):
            optimizer.zero_grad()
            optimizer.backward(model(torch.full((1, 1), 1.0 + registry.global_rank)).sum())
            optimizer.step()
            if step == 0:
                optimizer.remove_observer(first)
                optimizer.remove_observer(first)
        return log


@pytest.mark.parametrize("options", [{}, {"shard_states": "data"}, {"offload": 1.0}], ids=str)
def test_observers_are_called_in_order_with_gradients_and_weights(world: World, options: dict[str, Any]) -> None:
    for rank, log in enumerate(world.run(2, observed, options)):
        calls = [(name, what) for name, what, _ in log]
        assert calls[:4] == [("first", "local"), ("second", "local"), ("first", "reduced"), ("second", "reduced")]
        # The observer that was added last is the outermost one.
        assert calls[4:8] == [("second", "before"), ("first", "before"), ("first", "after"), ("second", "after")]
        assert calls[8:] == [("second", what) for what in ("local", "reduced", "before", "after")]
        assert log[0][2] == 1.0 + rank
        assert {value for _, what, value in log[:8] if what == "before"} == {4.0}
        assert {value for _, what, value in log[:8] if what == "after"} == {2.5}


def one_optimizer() -> ParallelOptimizer[Any]:
    model = nn.Linear(1, 1)
    declare(model, {"*": P()})
    return ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), ProcessGroupRegistry(Topology()))


def test_add_observer_rejects_class_instead_of_instance() -> None:
    with pytest.raises(TypeError, match="give an instance of a subclass of StepObserver"):
        one_optimizer().add_observer(StepObserver)  # type: ignore[arg-type]


def test_adding_observer_twice_raises() -> None:
    optimizer, observer = one_optimizer(), StepObserver()
    optimizer.add_observer(observer)
    with pytest.raises(ValueError, match="StepObserver is an observer of this optimizer already: add it once"):
        optimizer.add_observer(observer)


def test_observer_stays_registered_after_param_group_is_added() -> None:
    optimizer, observer = one_optimizer(), StepObserver()
    optimizer.add_observer(observer)
    new = nn.Linear(1, 1)
    declare(new, {"*": P()})
    optimizer.add_param_group({"params": list(new.parameters())})
    assert optimizer.observers == (observer,)
