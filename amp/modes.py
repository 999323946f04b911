"""Precision modes: the base class `Precision`, and all modes except `ApexFp16` and `Fp8`.

A mode determines which tensors are cast, which stay float32, and whether there is a loss scale.

A mode is a small frozen object without state. It prepares a model in place. Parameters stay the same objects and keep
their annotations; the module keeps its class (except linear layers under `Fp8`), attributes and state-dict keys. A
model that was built in half precision is cast like any other model, but digits lost by earlier rounding do not come
back. Float32 master weights, or float32 parameters in modes without master weights, start with exactly the values of
the half-precision weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import nn

from ..parallel.mesh.registry import ProcessGroupRegistry
from .casting import CastInputs, autocast_criterion, autocast_model_, cast_floating, cast_model_, lift_half_, run_in_
from .loss_scale import DynamicLossScale, LossScale

Criterion = Callable[..., Any]

_MARK = "_meshstep_precision"


class Precision(ABC):
    """Base class of precision modes. Subclasses implement `_prepare`, which is called once per model.

    ```python
    class Float64(Precision):
        name = "float64"

        def _prepare(self, model, registry):
            model.double()
    ```
    """

    name: ClassVar[str]
    main_grads: bool = True
    """If True, gradients of half-precision parameters with masters accumulate in float32."""

    @property
    def masters(self) -> bool:
        """Return True if half-precision parameters get float32 master weights and main gradients; see `MasterWeights`."""
        return False

    @property
    def split_masters(self) -> bool:
        """Return True if masters are stored as a bfloat16 weight and a remainder; see `meshstep.amp.master_weights`."""
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
        """Cast ``model`` and register hooks on it, in place, so that it runs in this mode.

        Prepare the model before you create `MasterWeights` and before you wrap the model (`DistributedDataParallel`,
        FSDP). The optimizer may already exist. Existing gradients are cast too.

        Args:
            model: The full model, or this rank's part of the model, on any device. You may move the model later.
            registry: The process groups, for modes whose ranks communicate in the forward pass (`Fp8`). Default None:
                one process.
        Returns:
            ``model``.
        Raises:
            ValueError: The model or a submodule has already been prepared. Or the mode needs another dtype for a
                parameter that is a DTensor or belongs to `DistributedDataParallel`. The model is unchanged.
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
        """Cast the tensors of ``model`` and register hooks on it, in place. `prepare` calls this method."""

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        """Return a criterion that computes the loss in the dtype that this mode requires.

        Args:
            criterion: A module or function that returns the loss. A module is changed in place and returned; a function
                is wrapped.
        """
        return criterion

    def export_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict in the dtypes that this mode exports.

        Default: the dtypes of the model's parameters and buffers.

        Args:
            model: The prepared module.
        """
        return model.state_dict()


Mode = Literal["fp32", "fp16", "bf16", "fp16_naive", "fp16_apex", "fp8"]
"""The name of a precision mode, for ``precision=``; `precision_of` returns its object."""
MODES: dict[str, type[Precision]] = {}
"""Registered modes by name, for `precision_of`; `register_mode` adds entries."""

AnyMode = TypeVar("AnyMode", bound=Precision)


def register_mode(mode: type[AnyMode]) -> type[AnyMode]:
    """Register a mode under its ``name`` for `precision_of`. Use it as a class decorator.

        @register_mode
        class Fp32Again(Fp32):
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


# Modes ----------------------------------------------------------------------------------------------------------------

# name          params    forward                          masters  loss scale                      batch norm
# "fp32"        float32   float32                          none     none                            float32
# "fp16"        float32   autocast float16, criterion too  none     2^16, x2, x0.5, every 2000      autocast's rules
# "bf16"        bfloat16  bfloat16                         float32  none                            bfloat16
# "fp16_naive"  float16   float16 in, float32 out          float32  2^16, every 1000, hysteresis 2  float16
# "fp16_apex"   opt levels O0 to O3: see `ApexFp16`
# "fp8"         linear layers in 8 bits: see `Fp8`


@register_mode
@dataclass(frozen=True)
class Fp32(Precision):
    """Full precision: half-precision parameters and buffers become float32.

    If the model had any, its floating-point inputs are cast to float32 too.

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
    """torch's automatic mixed precision: float32 parameters, autocast to float16, and the loss scale of `GradScaler`.

    The model and the criterion run under autocast. Half-precision parameters and buffers become float32. The first one
    or two steps are usually skipped, because the initial loss scale is too high.

        mode = TorchFp16(init_scale=2.0**12)
        model, criterion = mode.prepare(model), mode.prepare_criterion(criterion)

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: Arguments of `DynamicLossScale`. Defaults: 2^16,
            2.0, 0.5, 2000.
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
    """bfloat16 parameters, buffers, inputs and outputs, without a loss scale.

    bfloat16 needs no loss scale, because it has the exponent range of float32. The criterion gets its floating-point
    arguments in float32, because 8 significant bits are too few for a loss.

        model = Bf16(split_masters=True).prepare(model)

    Args:
        stochastic_rounding: If True, the optimizer uses `StochasticRounding` instead of float32 masters and main
            gradients. Default: False.
        main_grads: If True, gradients accumulate in float32. If False, gradients stay bfloat16 until the step reads
            them. This saves 2 bytes per element and a pass over memory in backward, and suits accumulation windows of a
            single micro-batch. The results are bitwise identical, unless the model uses a weight more than once. Gradient
            sums of such weights are rounded to bfloat16, as in torch. Default: True.
        split_masters: If True, each float32 master is stored as the weight and a 16-bit remainder, with 2 bytes per
            element instead of 4. With AdamW, weight, remainder and states take 12 bytes per element instead of 14. The
            masters are bitwise identical. The weights are still rounded to nearest, but ties round away from zero
            instead of to even; this affects one master in 2^17. See `meshstep.amp.master_weights`. Not supported with
            ``Replayable`` and `DistributedDataParallel`. Default: False.
    Raises:
        ValueError: ``split_masters`` is combined with ``stochastic_rounding``, which has no masters, or with
            ``main_grads=False``.
    """

    stochastic_rounding: bool = False
    main_grads: bool = True
    split_masters: bool = False

    name: ClassVar[str] = "bf16"

    def __post_init__(self) -> None:
        if self.split_masters and self.stochastic_rounding:
            raise ValueError(
                "Bf16(stochastic_rounding=True, split_masters=True): stochastic rounding has no masters to split; leave "
                "out split_masters (6 bytes per element with AdamW) or stochastic_rounding (12 bytes per element, exact)"
            )
        if self.split_masters and not self.main_grads:
            raise ValueError(
                "Bf16(split_masters=True, main_grads=False): split masters need float32 gradients; leave main_grads out"
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
    """float16 parameters and inputs, float32 outputs, float32 masters and a dynamic loss scale.

        model = NaiveFp16(keep_batchnorm_fp32=True).prepare(model)

    Args:
        keep_batchnorm_fp32: If True, the parameters and running statistics of batch norm become float32. Default:
            False.
        init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale: Arguments of
            `DynamicLossScale`. Defaults: 2^16, 2.0, 0.5, 1000, 2, 0.0, inf.
        main_grads: As in `Bf16`, with float16 in place of bfloat16. Default: True.
    Raises:
        ValueError: An argument is out of range.
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
