"""Which weights an optimizer steps: the model's own, float32 masters of them, or bfloat16 ones by stochastic rounding.

Three objects with one interface, `Weights`. A step is ``collect()``, then ``step(update)``, then ``zero_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ..parallel.mesh.registry import ProcessGroupRegistry
from .master_weights import MasterWeights
from .precision import Precision
from .stochastic_rounding import StochasticRounding


class Weights(Protocol):
    """How the gradients of the model come to the optimizer, and its update back to the model."""

    def collect(self) -> None:
        """Give the optimizer's parameters the gradients that backward made."""

    def step(self, update: Callable[[], object]) -> None:
        """Call ``update``, which steps the optimizer or skips, and bring the result into the model."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved beside the optimizer's own state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; ValueError where it does not fit, and nothing changed."""


class PlainWeights:
    """The optimizer steps the model's parameters themselves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def collect(self) -> None:
        """Nothing to do: the gradients are where the optimizer reads them."""

    def step(self, update: Callable[[], object]) -> None:
        """Call ``update``."""
        update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """``{"dtypes": names of the parameters' dtypes}``: the optimizer's own state says all else."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {"dtypes": sorted({str(param.dtype) for param in params})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the state is of parameters of the same dtypes; torch would cast any other without a word.

        Raises:
            ValueError: It is not, or has masters: it was saved in another mode.
        """
        own = self.state_dict()
        if dict(state) != own:
            given = ", ".join(state.get("dtypes", ())) or f"what has {', '.join(state) or 'nothing'}"
            raise ValueError(
                f"the state was saved for parameters of {given}, but the optimizer steps {', '.join(own['dtypes'])}, "
                "without master weights; continue in the precision mode that it was saved in"
            )


def make_weights(
    optimizer: torch.optim.Optimizer, precision: Precision, registry: ProcessGroupRegistry, *, main_grads: bool = True
) -> Weights:
    """The weights that ``precision`` steps; the optimizer's param groups are changed in place where it has masters.

    Args:
        main_grads: As for `MasterWeights`.
    """
    if precision.masters:
        return MasterWeights(optimizer, main_grads=main_grads)
    if precision.stochastic_rounding:
        return StochasticRounding(optimizer, registry)
    return PlainWeights(optimizer)
