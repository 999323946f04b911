"""Checks that an optimizer may step shards of tensors: its update of each element must depend on that element alone.

Muon, Shampoo, LAMB and Adafactor compute norms, means or products of a full tensor, so a shard gives wrong results.
Prodigy and D-Adaptation compute sums over all tensors of a rank, so the sums differ between ranks. Optimizers with
quantized states (8-bit Adam) round blocks of elements together, and only in tensors above a certain size.

An optimizer is recognized by the names of its class and package, so no third-party library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any

import torch

from ...parallel.mesh.text import some
from ...parallel.mesh.topology import Topology
from ..norm.plan import ParameterEntry
from ..step.wrapped_optimizer import asks_other_ranks, parts_of

_LOW_BIT = [
    f"{paged}{kind}{bits}"
    for paged in ("", "Paged")
    for kind in ("Adam", "AdamW", "AdEMAMix", "Lion")
    for bits in ("", "8bit", "32bit")
]
_ELEMENTWISE: Mapping[str, Sequence[str]] = {
    "torch": (
        "Adadelta",
        "Adagrad",
        "Adam",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    ),
    "adabelief_pytorch": ("AdaBelief",),
    "adan": ("Adan",),
    "adan_pytorch": ("Adan",),
    "apex": ("FusedAdam", "FusedAdagrad", "FusedSGD"),
    "bitsandbytes": (
        *_LOW_BIT,
        *(f"{kind}{bits}" for kind in ("Adagrad", "RMSprop", "SGD") for bits in ("", "8bit", "32bit")),
    ),
    "deepspeed": ("FusedAdam", "FusedLion", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"),
    "lion_pytorch": ("Lion",),
    "pytorch_optimizer": (
        *("AdaBelief", "Adan", "AdEMAMix", "Lion", "Tiger"),
        *("ScheduleFreeAdamW", "ScheduleFreeRAdam", "ScheduleFreeSGD"),
    ),
    "schedulefree": ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"),
    "timm": ("AdaBelief", "Adan", "Lion"),
    "torch_optimizer": ("AdaBelief",),
    "torchao": ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8"),
    "transformer_engine": ("FusedAdam", "FusedSGD"),
}
# Options of the optimizers in `_ELEMENTWISE` that make an update depend on more than one element, each with the value that
# turns the option off. None also turns it off.
_WHOLE_TENSOR_OPTIONS: Mapping[str, float] = {
    "adanorm": False,
    "caution": False,
    "cautious": False,
    "cautious_factor": 1.0,
    "max_grad_norm": 0.0,
    "max_unorm": 0.0,
    "percentile_clipping": 100,
    "stable_adamw": False,
    "use_gc": False,
}
_ACROSS_TENSORS = (
    "DAdaptAdaGrad",
    "DAdaptAdam",
    "DAdaptAdan",
    "DAdaptLion",
    "DAdaptSGD",
    "Prodigy",
    "ProdigyPlusScheduleFree",
)
_QUANTIZED = ("8bit", "4bit", "Fp8")  # endings of class names
_SAY_SO = "or, if the update of this optimizer is elementwise, set optimizer.elementwise = True"
_ALIKE = "Use an optimizer with an elementwise update (AdamW, Lion, ...)"
_STEP_SIZE = (
    "estimates its step size from all parameters together, so parts of the model would get different step sizes"
)
_WAY_OUT = (
    f"{_ALIKE}, use one that gathers full tensors (meshstep.optim.Muon, SOAP, ...), or step full tensors with "
    f"meshstep.optim.whole.whole(optimizer); {_SAY_SO}"
)


def check_elementwise(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Raise ValueError if the optimizer's update is not known to be elementwise, or if its states are quantized.

    If ``optimizer.elementwise`` is True, both checks are off. If it is False, ValueError is raised. Optimizers whose step
    uses collectives are accepted in any case. ``why`` is the start of the message: why the optimizer gets shards, such as
    "Sharded gives the optimizer shards".
    """
    for part in parts_of(optimizer):
        reason = _why_not_elementwise(part)
        if reason is None and (states := _quantized_states(part)):
            raise ValueError(
                f"{why}, but {type(part).__name__} quantizes its states ({states}): their rounding depends on the size of "
                "each shard, so the result would differ from the result with full tensors. Step full tensors with "
                "meshstep.optim.whole.whole(optimizer), use an optimizer with float32 or bfloat16 states "
                "(AdamW, HalfStates), or accept the difference with optimizer.elementwise = True"
            )
        if reason is not None and _across_tensors(part):
            raise ValueError(f"{why}, but {type(part).__name__} {_STEP_SIZE}. {_ALIKE}")
        if reason is not None:
            raise ValueError(f"{why}, which requires an optimizer whose update is elementwise; {reason}. {_WAY_OUT}")


