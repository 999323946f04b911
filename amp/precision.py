"""What a precision mode is: what is cast, what stays in float32, and whether there is a loss scale.

A mode is a small frozen object without state. It prepares a model in place: the parameters remain the same objects,
with their annotations, and so do the module's class, attributes and state-dict keys. A model that was built in half
precision is cast to the mode's dtype like any other. What rounding has lost by then is lost: the float32 masters (or
the float32 parameters, in modes without masters) start from exactly the half-precision weights.
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
    """One precision mode. Subclasses say how in `_prepare`, which is called once a model."""

    name: ClassVar[str]
    main_grads: bool = True
    """Whether half-precision parameters with masters get their gradients in float32."""

    @property
    def masters(self) -> bool:
        """Whether half-precision parameters get float32 master weights and main grads; see `MasterWeights`."""
        return False

    @property
    def split_masters(self) -> bool:
        """Whether the masters are kept as bfloat16 weights and remainders; see `meshstep.amp.split_masters`."""
        return False

    @property
    def stochastic_rounding(self) -> bool:
        """Whether the optimizer steps bfloat16 parameters with `StochasticRounding`."""
        return False

    def make_loss_scale(self, device: torch.device | str | None = None) -> LossScale | None:
        """A new loss scale in its initial state on ``device``; None for a mode that needs none."""
        return None

    def prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None = None) -> nn.Module:
        """Make ``model`` run in this mode, in place.

        Prepare before `MasterWeights` is made and before the model is wrapped (`DistributedDataParallel`, FSDP); an
        optimizer may have been made before. Gradients that are there are cast along.

        Args:
            model: The whole model, or this rank's part of it. On any device; moving it later is fine.
            registry: For modes in which ranks must agree on something in the forward (`Fp8`).
        Returns:
            ``model``.
        Raises:
            ValueError: It, or a part of it, has been prepared already; or parameters would have to be cast that are
                DTensors or that `DistributedDataParallel` holds. Nothing is changed then.
        Collectives: none here.
        """
        for name, module in model.named_modules():
            if (mode := getattr(module, _MARK, None)) is not None:
                raise ValueError(
                    f"{name or type(model).__name__} has been prepared for {mode!r} already; a model can be prepared "
                    f"once: build it anew for {self.name!r}"
                )
        self._prepare(model, registry)
        setattr(model, _MARK, self.name)
        return model

    @abstractmethod
    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        """Cast and hook ``model`` in place."""

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        """The criterion as this mode runs it: a module is changed in place and returned, a function wrapped."""
        return criterion

    def export_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The model's state dict in the dtypes that this mode exports: here those of the parameters."""
        return model.state_dict()


Mode = Literal["fp32", "fp16", "bf16", "fp16_naive", "fp16_apex", "fp8"]
MODES: dict[str, type[Precision]] = {}
"""Modes that `precision_of` knows by name; `register_mode` adds one."""

AnyMode = TypeVar("AnyMode", bound=Precision)


def register_mode(mode: type[AnyMode]) -> type[AnyMode]:
    """Let `precision_of` find a mode by its ``name``. Use it as a class decorator.

    Raises:
        ValueError: Another mode has this name.
    """
    if MODES.setdefault(mode.name, mode) is not mode:
        raise ValueError(
            f"the mode {mode.name!r} is {MODES[mode.name].__name__} already: give {mode.__name__} another name"
        )
    return mode


def precision_of(precision: str | Precision) -> Precision:
    """Return the mode of this name with its defaults, or the object itself.

    Raises:
        ValueError: There is no mode of this name.
    """
    if isinstance(precision, Precision):
        return precision
    if precision in MODES:
        return MODES[precision]()
    known = [*get_args(Mode), *(name for name in MODES if name not in get_args(Mode))]
    names = ", ".join(repr(name) for name in known if name in MODES)
    raise ValueError(f"precision={precision!r} is no mode; give one of {names}, or an object such as Bf16()")
