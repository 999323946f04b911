"""Precision modes: the base class `Precision`, and all modes except `ApexFp16` and `Fp8`.

A mode determines which tensors of a model are cast, which stay float32, and whether there is a loss scale.

The modes are frozen dataclasses without state. A mode prepares a model in place: parameters stay the same objects and keep
their declared layouts. Modules keep their classes (except linear layers under `Fp8`) and their state-dict keys.

A model that was built in half precision is cast like any other model. A cast to float32 is exact. Master weights start
with the values of the cast parameters, which are rounded if the parameters had another dtype before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

from ..parallel.mesh.registry import ProcessGroupRegistry
from .casting import CastInputs, autocast_criterion, autocast_model_, cast_floating, cast_model_, lift_half_, run_in_
from .loss_scale import DynamicLossScale, LossScale

Criterion = Callable[..., Any]

_MARK = "_meshstep_precision"


class Precision(ABC):
    """Base class of precision modes. A mode casts a model, and may define a loss scale and float32 master weights.

    Subclasses implement `_prepare`, which `prepare` calls once per model.

    ```python
    class Float64(Precision):
        name = "float64"

        def _prepare(self, model, registry):
            model.double()
    ```
    """

    name: ClassVar[str]
    main_grads: bool = True
    """If True, gradients of half-precision parameters that have float32 master weights accumulate in float32.

    In `ParallelOptimizer`, gradients that torch's `DistributedDataParallel` or `fully_shard` reduces accumulate in the
    dtype of the parameters anyway.
    """

    @property
    def masters(self) -> bool:
        """Return True if the optimizer updates float32 master weights of half-precision parameters."""
        return False

    @property
    def split_masters(self) -> bool:
        """Return True if each float32 master weight is stored as the bfloat16 parameter and a 16-bit remainder."""
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
        """Change ``model`` in place, so that it runs in this mode: cast its tensors, and cast inputs or use autocast.

        Prepare the model before you create `MasterWeights` and before you wrap the model (`DistributedDataParallel`,
        FSDP). The optimizer may already exist. The gradients of cast parameters are cast too.

        Args:
            model: The full model, or this rank's part of the model, on any device. You may move the model later.
            registry: The process groups, for `Fp8`, whose layers issue collectives. Other modes ignore it. Default None:
                the model is not sharded.
        Returns:
            ``model``.
        Raises:
            ValueError: The model or a submodule has already been prepared. Or the mode needs another dtype for a
                parameter or buffer, and this tensor is a DTensor, or the model contains `DistributedDataParallel`. Or
                as in the docstring of `Fp8`. The model is unchanged.
        Collectives: none.
        """
        for name, module in model.named_modules():
            if (mode := getattr(module, _MARK, None)) is not None:
                write = f"build a new model for {self.name!r}"
                if module is model and mode == self.name:
                    write = "use the model as it is, without a second call of prepare() or boost()"
                raise ValueError(
                    f"{name or type(model).__name__} has already been prepared for {mode!r}, and a model can be prepared "
                    f"for a precision mode only once; {write}"
                )
        self._prepare(model, registry)
        setattr(model, _MARK, self.name)
        return model

    @abstractmethod
    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        """Change ``model`` in place, so that it runs in this mode. `prepare` calls this method once per model."""

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        """Return a criterion that computes the loss in the dtype that this mode requires.

        The base class returns ``criterion`` unchanged. A mode that overrides the method changes a module in place and
        returns it, and wraps a function.

        Args:
            criterion: A module or function that returns the loss.
        """
        return criterion

    def export_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict in the dtypes that this mode exports.

        The base class exports the dtypes of the model's parameters and buffers.

        Args:
            model: The prepared module.
        """
        return model.state_dict()


Mode = Literal["fp32", "fp16", "bf16", "fp16_naive", "fp16_apex", "fp8"]
"""Names of the built-in precision modes, for ``ParallelOptimizer(..., precision=)``."""
MODES: dict[str, type[Precision]] = {}
"""The class of each registered mode, by the mode's name. `register_mode` adds entries, `precision_of` reads them."""

AnyMode = TypeVar("AnyMode", bound=Precision)


def register_mode(mode: type[AnyMode]) -> type[AnyMode]:
    """Register a class of modes under its ``name``, so that `precision_of` finds it. Use it as a class decorator.

        @register_mode
        class Fp32Again(Fp32):
            name = "fp32_again"

    All arguments of the class need defaults. A name of another class raises ValueError.
    """
    if MODES.setdefault(mode.name, mode) is not mode:
        raise ValueError(
            f"the precision mode name {mode.name!r} belongs to {MODES[mode.name].__name__}; give {mode.__name__} another "
            "name"
        )
    return mode


def precision_of(precision: str | Precision, argument: str = "precision") -> Precision:
    """Return the precision mode with a given name, constructed with default arguments.

        mode = precision_of("bf16")

    Args:
        precision: The name of a registered mode; or a `Precision` object, which is returned unchanged.
        argument: The name of the argument in the error. Default: ``"precision"``.
    Raises:
        ValueError: No registered mode has this name.
        TypeError: The class of the object has no attribute ``name``.
    """
    if isinstance(precision, Precision):
        if not hasattr(precision, "name"):
            kind = type(precision).__name__
            raise TypeError(
                f"the precision mode class {kind} has no attribute 'name'; write in the class: name = {kind.lower()!r}"
            )
        return precision
    if precision in MODES:
        return MODES[precision]()
    raise ValueError(
        f"{argument}={precision!r} is not a precision mode; choose from {', '.join(map(repr, MODES))}, or give an object "
        "such as Bf16()"
    )


