"""The layout of the two factors of a LoRA adapter, derived from its base layer, and the collectives of their products.

An adapter adds ``scaling * B @ A`` to a weight [out, in]; A has shape [r, in], B has shape [out, r]. On a sharded layer its
forward is A, a collective, and B. The collective moves only A's output, with r features per token. If the base layer
scatters or gathers its input or output, the adapter does so too. Specs of A and B, and the collectives between them:

    base layer            A                      between A and B                  B
    replicated            P()                    nothing                          P()
    column-parallel       P()                    `copy_to`                        P(axis), with the blocks of the base
    ... sequence parallel P(partial=axis)        all-gather of the sequence       P(axis)
    row-parallel          P(None, axis)          `reduce_from`                    P()
    ... sequence parallel P(None, axis)          reduce-scatter of the sequence   P(partial=axis)
    vocabulary-parallel   P(None, axis)          `reduce_from`                    P()
    2-D                   P(None, col,           `reduce_from`, then `copy_to`,   P(col, partial=row)
                            partial=row)         over col
    ... embedding         P(None, row)           reduce-scatter over row,         P(col, partial=row)
                                                 `copy_to` over col
    3-D                   P(None, output,        all-gather over input,           P(input, partial=(weight, output))
                            partial=(weight,     reduce-scatter over output
                            input))
    ... embedding         P(partial=(weight,     `copy_to`                        P(output, partial=(weight, input))
                            input))
    ... classifier        P(None, output,        `reduce_from`                    P(partial=(weight, input))
                            partial=(weight,
                            input))

DoRA also needs the norm of each row of the adapted weight [out, in]. Each rank adds up the squares of the elements of a row
that it holds, and an all-reduce sums them over the axes that shard the input features. On `Linear2D` the input features of
the weight and of A are sharded over different axes, so A is all-gathered first. On `Classifier2D` B and the norms are
all-gathered.

With `copy_to` between A and B, the gradient of A's output is the sum over the axis, so the gradients of A and of the input
are complete on every rank. Without `copy_to` both would be partial, and `P(partial=axis)` would correct only A, but not the
layers before the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..interop.local_parameters import has_dtensors, local_parameter, local_tensor, spec_of
from ..layers.embedding import Classifier2D, Embedding2D, look_up
from ..layers.tensor_2d import Linear2D
from ..layers.tensor_3d import DiagonalTable, Embedding3D, Linear3D
from ..layout.annotation import annotation_of
from ..layout.shard import joined_in_order
from ..layout.spec import P, Span
from ..mesh.collectives import (
    Over,
    all_gather,
    all_gather_to,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.topology import Topology, axes_along

Axes = tuple[str, ...]


class AroundBase(nn.Module):
    """Base class of adapters. It has the attributes of its ``base_layer``, except those that the adapter has itself."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(super().__getattr__("base_layer"), name)


def elements_at(tensor: Tensor, dim: int, spans: Sequence[Span]) -> Tensor:
    """Return a copy of the elements of ``tensor`` in the (offset, length) ``spans`` along ``dim``."""
    return torch.cat([tensor.narrow(dim, offset, length) for offset, length in spans], dim)


