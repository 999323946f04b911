"""The opt levels O0 to O3 of NVIDIA's apex, implemented without apex.

    level  params                     forward                      master weights  loss scale  keep_batchnorm_fp32
    O0     float32                    float32 in, float32 out      none            1.0         not accepted
    O1     float32                    autocast, criterion too      none            "dynamic"   not accepted
    O2     float16 (batch norm: f32)  float16 in, float32 out      float32         "dynamic"   True
    O3     float16                    float16 in, float32 out      none            1.0         False

With O1, float64 parameters stay float64. The loss scale "dynamic" starts at 2^16. It halves at every overflow, and
doubles after 2000 steps in a row without overflow. Its maximum is 2^24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..parallel.mesh.registry import ProcessGroupRegistry
from .casting import autocast_criterion, autocast_model_, is_half, run_in_
from .loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from .modes import Criterion, Precision, register_mode


class _Level(NamedTuple):
    dtype: torch.dtype | None  # dtype of parameters, buffers and inputs; None: use autocast
    keep_batchnorm_fp32: bool | None  # None: the level does not accept the option
    masters: bool
    loss_scale: float | Literal["dynamic"]


_LEVELS = {
    "O0": _Level(torch.float32, None, False, 1.0),
    "O1": _Level(None, None, False, "dynamic"),
    "O2": _Level(torch.float16, True, True, "dynamic"),
    "O3": _Level(torch.float16, False, False, 1.0),
}


@register_mode
@dataclass(frozen=True)
class ApexFp16(Precision):
    """Precision mode of apex's opt levels.

    O0 runs in float32, and O1 under autocast to float16. O2 casts the model to float16, and the optimizer updates float32
    master weights. O3 casts the model to float16, without master weights. The table in `meshstep.amp.apex` has details.

    With O3 the optimizer steps float16 parameters, with float16 states. Adam's default ``eps=1e-8`` rounds to 0 in
    float16, as do most squared gradients, so Adam may divide by 0. Use an ``eps`` of at least 1e-4 with O3.

        model = ApexFp16("O2").prepare(model)

    Args:
        opt_level: ``"O0"``, ``"O1"``, ``"O2"`` or ``"O3"``. Default: ``"O2"``.
        keep_batchnorm_fp32: If True, the parameters and running statistics of batch norm are float32. If False, they are
            cast to float16. Only O2 and O3 accept the option. Default None: True for O2, False for O3.
        loss_scale: ``"dynamic"``, or a constant scale as a number > 0. Default None: 1.0 for O0 and O3, ``"dynamic"`` for
            O1 and O2.
    Raises:
        ValueError: ``opt_level`` is unknown; O0 or O1 got a ``keep_batchnorm_fp32``; or ``loss_scale`` is a string other
            than ``"dynamic"``, or a number outside float32's positive normal range.
    """

    opt_level: Literal["O0", "O1", "O2", "O3"] = "O2"
    keep_batchnorm_fp32: bool | None = None
    loss_scale: float | Literal["dynamic"] | None = None

    name: ClassVar[str] = "fp16_apex"

    def __post_init__(self) -> None:
        if self.opt_level not in _LEVELS:
            raise ValueError(f"opt_level={self.opt_level!r} is not an opt level; choose from {', '.join(_LEVELS)}")
        if self.keep_batchnorm_fp32 is not None and self._level.keep_batchnorm_fp32 is None:
            raise ValueError(
                f"keep_batchnorm_fp32={self.keep_batchnorm_fp32} has no effect in {self.opt_level}, which casts no "
                "parameter to float16; leave keep_batchnorm_fp32 out, or choose O2 or O3"
            )
        if isinstance(self.loss_scale, str) and self.loss_scale != "dynamic":
            raise ValueError(
                f"loss_scale={self.loss_scale!r} is not a loss scale; give 'dynamic', a number > 0, or None for the "
                "level's default"
            )
        self.make_loss_scale()

    @property
    def _level(self) -> _Level:
        return _LEVELS[self.opt_level]

    @property
    def masters(self) -> bool:
        return self._level.masters

    def make_loss_scale(self, device: torch.device | str | None = None) -> LossScale:
        scale = self._level.loss_scale if self.loss_scale is None else self.loss_scale
        if scale == "dynamic":
            return DynamicLossScale(max_scale=2.0**24, device=device)
        return ConstantLossScale(scale, device)

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        level = self._level
        if level.dtype is None:
            autocast_model_(model)
        else:
            keep = level.keep_batchnorm_fp32 if self.keep_batchnorm_fp32 is None else self.keep_batchnorm_fp32
            run_in_(model, level.dtype, bool(keep))

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        return autocast_criterion(criterion) if self._level.dtype is None else criterion

    def export_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict with float16 and bfloat16 tensors cast to float32.

        If several keys refer to one shared parameter, they refer to one tensor in the result. The values are those of
        the model's parameters. The more precise float32 master weights of O2 are in the optimizer's state dict.

        Args:
            model: The prepared module.
        """
        exported = model.state_dict(keep_vars=True)  # keys of a tied parameter have the same object
        casts: dict[int, Tensor] = {}
        for key, value in exported.items():
            if isinstance(value, Tensor):
                if id(value) not in casts:
                    casts[id(value)] = value.detach().float() if is_half(value) else value.detach()
                exported[key] = casts[id(value)]
        return exported