def check_whole(optimizer: torch.optim.Optimizer, entries: Iterable[ParameterEntry], topology: Topology) -> None:
    """Raise ValueError if the optimizer's result would depend on how the model is divided over ranks.

    This is so if parameters are sharded and `check_elementwise` rejects the optimizer, or if ranks hold different
    parameters and `check_each_alone` rejects it. ``entries`` are the plan entries of all stepped parameters; frozen
    ones are ignored.
    """
    entries, groups = list(entries), optimizer.param_groups
    for part in parts_of(optimizer):
        own = {index for index, group in enumerate(groups) if any(group is of_part for of_part in part.param_groups)}
        trained = [entry for entry in entries if entry.group in own and entry.trained]
        split = [entry for entry in trained if topology.size(*entry.spec.sharded_axes) > 1]
        if split:
            names = some((f"{entry.name} ({entry.spec})" for entry in split), 3)
            check_elementwise(part, f"{names} {'is' if len(split) == 1 else 'are'} sharded")
        named = {axis for entry in trained for axis in (*dict(entry.spec.owned), *dict(entry.spec.tied))}
        if topology.size(*{*topology.pipe_axes, *named}) > 1:
            check_each_alone(part, "ranks hold different parameters")


def check_each_alone(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Raise ValueError if the optimizer computes a value, such as a norm, from all of its parameters together.

    ``optimizer.elementwise = True`` turns the check off.
    """
    for part in parts_of(optimizer):
        name, said = type(part).__name__, getattr(part, "elementwise", False)
        if _across_tensors(part) and not said:
            raise ValueError(f"{why}, but {name} {_STEP_SIZE}. {_ALIKE}")
        if (norm := _clips_by_itself(part)) and not said:
            raise ValueError(
                f"{why}, but {name} with max_grad_norm={norm!r} clips by the norm of all of its gradients, so parts of the "
                "model would be clipped by different norms. Turn this clipping off with max_grad_norm=None or 0.0, and "
                "give ParallelOptimizer(max_norm=...)"
            )


def check_in_buckets(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Raise ValueError if the optimizer can't step its parameters bucket by bucket."""
    check_each_alone(optimizer, why)
    for part in parts_of(optimizer):
        if asks_other_ranks(part):
            raise ValueError(
                f"{why}, and the number of calls may differ between ranks, but {type(part).__name__} uses collectives in "
                "each call: keep float32 master weights and states; to save memory, use states=Sharded(...) or "
                "Offloaded(...)"
            )


def _why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the reason why the optimizer may not be elementwise; None if it is elementwise, or if it uses collectives."""
    if asks_other_ranks(optimizer):
        return None
    said, name = getattr(optimizer, "elementwise", None), type(optimizer).__name__
    if said is not None:
        return None if said else f"{name}.elementwise is False"
    if not any(_is_known(kind) and _steps_like(optimizer, kind) for kind in type(optimizer).__mro__):
        return f"{name} is not known to be elementwise"
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return None
    for option, off in _WHOLE_TENSOR_OPTIONS.items():
        values = [value for value in _values(optimizer, option) if value not in (None, off)]
        if values:
            return f"{name} with {option}={values[0]!r} is not elementwise (with {option}={off!r} it is)"
    return None


def _quantized_states(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the class or option that quantizes states in blocks; None if states are not quantized."""
    if asks_other_ranks(optimizer) or getattr(optimizer, "elementwise", None) is not None:
        return None
    names = (kind.__name__ for kind in type(optimizer).__mro__ if _is_known(kind))
    if name := next((name for name in names if name.endswith(_QUANTIZED)), None):
        return name
    bits = [value for value in _values(optimizer, "optim_bits") if value not in (None, 32)]
    return f"optim_bits={bits[0]!r}" if bits else None


def _is_known(kind: type) -> bool:
    return kind.__name__ in _ELEMENTWISE.get(kind.__module__.partition(".")[0], ())


def _steps_like(optimizer: torch.optim.Optimizer, kind: type) -> bool:
    own, known = (getattr(owner, "step", None) for owner in (type(optimizer), kind))
    return own is not None and known is not None and unwrap(own) is unwrap(known)


def _values(optimizer: torch.optim.Optimizer, option: str) -> list[Any]:
    found = [group.get(option) for group in optimizer.param_groups]
    return [*found, getattr(optimizer, option, None), getattr(getattr(optimizer, "args", None), option, None)]


def _across_tensors(optimizer: torch.optim.Optimizer) -> bool:
    return any(kind.__name__ in _ACROSS_TENSORS for kind in type(optimizer).__mro__)


def _clips_by_itself(optimizer: torch.optim.Optimizer) -> Any:
    """Return the maximum norm by which the optimizer itself clips all of its gradients; None: it does not clip them."""
    if getattr(optimizer, "pre_norm", None) is False:
        return None
    return next((value for value in _values(optimizer, "max_grad_norm") if value not in (None, 0.0)), None)
