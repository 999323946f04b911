"""The mode `Fp8`: linear layers multiply in 8 bits, everything else as in a base mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...parallel.interop.local import spec_of
from ...parallel.layers.tensor_1d import ColumnParallelLinear, RowParallelLinear
from ...parallel.layers.tensor_2d import Linear2D
from ...parallel.layout.annotation import annotation_of
from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..loss_scale import LossScale
from ..modes import Bf16, Fp32
from ..precision import Criterion, Precision
from .linear import Fp8Linear, Fp8Matmul
from .summa import fp8_summa


@dataclass(frozen=True)
class Fp8(Precision):
    """Linear layers in 8 bits; parameters, masters and everything that isn't a linear layer as in the base mode.

    `nn.Linear` becomes `Fp8Linear` (the same object, of another class); `ColumnParallelLinear`, `RowParallelLinear` and
    `Linear2D` get another ``matmul``. Subclasses of `nn.Linear` and layers that hold their weight otherwise
    (`nn.MultiheadAttention`) stay as they are. A layer falls back to the base's dtype where the dims of its weight, of
    this rank's piece, aren't multiples of 16: see `Fp8Matmul`; for `Linear2D` see `fp8_summa`.

    Every tensor has one scale, from the maximum of the logical tensor: it is agreed over the axes that the spec of the
    layer's weight names, as sharded or as partial (the activations are split over those). So a model split over tensor
    axes rounds as the whole one does.

    Args:
        base: "bf16" or "fp32".
        across_data: Agree on the maxima of activations and their gradients over the data axes too, so that replicas
            round as one process does that sees the whole batch. Costs collectives in every linear layer, and binds the
            replicas to run the same number of micro-batches. Without, each replica scales for the samples it has.

    Raises:
        ValueError: The base is another; in `prepare`, an `nn.Linear` has no spec though the registry has model axes.
    Collectives: per layer up to two small all-reduces, see `Fp8Matmul`. Host reads: none.
    """

    base: Literal["bf16", "fp32"] = "bf16"
    across_data: bool = False

    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        if self.base not in ("bf16", "fp32"):
            raise ValueError(f"base={self.base!r} is no base for 8-bit layers; give 'bf16' or 'fp32'")

    @property
    def _base(self) -> Precision:
        return Bf16() if self.base == "bf16" else Fp32()

    @property
    def masters(self) -> bool:
        return self._base.masters

    def make_loss_scale(self, device: torch.device | str | None = None) -> LossScale | None:
        return self._base.make_loss_scale(device)

    def prepare_criterion(self, criterion: Criterion) -> Criterion:
        return self._base.prepare_criterion(criterion)

    def export_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return self._base.export_state_dict(model)

    def _prepare(self, model: nn.Module, registry: ProcessGroupRegistry | None) -> None:
        matmuls = {}
        for name, module in model.named_modules():
            matmul = self._matmul_of(name, module, registry)
            if matmul is not None:
                matmuls[module] = matmul
        self._base._prepare(model, registry)
        for module, matmul in matmuls.items():
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear
            module.matmul = matmul

    def _matmul_of(
        self, name: str, module: nn.Module, registry: ProcessGroupRegistry | None
    ) -> Callable[..., torch.Tensor] | None:
        if isinstance(module, Linear2D):
            return partial(fp8_summa, data_axes=self._data_axes(module.registry))
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            return self._fp8_matmul(spec_of(module.weight), module.registry)
        if type(module) is nn.Linear:
            return self._fp8_matmul(_spec_of_linear(name, module, registry), registry)
        return None

    def _fp8_matmul(self, spec: P, registry: ProcessGroupRegistry | None) -> Fp8Matmul:
        if registry is None:
            return Fp8Matmul()
        out_axes, in_axes = spec.dim_axes(0), spec.dim_axes(1)
        batch_axes = (*spec.partial, *self._data_axes(registry))
        forward = _split((*out_axes, *in_axes, *batch_axes), registry)
        # Without a registry where none is needed: such a layer can be copied and pickled.
        return Fp8Matmul(registry, forward, _split((*out_axes, *batch_axes), registry)) if forward else Fp8Matmul()

    def _data_axes(self, registry: ProcessGroupRegistry) -> tuple[str, ...]:
        return registry.topology.data_axes if self.across_data else ()


def _split(axes: tuple[str, ...], registry: ProcessGroupRegistry) -> tuple[str, ...]:
    return tuple(axis for axis in registry.topology.axes if axis in axes and registry.size(axis) > 1)


def _spec_of_linear(name: str, module: nn.Linear, registry: ProcessGroupRegistry | None) -> P:
    annotation = annotation_of(module.weight)
    if annotation is not None:
        return annotation.spec
    model_axes = _split(registry.topology.model_axes, registry) if registry is not None else ()
    if model_axes:
        label = f"{name}.weight" if name else "weight"
        raise ValueError(
            f"{label} has no spec, so it can't be told over which of {', '.join(model_axes)} its maximum must be "
            f"agreed; say how it is laid out before the model is prepared: declare(model, {{{label!r}: P(...)}}), P() "
            "meaning replicated"
        )
    return P()
