"""The precision modes, but apex's (`meshstep.amp.apex`) and the one in 8 bits (`meshstep.amp.fp8`).

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
    """Full precision; of a model that was built in half precision, parameters, buffers and inputs become float32."""

    name: ClassVar[str] = "fp32"

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        if lift_half_(model):
            model.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)


@register_mode
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


@register_mode
@dataclass(frozen=True)
class Bf16(Precision):
    """bfloat16 throughout: parameters, buffers, inputs, outputs. No loss scale: the range is float32's.

    The criterion gets its floating-point arguments in float32; a loss of 8 significant bits would say little.

    Args:
        stochastic_rounding: No float32 masters and main grads; see `StochasticRounding` for what it saves and costs.
        main_grads: Gradients add up in float32. False: they stay bfloat16 until the step reads them, which saves 2 bytes an
            element and a pass over memory in backward; for windows of one micro-batch. It is the same to the bit, but where
            the model uses a weight more than once: those sums are then rounded to bfloat16, as torch's are.
        split_masters: Keep each float32 master as the weight and a 16-bit remainder, 2 bytes an element instead of 4, with
            AdamW's states and the weight 12 instead of 14. The masters are the same to the bit; the weights are rounded to
            nearest too, but ties go away from zero (of one master in 2^17), where they else go to even. See
            `meshstep.amp.split_masters`. Not with ``Replayable`` and `DistributedDataParallel`.
    Raises:
        ValueError: split_masters with stochastic_rounding, which has no masters, or with main_grads=False.
    """

    stochastic_rounding: bool = False
    main_grads: bool = True
    split_masters: bool = False

    name: ClassVar[str] = "bf16"

    def __post_init__(self) -> None:
        if self.split_masters and self.stochastic_rounding:
            raise ValueError(
                "Bf16(stochastic_rounding=True) has no masters to split: leave split_masters out (8 bytes an element with "
                "AdamW, weights rounded at random), or stochastic_rounding (12 bytes, exact)"
            )
        if self.split_masters and not self.main_grads:
            raise ValueError(
                "Bf16(split_masters=True, main_grads=False): split masters are stepped from float32 gradients; leave "
                "main_grads out"
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
    """Everything float16, inputs cast to it, outputs to float32; float32 masters and a loss scale.

    Args:
        keep_batchnorm_fp32: Leave batch norm, parameters and running statistics, in float32.
        init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale: As for
            `DynamicLossScale`.
        main_grads: As for `Bf16`.
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
