"""apex's opt levels O0 to O3, native: `apex.amp` was removed from NVIDIA/apex in May 2025.

    level  params                     forward                      masters  loss scale  keep_batchnorm_fp32
    O0     float32                    float32 in, float32 out      none     1.0         -
    O1     float32                    autocast, criterion too      none     "dynamic"   -
    O2     float16, batch norm not    float16 in, float32 out      float32  "dynamic"   True
    O3     float16                    float16 in, float32 out      none     1.0         False

"dynamic" starts at 2^16, doubles after 2000 good steps up to 2^24, and halves on every overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..parallel.mesh.registry import ProcessGroupRegistry
from .casting import autocast_criterion, autocast_model_, is_half, run_in_
from .loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from .precision import Criterion, Precision, register_mode


class _Level(NamedTuple):
    dtype: torch.dtype | None  # of everything; None: autocast
    keep_batchnorm_fp32: bool | None  # None: the option means nothing
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
    """One of apex's opt levels; see the table above.

    O3 steps the float16 parameters themselves, with optimizer states in float16: Adam's default ``eps=1e-8`` is 0 there,
    and most squares of gradients are too, so that it would divide 0 by 0. Give it an eps of 1e-4 or more.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        keep_batchnorm_fp32: Whether batch norm, parameters and running statistics, stays in float32. For O2 and O3;
            None: the level's default.
        loss_scale: ``"dynamic"``, or a number to keep; None: the level's default.
    Raises:
        ValueError: There is no such level, it has no use for keep_batchnorm_fp32, or the scale is out of range.
    """

    opt_level: Literal["O0", "O1", "O2", "O3"] = "O2"
    keep_batchnorm_fp32: bool | None = None
    loss_scale: float | Literal["dynamic"] | None = None

    name: ClassVar[str] = "fp16_apex"

    def __post_init__(self) -> None:
        if self.opt_level not in _LEVELS:
            raise ValueError(f"opt_level={self.opt_level!r} is no opt level; give one of {', '.join(_LEVELS)}")
        if self.keep_batchnorm_fp32 is not None and self._level.keep_batchnorm_fp32 is None:
            raise ValueError(
                f"keep_batchnorm_fp32={self.keep_batchnorm_fp32} means nothing in {self.opt_level}, which casts no "
                "parameters; leave it None, or choose O2 or O3"
            )
        if isinstance(self.loss_scale, str) and self.loss_scale != "dynamic":
            raise ValueError(f"loss_scale={self.loss_scale!r}: give 'dynamic', a number, or None for the level's own")
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
        """The model's state dict in float32, whatever the parameters are; tied entries stay tied.

        It holds the weights that the forward uses; O2's masters, which are finer, are in the optimizer's state dict.
        """
        exported = model.state_dict(keep_vars=True)  # the parameters themselves, by which tied ones are known
        casts: dict[int, Tensor] = {}
        for key, value in exported.items():
            if isinstance(value, Tensor):
                if id(value) not in casts:
                    casts[id(value)] = value.detach().float() if is_half(value) else value.detach()
                exported[key] = casts[id(value)]
        return exported
