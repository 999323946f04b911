"""Find adapters of PEFT and of users by the attributes of modules, and freeze all parameters except those of adapters.

PEFT is not imported: its layers have the attributes ``lora_A``, ``lora_B`` and others that begin with ``lora_``. The copies
of full modules that PEFT trains are in the attribute ``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .adapter_layout import AroundBase

_PAIRS = (("A", "B"), ("a", "b"), ("lora_a", "lora_b"), ("lora_A", "lora_B"))


class Factor(NamedTuple):
    """A factor of an adapter, or DoRA's magnitudes.

    Attributes:
        name: Name of the parameter.
        param: The parameter.
        module: The module that multiplies by the factor; None for a factor that is a parameter of another module.
    """

    name: str
    param: Tensor
    module: nn.Module | None = None


class Pair(NamedTuple):
    """The factors "A" [r, in] and "B" [out, r] of an adapter that a user has written, and the layer that they adapt."""

    factors: dict[str, Factor]
    base: Any


def pair_of(module: nn.Module) -> Pair | None:
    """Return the factors that ``module`` has as attributes such as A and B, beside one other layer; None without them."""
    for first, second in _PAIRS:
        a, b = _factor(module, first), _factor(module, second)
        if a is None or b is None or a.param.dim() != 2 or b.param.dim() != 2:
            continue
        others = [
            child
            for attribute, child in module.named_children()
            if attribute not in (first, second) and isinstance(getattr(child, "weight", None), Tensor)
        ]
        if len(others) == 1:
            return Pair({"A": a, "B": b}, others[0])
    return None


def _factor(module: nn.Module, attribute: str) -> Factor | None:
    found = getattr(module, attribute, None)
    if isinstance(found, nn.Parameter):
        return Factor(attribute, found)
    weight = getattr(found, "weight", None)
    if isinstance(found, nn.Module) and isinstance(weight, nn.Parameter):
        return Factor(f"{attribute}.weight", weight, found)
    return None


def is_of_peft(module: nn.Module) -> bool:
    """Return True if ``module`` is a layer of PEFT with LoRA adapters."""
    return all(isinstance(getattr(module, name, None), nn.ModuleDict) for name in ("lora_A", "lora_B"))


def saved_modules(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, original parameter, trained copy) for each parameter of PEFT's ``modules_to_save``."""
    for name, module in model.named_modules():
        copies, original = getattr(module, "modules_to_save", None), getattr(module, "original_module", None)
        if isinstance(copies, nn.ModuleDict) and isinstance(original, nn.Module):
            originals = dict(original.named_parameters())
            for key, copy in copies.items():
                for inner, param in copy.named_parameters():
                    if inner in originals:
                        yield f"{name}.modules_to_save.{key}.{inner}", originals[inner], param


def freeze(model: nn.Module) -> nn.Module:
    """Freeze the parameters of ``model``, except those of adapters in it, and PEFT's ``modules_to_save``.

    The factors of `pair_of` count as an adapter only if the weight of their base layer is frozen, because other modules may
    have attributes of these names too.

    Returns:
        ``model``.
    """
    kept = {id(copy) for _, _, copy in saved_modules(model)}
    for module in model.modules():
        if isinstance(module, AroundBase):
            kept |= {id(param) for name, param in module.named_parameters() if not name.startswith("base_layer.")}
        elif is_of_peft(module):
            kept |= {id(param) for name, param in module.named_parameters() if name.startswith("lora_")}
        elif (pair := pair_of(module)) is not None and not pair.base.weight.requires_grad:
            kept |= {id(factor.param) for factor in pair.factors.values()}
    for param in model.parameters():
        if id(param) not in kept:
            param.requires_grad_(False)
    return model
