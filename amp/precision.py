"""Precision modes: what is cast, what stays in float32, and whether there is a loss scale.

    name          params    forward                          masters  loss scale                      batch norm
    "fp32"        float32   float32                          none     none                            float32
    "fp16"        float32   autocast float16, criterion too  none     2^16, x2, x0.5, every 2000      autocast's rules
    "bf16"        bfloat16  bfloat16                         float32  none                            bfloat16
    "fp16_naive"  float16   float16 in, float32 out          float32  2^16, every 1000, hysteresis 2  float16
    "fp16_apex"   opt levels O0 to O3: see `ApexFp16`
    "fp8"         linear layers in 8 bits: see `Fp8`

A mode is a small frozen object without state. It prepares a model in place: the parameters remain the same objects,
with their annotations, and so do the module's class, attributes and state-dict keys. A model that was built in half
precision is cast to the mode's dtype like any other. What rounding has lost by then is lost: the float32 masters (or
the float32 parameters, in modes without masters) start from exactly the half-precision weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..parallel.mesh.registry import ProcessGroupRegistry
from .casting import Autocast, CastInputs, CastOutputs, cast_floating, cast_model_, is_half
from .loss_scale import DynamicLossScale, LossScale

Criterion = Callable[..., Any]

_MARK = "_meshstep_precision"


class Precision(ABC):
    """One precision mode. Subclasses say how in `_prepare`, which is called once a model."""

    name: ClassVar[str]

    @property
    def masters(self) -> bool:
        """Whether half-precision parameters get float32 master weights and main grads; see `MasterWeights`."""
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
            ValueError: It, or a part of it, has been prepared already; or parameters that `DistributedDataParallel`
                holds would have to be cast. Nothing is changed then.
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


@dataclass(frozen=True)
class Fp32(Precision):
    """Full precision; of a model that was built in half precision, parameters, buffers and inputs become float32."""

    name: ClassVar[str] = "fp32"

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        if _lift_half_(model):
            model.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)


@dataclass(frozen=True)
class TorchFp16(Precision):
    """torch's AMP: float32 parameters, model and criterion under autocast to float16, `GradScaler`'s loss scale.

    The parameters of a model that was built in half precision become float32. The first step or two are usually skipped,
    until the scale is no longer too large.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: As for `DynamicLossScale`.
    Raises:
        ValueError: One of them is out of range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    name: ClassVar[str] = "fp16"

    def __post_init__(self) -> None:
        self.make_loss_scale()

    def make_loss_scale(self, device: torch.device | str | None = None) -> LossScale:
        return DynamicLossScale(
            self.init_scale, self.growth_factor, self.backoff_factor, self.growth_interval, device=device
        )

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        autocast_model_(model)

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        return autocast_criterion(criterion)


@dataclass(frozen=True)
class Bf16(Precision):
    """bfloat16 throughout: parameters, buffers, inputs, outputs. No loss scale: the range is float32's.

    The criterion gets its floating-point arguments in float32; a loss of 8 significant bits would say little.

    Args:
        stochastic_rounding: No float32 masters and main grads; see `StochasticRounding` for what it saves and costs.
    """

    stochastic_rounding: bool = False

    name: ClassVar[str] = "bf16"

    @property
    def masters(self) -> bool:
        return not self.stochastic_rounding

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        cast_model_(model, lambda module, tensor: torch.bfloat16)
        model.register_forward_pre_hook(CastInputs(torch.bfloat16), with_kwargs=True)

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        if isinstance(criterion, nn.Module):
            criterion.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
            return criterion

        @wraps(criterion)
        def in_float32(*args: Any, **kwargs: Any) -> Any:
            return criterion(*cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32))

        return in_float32


@dataclass(frozen=True)
class NaiveFp16(Precision):
    """Everything float16, inputs cast to it, outputs to float32; float32 masters and a loss scale.

    Args:
        keep_batchnorm_fp32: Leave batch norm, parameters and running statistics, in float32.
        init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale: As for
            `DynamicLossScale`.
    Raises:
        ValueError: One of them is out of range.
    """

    keep_batchnorm_fp32: bool = False
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    min_scale: float = 0.0
    max_scale: float = inf

    name: ClassVar[str] = "fp16_naive"

    def __post_init__(self) -> None:
        self.make_loss_scale()

    @property
    def masters(self) -> bool:
        return True

    def make_loss_scale(self, device: torch.device | str | None = None) -> LossScale:
        return DynamicLossScale(
            self.init_scale,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            self.hysteresis,
            self.min_scale,
            self.max_scale,
            device=device,
        )

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        run_in_(model, torch.float16, self.keep_batchnorm_fp32)


def precision_of(precision: str | Precision) -> Precision:
    """The mode of this name with its defaults, or the object itself.

    Raises:
        ValueError: There is no mode of this name.
    """
    if isinstance(precision, Precision):
        return precision
    # Here, because these modules build on this one.
    from .apex import ApexFp16
    from .fp8.mode import Fp8

    modes: tuple[type[Precision], ...] = (Fp32, TorchFp16, Bf16, NaiveFp16, ApexFp16, Fp8)
    for mode in modes:
        if mode.name == precision:
            return mode()
    names = ", ".join(repr(mode.name) for mode in modes)
    raise ValueError(f"precision={precision!r} is no mode; give one of {names}, or an object such as Bf16()")


# What the modes are made of -------------------------------------------------------------------------------------------


def run_in_(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool = False) -> None:
    """Cast the model and its inputs to ``dtype`` and its outputs to float32, in place.

    Batch norm kept in float32 takes and returns ``dtype`` all the same; torch computes it in float32 inside.
    """

    def wanted(module: nn.Module, tensor: Tensor) -> torch.dtype:
        keep = keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return torch.float32 if keep else dtype

    cast_model_(model, wanted)
    model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
    model.register_forward_hook(CastOutputs(torch.float32))


def autocast_model_(model: nn.Module) -> None:
    """Run the model under autocast to float16, in place; half-precision parameters and buffers become float32."""
    _lift_half_(model)
    model.forward = Autocast(model.forward, torch.float16, model)


def autocast_criterion(criterion: Criterion) -> Criterion:
    """Run the criterion under autocast to float16: a module is changed in place, a function wrapped."""
    if not isinstance(criterion, nn.Module):
        return Autocast(criterion, torch.float16)
    criterion.forward = Autocast(criterion.forward, torch.float16, criterion)
    return criterion


def _lift_half_(model: nn.Module) -> bool:
    return cast_model_(model, lambda module, tensor: torch.float32 if is_half(tensor) else tensor.dtype)
