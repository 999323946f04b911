"""Precision modes except `ApexFp16` (`meshstep.amp.apex`) and `Fp8` (`meshstep.amp.fp8`).

name          params    forward                          masters  loss scale                      batch norm
"fp32"        float32   float32                          none     none                            float32
"fp16"        float32   autocast float16, criterion too  none     2^16, x2, x0.5, every 2000      autocast's rules
"bf16"        bfloat16  bfloat16                         float32  none                            bfloat16
"fp16_naive"  float16   float16 in, float32 out          float32  2^16, every 1000, hysteresis 2  float16
"fp16_apex"   opt levels O0 to O3: see `ApexFp16`
"fp8"         linear layers in 8 bits: see `Fp8`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import Any, ClassVar

import torch
from torch import nn

from ..parallel.mesh.registry import ProcessGroupRegistry
from .casting import CastInputs, autocast_criterion, autocast_model_, cast_floating, cast_model_, lift_half_, run_in_
from .loss_scale import DynamicLossScale, LossScale
from .precision import Criterion, Precision, register_mode


@register_mode
@dataclass(frozen=True)
class Fp32(Precision):
    """Full precision: half-precision parameters, buffers and inputs become float32.

    model = Fp32().prepare(model)
    """

    name: ClassVar[str] = "fp32"

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        if lift_half_(model):
            model.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)


@register_mode
@dataclass(frozen=True)
class TorchFp16(Precision):
    """torch's automatic mixed precision: float32 parameters, autocast to float16, and the loss scale of `GradScaler`.

    The model and the criterion run under autocast. Half-precision parameters become float32. The first one or two steps
    are usually skipped, until the loss scale is low enough.

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
            them. This saves 2 bytes per element and a pass over memory in backward, and suits windows of a single
            micro-batch. The results are bitwise identical, unless the model uses a weight more than once. Gradient sums
            of such weights are rounded to bfloat16, as in torch. Default: True.
        split_masters: If True, each float32 master is stored as the weight and a 16-bit remainder, with 2 bytes per
            element instead of 4. With AdamW, weight, remainder and states take 12 bytes per element instead of 14. The
            masters are bitwise identical. The weights are still rounded to nearest, but ties round away from zero
            instead of to even; this affects one master in 2^17. See `meshstep.amp.split_masters`. Not supported with
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
                "out split_masters (8 bytes per element with AdamW) or stochastic_rounding (12 bytes per element, exact)"
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
        main_grads: As in `Bf16`.
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
