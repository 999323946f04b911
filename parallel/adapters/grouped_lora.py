"""LoRA adapters of several experts whose weights are in one parameter: `GroupedLoRA`.

A module of several experts multiplies by its parameters itself, in a loop over experts or by a grouped matrix product. It
has no linear layers to whose outputs an adapter could be added. `GroupedLoRA` adds ``scaling * B @ A`` to each expert's
weight instead, while the forward of the module runs. The gradient of the factors then follows from the gradient of the
weight:

    weight [experts, out, in]       A [experts, r, in]              B [experts, out, r]
    P(e)                            P(e)                            P(e)
    P(e, tensor)                    P(e, None, partial=tensor)      P(e, tensor)
    P(e, None, tensor)              P(e, None, tensor)              P(e, partial=tensor)

If the output features are sharded, each rank computes the gradient of A from its own output features only, so this gradient
is partial.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..interop.local_parameters import has_dtensors, local_tensor, spec_of
from ..layers.initialization import draw_linear, keep_shard
from ..layout.shard import unshard
from ..layout.spec import P
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology
from .adapter_layout import (
    AdapterLayout,
    AroundBase,
    check_specs,
    elements_at,
    full_weight_shape,
    weight_spec,
    without_axes,
)
from .adapter_search import freeze


@dataclass(frozen=True)
class GroupedLayout(AdapterLayout):
    """Layout of the adapters of a parameter of several experts: A [experts, r, in] and B [experts, out, r]."""

    experts: int = 1

    def full_shapes(self, r: int) -> dict[str, tuple[int, ...]]:
        return {"A": (self.experts, r, self.in_features), "B": (self.experts, self.out_features, r)}


class GroupedLoRA(AroundBase):
    """Module of several experts with a low-rank adapter per expert for some of its parameters.

    During the forward of the module, the expert e computes with ``weight[e] + scaling * B[e] @ A[e]``. The base module is
    frozen. Its parameters may be sharded over any axes, along any of their three dims, as declared parameters or DTensors.

        model.experts = GroupedLoRA(model.experts, ["up", "down"], r=8, alpha=16, registry=registry)

    `add_lora` creates this module for targets that are names of parameters with three dims.

    Args:
        base: The module, with parameters [experts, out, in].
        parameters: Names of the parameters in ``base``.
        r: Rank of the adapters.
        alpha: The change of a weight is multiplied by ``alpha / r``.
        registry: The process groups.
        use_rslora: If True, the change is multiplied by ``alpha / sqrt(r)`` instead. Default: False.
        is_transposed: True if the parameters are [experts, in, out]. None: the attribute ``is_transposed`` of ``base``, or
            else False. Default: None.
        expert_axes: Data axes along which ranks hold different experts, for DTensors. If other data axes shard a DTensor,
            `fully_shard` gathers it over them for the forward. Default: none.
        seed: Seed of the initial factors, which depend on it and on the names only. Default: 0.
        dtype: Dtype of the factors. Default None: the dtype of the adapted parameter.
        name: Name of the module, for errors and for the seed. Default: "the experts".

    Attributes:
        base_layer: The module.
        lora_A, lora_B: This rank's shards of A [experts, r, in] and B [experts, out, r], by the name of the parameter. B is
            zero at first.
        is_merged: True between `merge` and `unmerge`.

    Shapes: input and output as in the base module. Each forward needs memory for the adapted weight of this rank's experts.
    Raises:
        ValueError: ``r`` is not a positive integer; or a parameter does not exist, is not declared, does not have three
            dims, or is declared with ``owned=``.
    Collectives: none except those of the base module. Host synchronization: none.
    """

    def __init__(
        self,
        base: nn.Module,
        parameters: Iterable[str],
        r: int,
        alpha: float,
        registry: ProcessGroupRegistry,
        *,
        use_rslora: bool = False,
        is_transposed: bool | None = None,
        expert_axes: str | tuple[str, ...] = (),
        seed: int = 0,
        dtype: torch.dtype | None = None,
        name: str = "the experts",
    ) -> None:
        super().__init__()
        if type(r) is not int or r < 1:
            raise ValueError(f"{name}: r={r!r} must be a positive integer; write the rank of the adapters, such as r=8")
        if is_transposed is None:
            is_transposed = bool(getattr(base, "is_transposed", False))
        self._layouts: dict[str, GroupedLayout] = {
            each: grouped_layout_of(base, each, registry, is_transposed, expert_axes, name)
            for each in _in_order(base, parameters)
        }
        self.base_layer = freeze(base)
        self.r, self.alpha, self.use_rslora, self.use_dora, self.dropout = r, alpha, use_rslora, False, 0.0
        self.scaling, self.is_merged, self._name = alpha / (math.sqrt(r) if use_rslora else r), False, name
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for each, layout in self._layouts.items():
            weight = base.get_parameter(each)
            drawn: dict[str, Any] = {"device": weight.device, "dtype": dtype or weight.dtype}
            generator = torch.Generator(weight.device).manual_seed(seed + zlib.crc32(f"{name}.{each}".encode()))
            full = [
                draw_linear(layout.in_features, r, bias=False, generator=generator, **drawn)[0]
                for _ in range(layout.experts)
            ]
            self.lora_A[each] = keep_shard(torch.stack(full), layout.first, registry)
            self.lora_B[each] = keep_shard(torch.zeros(layout.full_shapes(r)["B"], **drawn), layout.second, registry)
        # Hooks set the adapted weights, because the hooks of `fully_shard` that gather the parameters run before them.
        self._hooks = (
            base.register_forward_pre_hook(self._set_adapted),
            base.register_forward_hook(self._unset_adapted, always_call=True),
        )

    def remove_hooks(self) -> None:
        """Remove the hooks from the base module, so that its forward no longer uses the adapter."""
        for hook in self._hooks:
            hook.remove()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)

    def _set_adapted(self, base: nn.Module, _: Any) -> None:
        """Set the adapted weights as attributes of the base module, which hide its parameters of the same names."""
        if not self.is_merged:
            for name in self._layouts:
                weight = local_tensor(base.get_parameter(name))
                vars(base)[name] = weight + self._product(name, weight)

    def _unset_adapted(self, base: nn.Module, *_: Any) -> None:
        for name in self._layouts:
            vars(base).pop(name, None)

    def _product(self, name: str, weight: Tensor) -> Tensor:
        a, b = local_tensor(self.lora_A[name]), local_tensor(self.lora_B[name])
        change = self.scaling * (b @ a)
        return (change.transpose(1, 2) if self._layouts[name].is_transposed_weight else change).to(weight.dtype)

    def extra_repr(self) -> str:
        names = ", ".join(self._layouts)
        return f"{names}, r={self.r}, alpha={self.alpha}" + (", rsLoRA" if self.use_rslora else "")

    # Merging ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters to this rank's shards of the parameters, computed in float64 and rounded once.

        Call it on all ranks.

            model.experts.merge()

        Raises:
            ValueError: A factor is declared with other shards than its parameter requires. The parameters are unchanged.
        Collectives: all-gathers of the factors over the axes that shard them. Host synchronization: yes, if there are
            collectives.
        """
        self._add(1)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the adapters from this rank's shards of the parameters, computed in float64 and rounded once.

        A parameter may differ from its value before `merge` by a rounding error of its merged value. Call it on all ranks.

            model.experts.unmerge()

        Raises, collectives, host synchronization: as in `merge`.
        """
        self._add(-1)

    def _add(self, sign: int) -> None:
        if self.is_merged == (sign == 1):
            return
        changes = {name: self._change(name) for name in self._layouts}
        for name, change in changes.items():
            weight = local_tensor(self.base_layer.get_parameter(name))
            weight.copy_(weight.double() + sign * change)
        self.is_merged = sign == 1

    def _change(self, name: str) -> Tensor:
        """Return ``scaling * B @ A`` for this rank's stored shard of a parameter, in float64."""
        layout = self._layouts[name]
        factors = [(f"{self._name}.lora_{kind}.{name}", self.get_parameter(f"lora_{kind}.{name}")) for kind in "AB"]
        check_specs(factors, layout)
        topology, coordinate = layout.registry.topology, layout.registry.coordinate
        a, b = (
            unshard(local_tensor(param), spec_of(param, topology), layout.registry).double() for _, param in factors
        )
        spec = weight_spec(self.base_layer.get_parameter(name), topology)
        out, inputs = (2, 1) if layout.is_transposed_weight else (1, 2)
        out_spans = spec.spans(out, layout.out_features, topology, coordinate)
        in_spans = spec.spans(inputs, layout.in_features, topology, coordinate)
        experts = spec.spans(0, layout.experts, topology, coordinate)
        a, b = (elements_at(factor, 0, experts) for factor in (a, b))
        change = self.scaling * elements_at(b, 1, out_spans) @ elements_at(a, 2, in_spans)
        return change.transpose(1, 2) if layout.is_transposed_weight else change