# Modes ----------------------------------------------------------------------------------------------------------------

# The default values of each mode. "growth 2000": the loss scale doubles after 2000 steps in a row without overflow.
# With "fp32" and "fp16", float64 parameters stay float64.
#
# name          params    forward                          master weights  loss scale                       batch norm
# "fp32"        float32   float32                          none            none                             float32
# "fp16"        float32   autocast float16, criterion too  none            2^16, growth 2000                float32
# "bf16"        bfloat16  bfloat16                         float32         none                             bfloat16
# "fp16_naive"  float16   float16 in, float32 out          float32         2^16, growth 1000, hysteresis 2  float16
# "fp16_apex"   opt levels O0 to O3: see `ApexFp16`
# "fp8"         linear layers in 8 bits: see `Fp8`


@register_mode
@dataclass(frozen=True)
class Fp32(Precision):
    """Full precision: float16 and bfloat16 parameters and buffers become float32.

    If the model had such parameters or buffers, its floating-point inputs are cast to float32 too.

    ```python
    model = Fp32().prepare(model)
    ```
    """

    name: ClassVar[str] = "fp32"

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        if lift_half_(model):
            model.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)


@register_mode
@dataclass(frozen=True)
class TorchFp16(Precision):
    """torch's automatic mixed precision: float32 parameters, autocast to float16, and a dynamic loss scale.

    The model and the criterion run under autocast. Half-precision parameters and buffers become float32. If the initial
    loss scale is too high, the first steps overflow and are skipped, until the scale is low enough.

        mode = TorchFp16(init_scale=2.0**12)
        model, criterion = mode.prepare(model), mode.prepare_criterion(criterion)

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: Arguments of `DynamicLossScale`, with the defaults of
            `torch.amp.GradScaler`: 2^16, 2.0, 0.5, 2000.
    Raises:
        ValueError: An argument is out of range.
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


@register_mode
@dataclass(frozen=True)
class Bf16(Precision):
    """bfloat16 parameters, buffers and inputs, with float32 master weights in the optimizer and without a loss scale.

    bfloat16 needs no loss scale, because it has the exponent range of float32. `prepare_criterion` returns a criterion
    that casts its floating-point arguments to float32, because 8 significant bits are too few for a loss.

        model = Bf16(split_masters=True).prepare(model)

    Args:
        stochastic_rounding: If True, there are no float32 master weights: the optimizer rounds bfloat16 parameters
            stochastically (`StochasticRounding`). Default: False.
        main_grads: If True, gradients accumulate in float32, unless ``stochastic_rounding`` is True, or torch's
            `DistributedDataParallel` or `fully_shard` reduces the gradients. If False, gradients stay bfloat16 until the
            step reads them, which saves 2 bytes per element and a pass over memory in backward.
            Sums of gradients are then rounded to bfloat16: over the micro-batches between two steps, and for a weight
            that the model uses twice. Default: True.
        split_masters: If True, each float32 master weight is stored as the bfloat16 weight and a 16-bit remainder. The
            remainder takes 2 bytes per element, a float32 master takes 4. With AdamW, weight, remainder and states take
            12 bytes per element instead of 14. The optimizer still updates float32 values. The bfloat16 weight is the
            nearest one, but ties round away from zero instead of to even, which affects about one weight in 2^17. Not
            supported with ``Replayable``, `DistributedDataParallel` and full-tensor optimizers. Default: False.
    Raises:
        ValueError: ``split_masters=True`` is combined with ``stochastic_rounding=True`` or ``main_grads=False``.
    """

    stochastic_rounding: bool = False
    main_grads: bool = True
    split_masters: bool = False

    name: ClassVar[str] = "bf16"

    def __post_init__(self) -> None:
        if self.split_masters and self.stochastic_rounding:
            raise ValueError(
                "Bf16(stochastic_rounding=True, split_masters=True): stochastic rounding has no master weights to split; "
                "keep only stochastic_rounding=True (6 bytes per element with AdamW), or only split_masters=True (12 "
                "bytes, float32 updates)"
            )
        if self.split_masters and not self.main_grads:
            raise ValueError(
                "Bf16(split_masters=True, main_grads=False): split master weights need float32 gradients; leave main_grads "
                "out"
            )

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


@register_mode
@dataclass(frozen=True)
class NaiveFp16(Precision):
    """float16 parameters and inputs, float32 outputs, float32 master weights and a dynamic loss scale.

        model = NaiveFp16(keep_batchnorm_fp32=True).prepare(model)

    Args:
        keep_batchnorm_fp32: If True, the parameters and running statistics of batch norm become float32. If False, they
            become float16. Default: False.
        init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale: Arguments of
            `DynamicLossScale`. Defaults: 2^16, 2.0, 0.5, 1000, 2, 0.0, inf.
        main_grads: If True, gradients accumulate in float32, unless torch's `DistributedDataParallel` or `fully_shard`
            reduces the gradients. If False, gradients stay float16 until the step reads them, and sums over micro-batches
            are rounded to float16. Default: True.
    Raises:
        ValueError: An argument of the loss scale is out of range.
    """

    keep_batchnorm_fp32: bool = False
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    min_scale: float = 0.0
    max_scale: float = inf
    main_grads: bool = True

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
