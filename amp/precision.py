"""The base class of precision modes: which tensors are cast, which stay float32, and whether there is a loss scale.

A mode is a small frozen object without state. It prepares a model in place. Parameters stay the same objects and keep
their annotations; the module keeps its class, attributes and state-dict keys. A model that was built in half precision
is cast like any other model, but digits lost by earlier rounding do not come back. The float32 masters start from
exactly the half-precision weights. In modes without masters, the float32 parameters do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import nn

from ..parallel.mesh.registry import ProcessGroupRegistry
from .loss_scale import LossScale

Criterion = Callable[..., Any]

_MARK = "_meshstep_precision"


class Precision(ABC):
    """Base class of precision modes. Subclasses implement `_prepare`, which is called once per model."""

    name: ClassVar[str]
    main_grads: bool = True
    """If True, gradients of half-precision parameters with masters accumulate in float32."""

    @property
    def masters(self) -> bool:
        """Return True if half-precision parameters get float32 master weights and main gradients; see `MasterWeights`."""
        return False

    @property
    def split_masters(self) -> bool:
        """Return True if masters are stored as bfloat16 weights and remainders; see `meshstep.amp.split_masters`."""
        return False

    @property
    def stochastic_rounding(self) -> bool:
        """Return True if the optimizer updates bfloat16 parameters with `StochasticRounding`."""
        return False

    def make_loss_scale(self, device: torch.device | str | None = None) -> LossScale | None:
        """Return a new loss scale in its initial state; None for a mode without loss scale.

        Args:
            device: The device of the loss scale's tensors. Default None: torch's default device.
        """
        return None

    def prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None = None) -> nn.Module:
        """Make ``model`` run in this mode, in place.

        Prepare the model before you create `MasterWeights` and before you wrap the model (`DistributedDataParallel`,
        FSDP). The optimizer may already exist. Existing gradients are cast too.

        Args:
            model: The full model, or this rank's part of the model, on any device. You may move the model later.
            registry: The process groups, for modes whose ranks communicate in the forward pass (`Fp8`). Default None:
                one process.
        Returns:
            ``model``.
        Raises:
            ValueError: The model or a submodule has already been prepared. Or parameters would have to be cast that are
                DTensors or that belong to `DistributedDataParallel`. Nothing is changed.
        Collectives: none.
        """
        for name, module in model.named_modules():
            if (mode := getattr(module, _MARK, None)) is not None:
                raise ValueError(
                    f"{name or type(model).__name__} has already been prepared for {mode!r}; a model can be prepared "
                    f"only once, so build a new model for {self.name!r}"
                )
        self._prepare(model, registry)
        setattr(model, _MARK, self.name)
        return model

    @abstractmethod
    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        """Cast and hook ``model`` in place."""

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        """Return the criterion as this mode runs it: a module is changed in place, a function is wrapped.

        Args:
            criterion: A module or function that returns the loss.
        """
        return criterion

    def export_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict in the dtypes that this mode exports.

        The base class exports the dtypes of the parameters.

        Args:
            model: The prepared module.
        """
        return model.state_dict()


Mode = Literal["fp32", "fp16", "bf16", "fp16_naive", "fp16_apex", "fp8"]
MODES: dict[str, type[Precision]] = {}
"""Registered modes by name, for `precision_of`; `register_mode` adds entries."""

AnyMode = TypeVar("AnyMode", bound=Precision)


def register_mode(mode: type[AnyMode]) -> type[AnyMode]:
    """Register a mode under its ``name`` for `precision_of`. Use it as a class decorator.

        @register_mode
        class Fp32Again(Precision):
            name = "fp32_again"

    Args:
        mode: A subclass of `Precision` with a ``name`` and defaults for all arguments.
    Returns:
        ``mode``.
    Raises:
        ValueError: Another mode has this name.
    """
    if MODES.setdefault(mode.name, mode) is not mode:
        raise ValueError(
            f"the mode name {mode.name!r} belongs to {MODES[mode.name].__name__}; give {mode.__name__} another name"
        )
    return mode


def precision_of(precision: str | Precision) -> Precision:
    """Return the mode of this name with its default arguments, or the `Precision` object itself.

        mode = precision_of("bf16")

    Args:
        precision: The name of a registered mode, or a mode.
    Raises:
        ValueError: No mode has this name.
    """
    if isinstance(precision, Precision):
        return precision
    if precision in MODES:
        return MODES[precision]()
    ordered = [*get_args(Mode), *(name for name in MODES if name not in get_args(Mode))]
    names = ", ".join(repr(name) for name in ordered if name in MODES)
    raise ValueError(f"precision={precision!r} is not a mode; choose from {names}, or give an object such as Bf16()")