def _in_order(base: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of parameters in the order of the module's parameters; unknown names last."""
    known = [name for name, _ in base.named_parameters(recurse=False)]
    return sorted(dict.fromkeys(names), key=lambda name: known.index(name) if name in known else len(known))


def grouped_layout_of(
    base: nn.Module,
    parameter: str,
    registry: ProcessGroupRegistry,
    is_transposed: bool,
    expert_axes: str | tuple[str, ...],
    name: str,
) -> GroupedLayout:
    """Return the layout of the factors of a parameter of several experts. The arguments are as in `GroupedLoRA`."""
    weight = dict(base.named_parameters(recurse=False)).get(parameter)
    if weight is None or weight.dim() != 3:
        found = "does not exist" if weight is None else f"has shape {tuple(weight.shape)}"
        raise ValueError(
            f"{name}.{parameter} of a {type(base).__name__} {found}, but an adapter of several experts needs a parameter "
            f"[experts, {'in, out' if is_transposed else 'out, in'}]; name such a parameter, or use LoRA for linear layers"
        )
    topology = registry.topology
    placed = weight_spec(weight, topology, f"{name}.{parameter}")
    shape = full_weight_shape(weight, placed, topology, topology.axes)
    axes = topology.expand_aliases(*([expert_axes] if isinstance(expert_axes, str) else expert_axes))
    spec = without_axes(placed, _axes_of_fully_shard(weight, placed, topology, axes))
    out, inputs = (2, 1) if is_transposed else (1, 2)
    dims = [spec.joint_dim_axes(dim) for dim in range(3)]
    first = _factor_spec(spec, [dims[0], (), dims[inputs]], spec.dim_axes(out))
    second = _factor_spec(spec, [dims[0], dims[out], ()], spec.dim_axes(inputs))
    return GroupedLayout(
        registry, shape[inputs], shape[out], first, second, is_transposed_weight=is_transposed, experts=shape[0]
    )


def _factor_spec(spec: P, dims: Sequence[Sequence[tuple[str, ...]]], partial: Sequence[str]) -> P:
    return P().with_dims(dims, partial=tuple({*spec.partial, *partial}), blocks=spec.blocks)


def _axes_of_fully_shard(weight: Tensor, spec: P, topology: Topology, expert_axes: Sequence[str]) -> list[str]:
    """Return the data axes over which `fully_shard` has sharded a DTensor, and gathers it before the forward."""
    if not has_dtensors((weight,)):
        return []
    parts = (part for dim in range(3) for part in spec.joint_dim_axes(dim))
    data = {*topology.data_axes} - {*expert_axes}
    return [axis for part in parts if {*part} <= data for axis in part]