@dataclass(frozen=True)
class AdapterLayout:
    """Layout of an adapter on a replicated base layer: the specs of its factors, and the collectives of its forward.

    Subclasses are for sharded base layers, and for parameters of several experts.

    Args:
        in_features, out_features: Sizes of the full layer; for an embedding, the vocabulary and the embedding dim.
        first, second: Specs of A [r, in] and B [out, r].
        is_embedding: True if the input of the layer consists of ids, so that A is a table of r features per id.
        is_transposed_weight: True if the base weight is [in, out], as in an embedding.
        stacked: Axes along which ranks hold layers of different experts.
        batch_axes: Axes of the layer, slowest first, that shard dim 0 of the input evenly.
    """

    registry: ProcessGroupRegistry
    in_features: int
    out_features: int
    first: P
    second: P
    is_embedding: bool = False
    is_transposed_weight: bool = False
    stacked: Axes = ()
    batch_axes: Axes = ()

    @property
    def communicating_axes(self) -> Axes:
        """Return the axes over which the adapter may issue collectives; with DoRA there may be more."""
        return ()

    @property
    def magnitude(self) -> P:
        """Return the spec of DoRA's magnitudes [out]: the spec of B without its second dim."""
        return P().with_dims([self.second.joint_dim_axes(0)], partial=self.second.partial, blocks=self.second.blocks)

    @property
    def specs(self) -> dict[str, P]:
        return {"A": self.first, "B": self.second, "magnitude": self.magnitude}

    @property
    def reduced_axes(self) -> Axes:
        """Return the axes that shard the input features of the weight. DoRA sums the squares of a weight row over them."""
        return ()

    def input_shards(self, input: Tensor) -> list[tuple[int, int, Sequence[Span]]]:
        """Return (dim, full length, spans of this rank's shard) for each dim of ``input`` that the layer's axes shard."""
        shards = [self._even_shard(input, 0, self.batch_axes)] if self.batch_axes else []
        if input.size(-1) != self.in_features:
            shards.append((-1, self.in_features, self._feature_spans()))
        return shards

    def _even_shard(self, input: Tensor, dim: int, axes: Axes) -> tuple[int, int, Sequence[Span]]:
        """Return the triple of `input_shards` for a dim that ``axes``, slowest first, shard evenly."""
        length = input.size(dim) * self.registry.size(*axes)
        return dim, length, P(axes).spans(0, length, self.registry.topology, self.registry.coordinate)

    def _feature_spans(self) -> Sequence[Span]:
        """Return the (offset, length) pairs of the input features that this rank's shard of A multiplies."""
        return self.first.spans(1, self.in_features, self.registry.topology, self.registry.coordinate)

    def _own_rows(self, full: Tensor, axis: str) -> Tensor:
        """Return the chunk of ``full`` along dim 0 for this rank's coordinate on ``axis``."""
        ((offset, length),) = P(axis).spans(0, full.size(0), self.registry.topology, self.registry.coordinate)
        return full.narrow(0, offset, length)

    def factors_of_weight(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of A and the rows of B that belong to this rank's shard of the weight."""
        return a, b

    def norms_of_output(self, norms: Tensor) -> Tensor:
        """Convert DoRA's norms of this rank's weight rows to the output features of this rank's shard of B."""
        return norms

    def added_bias(self, base: nn.Module) -> Tensor | None:
        """Return the bias that the base layer adds to its output before it gathers the output. None: no bias."""
        bias = getattr(base, "bias", None)
        return None if bias is None else local_tensor(bias)

    def full_shapes(self, r: int) -> dict[str, tuple[int, ...]]:
        """Return the full shapes of "A", "B" and DoRA's "magnitude". ``r`` is the adapter's rank in LoRA's sense."""
        return {"A": (r, self.in_features), "B": (self.out_features, r), "magnitude": (self.out_features,)}

    def product(self, input: Tensor, a: Tensor, b: Tensor, output: Tensor) -> Tensor:
        """Return ``B @ A @ input``, sharded like the base layer's ``output``, from this rank's shards of A and B."""
        hidden = self.look_up(input, a) if self.is_embedding else F.linear(self.enter(input).to(a.dtype), a)
        return self.leave(F.linear(self.join(hidden), b), output)

    def enter(self, input: Tensor) -> Tensor:
        """Return the input features that this rank's shard of A multiplies."""
        return input

    def look_up(self, ids: Tensor, a: Tensor) -> Tensor:
        """Return for each id its column of the factor ``a`` [r, ids]: [..., r]; zero if another rank holds the column."""
        return F.embedding(ids, a.t())

    def join(self, hidden: Tensor) -> Tensor:
        """Return the input of B: this rank's output of A after the collective between A and B."""
        return hidden

    def leave(self, output: Tensor, like: Tensor) -> Tensor:
        """Return the adapter's output, sharded like the output ``like`` of the base layer."""
        return output


@dataclass(frozen=True)
class ColumnLayout(AdapterLayout):
    """Layout of an adapter on a base layer whose output features are sharded over ``axes``.

    Args:
        sequence_dim: Dim along which the input is sharded over the axes too. None: the input is replicated.
        completes_gradients: True: the adapter sums the gradient of A's output over the axes. False: code outside the layer
            sums the gradient of the layer's input, as for Megatron's experts, so the gradient of A is partial.
    """

    axes: Axes = ()
    sequence_dim: int | None = None
    completes_gradients: bool = True

    @property
    def communicating_axes(self) -> Axes:
        return self.axes

    def input_shards(self, input: Tensor) -> list[tuple[int, int, Sequence[Span]]]:
        sequence = [] if self.sequence_dim is None else [self._even_shard(input, self.sequence_dim, self.axes)]
        return [*super().input_shards(input), *sequence]

    def join(self, hidden: Tensor) -> Tensor:
        if self.sequence_dim is not None:
            return all_gather_to(hidden, self.registry, *self.axes, dim=self.sequence_dim)
        return copy_to(hidden, self.registry, *self.axes) if self.completes_gradients else hidden

    def leave(self, output: Tensor, like: Tensor) -> Tensor:
        if like.size(-1) == output.size(-1):
            return output
        output = gather_from(output, self.registry, *self.axes, dim=-1)
        return joined_in_order(output, self.second, self.registry.topology)


@dataclass(frozen=True)
class RowLayout(AdapterLayout):
    """Layout of an adapter on a base layer whose input features, or whose vocabulary, are sharded over ``axes``.

    Args:
        sequence_dim: Dim along which the output is sharded over the axes. None: the output is replicated.
        sums_output: True: the adapter sums the output of A over the axes. False: code outside the layer sums the output of
            the layer, as for Megatron's experts.
        exchanges_batch: True: the layer is an embedding that exchanges the batch dim and the sequence dim of its output, as
            Megatron's embedding does with sequence parallelism.
    """

    axes: Axes = ()
    sequence_dim: int | None = None
    sums_output: bool = True
    exchanges_batch: bool = False

    @property
    def communicating_axes(self) -> Axes:
        return self.axes

    @property
    def reduced_axes(self) -> Axes:
        return self.axes

    def enter(self, input: Tensor) -> Tensor:
        if input.size(-1) == sum(length for _, length in self._feature_spans()):
            return input
        return scatter_to(input, self.registry, *self.axes, dim=-1)

    def look_up(self, ids: Tensor, a: Tensor) -> Tensor:
        hidden = look_up(ids, a.t(), self.in_features, self.registry, *self.axes)
        return hidden.transpose(0, 1) if self.exchanges_batch else hidden

    def join(self, hidden: Tensor) -> Tensor:
        if not self.sums_output:
            return hidden
        if self.sequence_dim is not None:
            return reduce_scatter_to(hidden.contiguous(), self.registry, *self.axes, dim=self.sequence_dim)
        return reduce_from(hidden, self.registry, *self.axes)


@dataclass(frozen=True)
class GridLayout(AdapterLayout):
    """Layout of an adapter on a 2-D layer, whose batch is sharded over the axis ``row``, and its features over ``col``."""

    row: str = "row"
    col: str = "col"

    @property
    def communicating_axes(self) -> Axes:
        return self.row, self.col

    @property
    def reduced_axes(self) -> Axes:
        return (self.row,) if self.is_transposed_weight else (self.col,)

    def factors_of_weight(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_embedding:
            return a, b
        if self.is_transposed_weight:  # the weight's input features are sharded over `row`, those of A over `col`
            a = all_gather_to(a, self.registry, self.col, dim=1, length=self.in_features)
            return self._own_rows(a.t(), self.row).t(), b
        return a, self._own_rows(all_gather_to(b, self.registry, self.col, dim=0, length=self.out_features), self.row)

    def norms_of_output(self, norms: Tensor) -> Tensor:
        if self.is_transposed_weight:
            return norms
        return self._own_rows(all_gather_to(norms, self.registry, self.row, dim=0, length=self.out_features), self.col)

    def added_bias(self, base: nn.Module) -> Tensor | None:
        if isinstance(base, Linear2D):
            return base._column_bias()
        bias = getattr(base, "bias", None)
        return None if bias is None else copy_to(bias, self.registry, self.row)

    def look_up(self, ids: Tensor, a: Tensor) -> Tensor:
        if self.registry.size(self.row) > 1:
            ids = all_gather(ids, Over(self.registry, (self.row,), call="LoRA"))
        return look_up(ids, a.t(), self.in_features, self.registry, self.row)

    def join(self, hidden: Tensor) -> Tensor:
        if self.is_embedding:
            hidden = reduce_scatter_to(hidden, self.registry, self.row, dim=0)
        else:
            hidden = reduce_from(hidden, self.registry, self.col)
        return copy_to(hidden, self.registry, self.col)


@dataclass(frozen=True)
class CubeLayout(AdapterLayout):
    """Layout of an adapter on a `Linear3D`, with the mesh axes of the layer: ``input``, ``weight`` and ``output``."""

    input: str = "input"
    weight: str = "weight"
    output: str = "output"

    @property
    def communicating_axes(self) -> Axes:
        return self.input, self.output

    @property
    def reduced_axes(self) -> Axes:
        return self.output, self.weight

    def factors_of_weight(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self._own_rows(a.t(), self.weight).t(), b

    def added_bias(self, base: nn.Module) -> Tensor | None:
        bias = getattr(base, "bias", None)
        return None if bias is None else copy_to(bias, self.registry, self.weight, self.output)

    def join(self, hidden: Tensor) -> Tensor:
        hidden = all_gather_to(hidden, self.registry, self.input, dim=0)
        return reduce_scatter_to(hidden, self.registry, self.output, dim=0)


# From a base layer to its layout --------------------------------------------------------------------------------------


def layout_of(
    base: nn.Module,
    registry: ProcessGroupRegistry,
    *,
    sequence_parallel: bool | None = None,
    expert_axes: str | Axes = (),
    name: str = "the base layer",
) -> AdapterLayout:
    """Return the layout of an adapter on a linear layer or an embedding.

    Args:
        base: The layer. Its weight is declared, or it is a DTensor, or the mesh has one rank.
        sequence_parallel: True if the activations between layers are sharded along the sequence. None: the value of the
            layer's attribute ``sequence_parallel``, or of ``reduce_scatter_embeddings`` of Megatron's embeddings; False
            without these attributes.
        expert_axes: Axes along which ranks hold the layers of different experts.
        name: Name of the layer in errors.
    Raises:
        ValueError: The layer is not supported or not declared; or both dims of its weight are sharded, or one dim over axes
            in another order than the topology's.
    """
    found = _grid_or_cube(base, registry)
    if found is not None:
        return found
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(
            f"{name} is a {type(base).__name__} without a weight of two dims; LoRA adapts linear layers and embeddings, so "
            "leave this layer out of the adapted layers, or write an adapter of your own"
        )
    topology = registry.topology
    # `fully_shard` all-gathers a DTensor over its data axes before the forward, so the adapter is not sharded over them.
    stored = topology.data_axes if has_dtensors((weight,)) else ()
    spec = without_axes(weight_spec(weight, topology, name), stored)
    stacked = topology.expand_aliases(*([expert_axes] if isinstance(expert_axes, str) else expert_axes))
    inner = _tensor_axes(base, spec, topology, stacked)
    stacked = tuple(axis for axis in spec.dim_axes(0) if axis not in inner)
    out_axes, in_axes = (tuple(a for a in spec.dim_axes(dim) if a in inner) for dim in (0, 1))
    is_embedding = _is_embedding(base)
    if is_embedding:  # a table is [vocabulary, features], so its first dim is the input
        out_axes, in_axes = in_axes, out_axes
    if out_axes and in_axes:
        raise ValueError(
            f"{name} is declared {spec}: both dims of its weight are sharded, and {type(base).__name__} is not a 2-D "
            "or 3-D layer of meshstep, so the collectives of its adapter are unknown; write the adapter as a module of "
            "your own"
        )
    sizes = _features(base, weight, spec, topology, inner)
    outer, inner_dim = (1, 0) if is_embedding else (0, 1)
    first = _spec(spec, [None, inner_dim], inner, stacked)
    second = _spec(spec, [outer, None], inner, stacked)
    common: dict[str, Any] = {
        "is_embedding": is_embedding,
        "is_transposed_weight": is_embedding,
        "stacked": stacked,
    }
    axes = out_axes or in_axes
    if not axes:
        return AdapterLayout(registry, *sizes, first, second, **common)
    _check_order(axes, topology, name)
    sequence_dim, outside = _sequence_dim(base, sequence_parallel), bool(getattr(base, "explicit_expert_comm", False))
    if sequence_dim is not None or outside:  # the gradient of the factor that `axes` do not shard is partial
        if out_axes:
            first = first.with_partial((*first.partial, *axes))
        else:
            second = second.with_partial((*second.partial, *axes))
    common |= {"axes": axes, "sequence_dim": None if outside else sequence_dim}
    if out_axes:
        return ColumnLayout(registry, *sizes, first, second, **common, completes_gradients=not outside)
    transposed = is_embedding and bool(getattr(base, "reduce_scatter_embeddings", False))
    return RowLayout(registry, *sizes, first, second, **common, sums_output=not outside, exchanges_batch=transposed)


def weight_spec(weight: Tensor, topology: Topology, name: str = "the base layer") -> P:
    """Return the spec of the weight of a base layer. With one rank, an undeclared weight counts as replicated.

    A weight without a spec, or declared with ``owned=``, raises ValueError.
    """
    if annotation_of(weight) is None and topology.world_size == 1 and not has_dtensors((weight,)):
        return P()
    try:
        spec = spec_of(weight, topology)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if spec.owned:
        raise ValueError(
            f"the weight of {name} is declared with owned= ({spec}), so some ranks have no part of it, but an adapter "
            "needs a part on every rank; do not adapt this layer"
        )
    return spec


def without_axes(spec: P, axes: Iterable[str]) -> P:
    """Return a copy of ``spec`` in which ``axes`` shard no dim, and without ``owned`` and ``tied``.

    Axes that shard a dim jointly with one of ``axes`` are removed too. Partial axes are unchanged. ``tied`` is removed
    because each pipeline stage has a separate adapter.
    """
    axes = {*axes}
    dims = [[part for part in spec.joint_dim_axes(dim) if axes.isdisjoint(part)] for dim in range(len(spec.entries))]
    return P().with_dims(dims, partial=spec.partial, blocks=spec.blocks)


def mesh_axes_of(param: Tensor, topology: Topology) -> set[str]:
    """Return the topology axes that make up the device mesh of a DTensor; the empty set for a plain parameter."""
    annotation = annotation_of(local_parameter(param, topology))
    return set() if annotation is None else {*annotation.mesh_axes_on(topology)}


def full_weight_shape(weight: Tensor, spec: P, topology: Topology, axes: Iterable[str]) -> tuple[int, ...]:
    """Return the full shape of a weight. Only shards along ``axes`` count; along other axes, ranks have other weights."""
    annotation = annotation_of(weight)
    if annotation is not None and annotation.full_shape is not None:
        return annotation.full_shape
    counted = {*axes} - mesh_axes_of(weight, topology)  # the shape of a DTensor is full over the axes of its mesh
    return tuple(
        length * topology.size(*(axis for axis in spec.dim_axes(dim) if axis in counted))
        for dim, length in enumerate(weight.shape)
    )


def check_specs(factors: Iterable[tuple[str, Tensor]], layout: AdapterLayout) -> None:
    """Raise ValueError if a factor is undeclared, or declared with other shards than its base layer requires.

    Axes of size 1, axes over which gradients are partial, and data axes over which `fully_shard` shards a factor are not
    compared. With one rank nothing is checked. ``factors`` are A, B and, with DoRA, the magnitudes.
    """
    topology = layout.registry.topology
    if topology.world_size == 1:
        return
    for (name, param), expected in zip(factors, layout.specs.values(), strict=False):
        try:
            declared = spec_of(param, topology)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        meshed = mesh_axes_of(param, topology)  # `fully_shard` may have sharded the factor further, over data axes
        stored = tuple(axis for axis in declared.sharded_axes if axis in meshed and topology.role(axis) == "data")
        if _shards(declared, topology, stored) != _shards(expected, topology, stored):
            raise ValueError(
                f"{name} is declared {declared}, but its base layer requires {expected}; call "
                f"declare_adapters(model) after all other declarations, or declare(model, {{{name!r}: {expected}}})"
            )


def _shards(spec: P, topology: Topology, without: Axes) -> object:
    """Return a description of how a spec shards a tensor, equal for specs that give every rank the same shards."""
    dims = [
        [
            (tuple(kept), spec.block_sizes(part[0]))
            for part in spec.joint_dim_axes(dim)
            if (kept := [axis for axis in part if topology.size(axis) > 1 and axis not in without])
        ]
        for dim in range(3)
    ]
    return dims, spec.owned


def _spec(spec: P, dims: Sequence[int | None], inner: Axes, stacked: Axes) -> P:
    """Return the spec of a factor of an adapter, from the ``spec`` of the weight.

    ``dims`` has, per dim of the factor, the dim of the weight whose axes shard it, or None if no axis shards it. ``inner``
    are the axes over which the layer itself is sharded. ``stacked`` are the axes along which experts differ; they shard
    dim 0 of the factor before other axes.
    """
    entries: list[list[tuple[str, ...]]] = []
    for dim in dims:
        parts = () if dim is None else spec.joint_dim_axes(dim)
        entries.append([part for part in parts if {*part} <= {*inner}])
    entries[0] = [*((axis,) for axis in stacked), *entries[0]]
    return P().with_dims(entries, partial=spec.partial, blocks=spec.blocks)


def _tensor_axes(base: nn.Module, spec: P, topology: Topology, stacked: Axes) -> Axes:
    """Return the axes of the weight over which the layer itself is sharded; along other axes, experts differ."""
    own = getattr(base, "axis", None)
    if isinstance(own, str):  # a layer of meshstep
        return tuple(topology.expand_aliases(own))
    group = getattr(base, "tp_group", None)
    if group is not None:  # a layer of Megatron
        import torch.distributed as dist

        return tuple(axes_along(tuple(sorted(dist.get_process_group_ranks(group))), topology) or ())
    return tuple(axis for axis in spec.sharded_axes if axis not in stacked)


def _is_embedding(base: nn.Module) -> bool:
    return hasattr(base, "num_embeddings") and hasattr(base, "embedding_dim")


def _features(base: nn.Module, weight: Tensor, spec: P, topology: Topology, inner: Axes) -> tuple[int, int]:
    """Return the sizes of the full layer: (in, out)."""
    if isinstance(getattr(base, "axis", None), str) or getattr(base, "tp_group", None) is not None:
        names = ("num_embeddings", "in_features", "input_size"), ("embedding_dim", "out_features", "output_size")
        inputs, outputs = (next(int(getattr(base, name)) for name in each if hasattr(base, name)) for each in names)
        return inputs, outputs
    rows, columns = full_weight_shape(weight, spec, topology, inner)
    return (rows, columns) if _is_embedding(base) else (columns, rows)


def _sequence_dim(base: nn.Module, sequence_parallel: bool | None) -> int | None:
    if sequence_parallel is None:
        names = ("sequence_parallel", "reduce_scatter_embeddings")
        sequence_parallel = any(bool(getattr(base, name, False)) for name in names)
    if not sequence_parallel:
        return None
    return 0 if hasattr(base, "tp_group") else 1  # activations of Megatron are [sequence, batch, features]


def _check_order(axes: Axes, topology: Topology, name: str) -> None:
    if axes != tuple(axis for axis in topology.axes if axis in axes):
        raise ValueError(
            f"{name} is sharded over mesh axes {' x '.join(axes)}, in another order than the axes of {topology!r}; shard "
            "and declare the weight in the order of these axes"
        )


def _grid_or_cube(base: nn.Module, registry: ProcessGroupRegistry) -> AdapterLayout | None:
    if isinstance(base, Linear3D):
        x, w, y = base.input, base.weight_axis, base.output
        first, second = P(None, y, partial=(w, x)), P(x, partial=(w, y))
        sizes = base.in_features, base.out_features
        return CubeLayout(
            registry, *sizes, first, second, is_transposed_weight=True, batch_axes=(w, x), input=x, weight=w, output=y
        )
    if isinstance(base, DiagonalTable):
        y, both = base.output, (base.weight_axis, base.input)
        if isinstance(base, Embedding3D):
            first, second = P(partial=both), P(y, partial=both)
            options: dict[str, Any] = {"is_embedding": True, "is_transposed_weight": True, "axes": (y,)}
            return ColumnLayout(registry, base.rows, base.features, first, second, **options)
        first, second = P(None, y, partial=both), P(partial=both)
        return RowLayout(registry, base.features, base.rows, first, second, batch_axes=both, axes=(y,))
    if not isinstance(base, Linear2D | Classifier2D | Embedding2D):
        return None
    spec = spec_of(base.weight, registry.topology)
    if isinstance(base, Embedding2D):
        row, col = base.row, base.col
        first = P(None, row, partial=spec.partial)
        second = P(col, partial=(row, *spec.partial))
        sizes = base.num_embeddings, base.embedding_dim
        return GridLayout(
            registry, *sizes, first, second, is_embedding=True, is_transposed_weight=True, row=row, col=col
        )
    row, col = base._grid.row, base._grid.col
    is_linear = isinstance(base, Linear2D)
    sizes = base.in_features, base.out_features if isinstance(base, Linear2D) else base.classes
    partial = (row, *spec.partial)
    first = P(None, col, partial=partial)
    second = P().with_dims([[(col,)]], partial=partial, blocks=spec.blocks)
    batch = (*spec.partial, row)
    return GridLayout(
        registry, *sizes, first, second, is_transposed_weight=is_linear, batch_axes=batch, row=row, col=col
    )
