"""LoRA adapters of linear layers and embeddings, with factors that are sharded as the layer is: `LoRA` and `add_lora`.

References: Hu et al. 2021 (LoRA), arXiv:2106.09685; Kalajdzievski 2023 (rsLoRA), arXiv:2312.03732; Liu et al. 2024 (DoRA),
arXiv:2402.09353.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..interop.local_parameters import has_dtensors, local_tensor, spec_of
from ..layers.initialization import draw_embedding, draw_linear, keep_shard
from ..layers.tensor_3d import DiagonalTable
from ..layout.annotation import annotate
from ..layout.shard import unshard
from ..layout.spec import P, Span
from ..mesh.collectives import Over, all_reduce
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.stop_gradient import stop_gradient
from ..mesh.text import some
from ..mesh.topology import Topology
from .adapter_layout import (
    AdapterLayout,
    AroundBase,
    check_specs,
    elements_at,
    layout_of,
    weight_spec,
    without_axes,
)
from .adapter_search import freeze, is_of_peft
from .grouped_lora import GroupedLoRA

_NO_NAME = "the base layer"

FACTORS = {"A": "lora_A", "B": "lora_B", "magnitude": "lora_magnitude_vector"}
"""Attributes of `LoRA` with the factors and DoRA's magnitudes."""


class LoRA(AroundBase):
    """A linear layer or an embedding with a low-rank adapter: the layer's output plus ``scaling * B @ A @ input``.

    The base layer is called unchanged and is frozen. It may be replicated, a 1-D, 2-D or 3-D layer of meshstep, a linear
    layer or embedding of Megatron-core, or a layer whose weight is a DTensor, as `parallelize_module`, `fully_shard` and
    Transformers create. A and B get their shards, specs and collectives from the base layer.

        model.up = LoRA(model.up, r=8, alpha=16)

    Args:
        base: The layer. Its weight must be declared or a DTensor, unless the mesh has one rank.
        r: Rank of the adapter.
        alpha: The adapter's output is multiplied by ``alpha / r``.
        registry: The process groups. None: those of ``base``, if it is a layer of meshstep; for other layers, a new
            registry of one rank. Default: None.
        use_rslora: If True, the output is multiplied by ``alpha / sqrt(r)`` instead. Default: False.
        use_dora: If True, each row of the adapted weight [out, in] is rescaled to a trained magnitude (DoRA). Every
            forward then computes the norm of the weight. Default: False.
        dropout: Probability with which an element of the input of A is set to zero in training mode. The mask is
            equal to the mask of one process: each rank draws the mask of the unsharded input from torch's default
            generator, and uses its shard. So this generator must have the same state along the model axes. Ids of
            embeddings are not dropped. Default: 0, no dropout.
        sequence_parallel: True if the activations between layers are sharded along the sequence. None: the value of the
            base layer's attribute ``sequence_parallel``, or of ``reduce_scatter_embeddings`` of Megatron's embeddings;
            False without these attributes. Default: None.
        expert_axes: Axes along which ranks hold layers of different experts. Default: none.
        generator: Random generator for the factor that is not zero at first: A, or B on an embedding. It must have the
            same state on all ranks, except along ``expert_axes``. A sequence has one generator per rank along
            ``expert_axes``. None: torch's default generator. Default: None.
        dtype: Dtype of the factors. Default None: the dtype of the base layer's weight.
        name: Name of the layer, for errors. Default: "the base layer".

    Attributes:
        base_layer: The base layer.
        lora_A, lora_B: This rank's shards of A [r, in] and B [out, r]. B is zero at first; on an embedding, A is zero.
        lora_magnitude_vector: This rank's magnitudes [out]; None without DoRA.
        scaling: Factor of the adapter's output.
        is_merged: True between `merge` and `unmerge`.

    Shapes: input and output as in the base layer. If the base layer returns a tuple, the first tensor is adapted.
    Raises:
        ValueError: ``r`` is not a positive integer; ``dropout`` is not in [0, 1), or is not 0 for layers of different
            experts; the layer has an adapter, is not supported, or is not declared; or ``registry`` is None, there are
            several ranks, and the layer is not one of meshstep. In the first forward with dropout: the states of torch's
            default generator differ along the model axes.
        TypeError: In forward: the input or the base layer's output is a DTensor.
    Collectives: without sequence parallelism, on a column-parallel layer an all-reduce of r features per token in backward;
    on a row-parallel layer, or a vocabulary-parallel embedding, one in forward. If the base layer gathers its output or
    scatters its input, the adapter does so too. For other layers, see the table in
    `meshstep.parallel.adapters.adapter_layout`. DoRA computes the norms of the weight's rows with further collectives, in
    the constructor and in every forward. In every forward, DoRA also converts the norms and the base bias to the layout of
    the output, which may need collectives. In the first forward with dropout, also an all-reduce over the model axes.
    Host synchronization: none in forward and backward, except in the first forward with dropout, and in every forward with
    DoRA if `fully_shard` was applied to the base layer itself, and reshards it after its forward.
    """

    def __init__(
        self,
        base: nn.Module,
        r: int,
        alpha: float,
        registry: ProcessGroupRegistry | None = None,
        *,
        use_rslora: bool = False,
        use_dora: bool = False,
        dropout: float = 0.0,
        sequence_parallel: bool | None = None,
        expert_axes: str | tuple[str, ...] = (),
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        dtype: torch.dtype | None = None,
        name: str = _NO_NAME,
    ) -> None:
        super().__init__()
        if type(r) is not int or r < 1:
            raise ValueError(f"{name}: r={r!r} must be a positive integer; write the rank of the adapter, such as r=8")
        if isinstance(base, LoRA) or is_of_peft(base):
            raise ValueError(
                f"{name} has a LoRA adapter already; train that adapter, or give LoRA the layer that it adapts"
            )
        registry = _registry_for(base, registry, name)
        layout = layout_of(base, registry, sequence_parallel=sequence_parallel, expert_axes=expert_axes, name=name)
        _check_dropout(dropout, layout, name)
        self.base_layer = freeze(base)
        self.r, self.alpha, self.use_rslora, self.use_dora = r, alpha, use_rslora, use_dora
        self.scaling, self.dropout = alpha / (math.sqrt(r) if use_rslora else r), dropout
        self._has_compared_generators = False
        self.is_merged = False
        self._name, self._layout = name, layout
        registry.create_groups(*layout.communicating_axes)
        like: Any = base.get_buffer("_like") if isinstance(base, DiagonalTable) else base.weight
        drawn: dict[str, Any] = {"device": like.device, "dtype": dtype or like.dtype}
        experts = registry.size(*layout.stacked) if layout.stacked else 1
        of_experts = generator if isinstance(generator, Sequence) else [generator] * experts
        pairs = [_draw_factors(layout, r, of_expert, drawn) for of_expert in of_experts]
        a, b = (torch.cat(factors) if experts > 1 else factors[0] for factors in zip(*pairs, strict=True))
        self.lora_A = keep_shard(a, layout.first, registry)
        self.lora_B = keep_shard(b, layout.second, registry)
        self.lora_magnitude_vector: nn.Parameter | None = None
        if use_dora:
            self.lora_magnitude_vector = nn.Parameter(self._row_norms().to(drawn["dtype"]))
            full_shape = None if layout.stacked else (layout.out_features,)
            annotate(self.lora_magnitude_vector, layout.magnitude, full_shape=full_shape)
        self._merged_scale: Tensor | None = None

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self.base_layer(input, *args, **kwargs)
        if self.is_merged:
            return result
        output = result[0] if isinstance(result, tuple) else result
        if has_dtensors((input, output)):
            raise TypeError(
                f"LoRA of {type(self.base_layer).__name__} got a DTensor as input or as output of the base layer, but "
                "needs plain tensors; pass input.to_local(), and set use_local_output=True in the base layer's "
                "ParallelStyle, such as ColwiseParallel"
            )
        layout = self._layout
        if self.dropout and self.training and not layout.is_embedding:
            input = self._drop(input)
        product = self.scaling * layout.product(input, self.lora_A, self.lora_B, output)
        if self.lora_magnitude_vector is None:
            adapted = output + product.to(output.dtype)
        else:
            norms = stop_gradient(self._row_norms()).to(self.lora_magnitude_vector.dtype)
            scale = self.lora_magnitude_vector / norms
            bias = self._added_bias(result, output)
            linear = output if bias is None else output - bias
            adapted = layout.leave(scale, output).to(output.dtype) * (linear + product.to(output.dtype))
            adapted = adapted if bias is None else adapted + bias
        return (adapted, *result[1:]) if isinstance(result, tuple) else adapted

    def _drop(self, input: Tensor) -> Tensor:
        """Return the input after dropout, with this rank's shard of the mask of the unsharded input."""
        layout = self._layout
        if not self._has_compared_generators and not torch.compiler.is_compiling():
            _compare_generators(input.device, layout.registry, self._name)
            self._has_compared_generators = True
        shards, shape = layout.input_shards(input), [*input.shape]
        for dim, length, _ in shards:
            shape[dim] = length
        kept = torch.empty(shape, dtype=torch.bool, device=input.device).bernoulli_(1 - self.dropout)
        for dim, _, spans in shards:
            kept = elements_at(kept, dim, spans)
        return input * (kept.to(input.dtype) / (1 - self.dropout))

    def named_factors(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs of A, B and, with DoRA, the magnitudes.

        The names start with the argument ``name``, if one was given.
        """
        prefix = "" if self._name == _NO_NAME else f"{self._name}."
        return [(f"{prefix}{name}", param) for name, param in self.named_parameters(recurse=False)]

    def extra_repr(self) -> str:
        options = [text for text, used in (("rsLoRA", self.use_rslora), ("DoRA", self.use_dora)) if used]
        options += [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([f"r={self.r}", f"alpha={self.alpha}", *options])

    @torch.no_grad()
    def _row_norms(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the norm of each row of the adapted weight, for this rank's rows of B.

        Collectives: an all-reduce over the axes that shard the input features. On `Linear2D` an all-gather of A, on
        `Classifier2D` of B and of the norms. On `Embedding3D` and `Classifier3D` a broadcast of the table. If `fully_shard`
        has sharded the weight further, two all-gathers of the weight.
        """
        layout = self._layout
        a, b = layout.factors_of_weight(local_tensor(self.lora_A), local_tensor(self.lora_B))
        weight = _computed_weight(self._weight, (b.size(0), a.size(1)), layout)
        dtype = dtype or torch.promote_types(weight.dtype, torch.float32)
        squares = (weight.to(dtype) + self.scaling * b.to(dtype) @ a.to(dtype)).square().sum(1)
        axes = layout.reduced_axes
        if axes and layout.registry.size(*axes) > 1:
            squares = all_reduce(squares, Over(layout.registry, axes, call="LoRA"))
        return layout.norms_of_output(squares.sqrt())

    def _added_bias(self, result: Any, output: Tensor) -> Tensor | None:
        """Return the bias that the base layer has added to its output, in the layout of the output. None: no bias."""
        if isinstance(result, tuple) and len(result) > 1 and result[1] is not None:
            return None
        bias = self._layout.added_bias(self.base_layer)
        return None if bias is None else self._layout.leave(bias, output).to(output.dtype)

    @property
    def _weight(self) -> Tensor:
        base: Any = self.base_layer
        weight: Tensor = base.table() if isinstance(base, DiagonalTable) else base.weight
        return weight

    # Merging ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to this rank's shard of the base weight. Forward then calls the base layer only.

        With DoRA, the rows of the sum are also rescaled to the magnitudes. The new weight is computed in float64 and
        rounded once. Call this method on all ranks.

            model.up.merge()

        Raises:
            ValueError: A factor is declared with other shards than its base layer requires. The weight is unchanged.
        Collectives: all-gathers of the factors over the axes that shard them; with DoRA also an all-reduce over the axes
        that shard the input features of the weight, and on `Embedding3D` and `Classifier3D` a broadcast of the table. Host
        synchronization: yes, if there are collectives.
        """
        if self.is_merged:
            return
        change, weight = self._change(), self._weight_shard()
        merged = None if weight is None else weight.double() + change
        if self.lora_magnitude_vector is not None:
            self._merged_scale = self._scale(merged)
        if weight is not None and merged is not None:
            weight.copy_(merged if self._merged_scale is None else merged * self._merged_scale)
        self.is_merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore this rank's shard of the base weight from before `merge`, computed in float64 and rounded once.

        The weight may differ from its value before `merge` by a rounding error of the merged weight. Call this method on
        all ranks.

            model.up.unmerge()

        Raises, host synchronization: as in `merge`. Collectives: all-gathers of the factors over the axes that shard them.
        """
        if not self.is_merged:
            return
        change, weight = self._change(), self._weight_shard()
        if weight is not None:
            before = weight.double()
            weight.copy_((before if self._merged_scale is None else before / self._merged_scale) - change)
        self._merged_scale, self.is_merged = None, False

    def _weight_shard(self) -> Tensor | None:
        """Return this rank's shard of the base weight; None on a rank that does not hold one."""
        base: Any = self.base_layer
        return None if base.weight is None else local_tensor(base.weight)

    def _change(self) -> Tensor:
        """Return ``scaling * B @ A`` for this rank's shard of the base weight, in the shape of the shard, in float64."""
        factors = full_factors(self)
        out_spans, in_spans = self._weight_spans()
        change = self.scaling * elements_at(factors["B"].double(), 0, out_spans)
        change = change @ elements_at(factors["A"].double().t(), 0, in_spans).t()
        return change.t() if self._layout.is_transposed_weight else change

    def _weight_spec(self) -> P:
        """Return the current spec of the base weight, without the axes along which experts differ."""
        if isinstance(self.base_layer, DiagonalTable):
            return P(None, self.base_layer.output)
        return without_axes(weight_spec(self._weight, self._layout.registry.topology), self._layout.stacked)

    def _weight_spans(self) -> tuple[Sequence[Span], Sequence[Span]]:
        """Return the spans of the output features, and of the input features, of this rank's shard of the base weight."""
        layout, spec = self._layout, self._weight_spec()
        where = layout.registry.topology, layout.registry.coordinate
        out, inputs = (1, 0) if layout.is_transposed_weight else (0, 1)
        return spec.spans(out, layout.out_features, *where), spec.spans(inputs, layout.in_features, *where)

    def _scale(self, adapted: Tensor | None) -> Tensor:
        """Return magnitude / norm per output feature of this rank's shard of the weight, as a factor for this shard.

        ``adapted`` is None on a rank that holds no shard.
        """
        layout, registry = self._layout, self._layout.registry
        magnitudes = elements_at(full_factors(self)["magnitude"].double(), 0, self._weight_spans()[0])
        if isinstance(self.base_layer, DiagonalTable):
            norms = self._row_norms(torch.float64)
        else:
            assert adapted is not None
            dim = 0 if layout.is_transposed_weight else 1
            squares, axes = adapted.square().sum(dim), self._weight_spec().dim_axes(dim)
            if axes and registry.size(*axes) > 1:
                squares = all_reduce(squares, Over(registry, axes, call="LoRA.merge"))
            norms = squares.sqrt()
        scale = magnitudes / norms
        return scale if layout.is_transposed_weight else scale.unsqueeze(1)


def add_lora(
    model: nn.Module,
    targets: str | Iterable[str],
    r: int,
    alpha: float,
    registry: ProcessGroupRegistry | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> dict[str, LoRA | GroupedLoRA]:
    """Freeze a model, and replace layers in it by `LoRA`, and modules of several experts by `GroupedLoRA`.

        adapters = add_lora(model, ["up", "head"], r=8, alpha=16)

    Unless you pass ``generator=``, the initial factors depend on ``seed`` and the layer's name only, so they are equal on
    every layout of the model. In the name of a layer of an expert, the number in the innermost `nn.ModuleList` is the
    expert's number in the dense model.

    Args:
        model: The model. All its parameters are frozen, except the factors of adapters that it has already: those that
            `declare_adapters` finds, also PEFT's with ``modules_to_save``. The factors of a module of your own stay
            trainable only if the weight of its base layer is frozen already.
        targets: Names of layers: a full name, the end of a name after a dot, or a glob pattern for full names. A target
            that matches no layer is matched with the names of parameters [experts, out, in]. `GroupedLoRA` replaces the
            modules of these parameters.
        r, alpha, registry: As in `LoRA`.
        seed: Seed of the initial factors. Default: 0.
        **options: More arguments of `LoRA`, such as ``use_dora=True``.
    Returns:
        The adapters by the full names of the modules that they replace.
    Raises:
        ValueError: A target is the name of no module and no parameter of experts, of a layer that has an adapter, or of a
            parameter of the model itself; ``use_dora`` or ``dropout`` is given for parameters of experts; or as in `LoRA`
            and `GroupedLoRA`. The model is unchanged.
    Collectives: none, except with DoRA, which computes the norms of each weight. Host synchronization: none, except with
    DoRA for each weight that `fully_shard` has sharded.
    """
    wanted = [targets] if isinstance(targets, str) else [*targets]
    modules, grouped = dict(model.named_modules()), _parameters_of_experts(model)
    found: dict[str, nn.Module] = {}
    experts: dict[str, list[str]] = {}
    for target in wanted:
        matching = {name: module for name, module in modules.items() if name and _is_target(name, target)}
        of_experts = [] if matching else [name for name in grouped if _is_target(name, target)]
        if not matching and not of_experts:
            _check_experts_adapted(modules, target)
            is_stage = registry is not None and registry.topology.size(*registry.topology.pipe_axes) > 1
            raise ValueError(
                f"target {target!r} is the name of no module of {type(model).__name__}; its modules are "
                f"{some([*filter(None, modules)]) or 'none'}; give the name of a layer, or of a parameter "
                f"[experts, out, in]{', that this pipeline stage has' * is_stage}"
            )
        if adapted := [name for name, module in matching.items() if isinstance(module, LoRA) or is_of_peft(module)]:
            raise ValueError(
                f"target {target!r}: {adapted[0]} has a LoRA adapter already; leave this layer out of targets"
            )
        found.update(matching)
        for name in of_experts:
            module, _, parameter = name.rpartition(".")
            if not module:
                raise ValueError(
                    f"target {target!r} is a parameter of the model itself, which add_lora does not replace; use "
                    f"GroupedLoRA(model, [{parameter!r}], ...)"
                )
            experts.setdefault(module, []).append(parameter)
    adapters: dict[str, LoRA | GroupedLoRA] = {}
    trained = [param for param in model.parameters() if param.requires_grad]
    try:
        for name in (name for name in modules if name in found or name in experts):
            if name in experts:
                adapters[name] = _grouped_lora(modules[name], name, experts[name], r, alpha, registry, seed, options)
            else:
                adapters[name] = _seeded_lora(model, name, r, alpha, registry, seed, options)
    except BaseException:
        for adapter in adapters.values():
            if isinstance(adapter, GroupedLoRA):
                adapter.remove_hooks()
        for param in trained:
            param.requires_grad_()
        raise
    freeze(model)
    for name, adapter in adapters.items():
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, adapter)
    return adapters


def _parameters_of_experts(model: nn.Module) -> list[str]:
    """Return the names of all parameters of three dims that have no adapter yet."""
    modules = model.named_modules()
    adapted = [f"{name}.base_layer".lstrip(".") for name, module in modules if isinstance(module, GroupedLoRA)]
    return [
        name
        for name, param in model.named_parameters()
        if param.dim() == 3 and "lora_" not in name and name.rpartition(".")[0] not in adapted
    ]


def _check_experts_adapted(modules: Mapping[str, nn.Module], target: str) -> None:
    """Raise ValueError if ``target`` is the name of a parameter of a module that a `GroupedLoRA` adapts already."""
    for name, module in modules.items():
        if isinstance(module, GroupedLoRA):
            own = [f"{name}.{each}".lstrip(".") for each, _ in module.base_layer.named_parameters(recurse=False)]
            if any(_is_target(each, target) for each in own):
                raise ValueError(
                    f"target {target!r}: {name or 'the model'} has LoRA adapters already; name all parameters of this "
                    "module in one call of add_lora"
                )


def _seeded_lora(
    model: nn.Module,
    name: str,
    r: int,
    alpha: float,
    registry: ProcessGroupRegistry | None,
    seed: int,
    options: dict[str, Any],
) -> LoRA:
    """Return an adapter of a layer, whose initial factors depend on the seed and the name of the layer or expert."""
    base = model.get_submodule(name)
    registry = _registry_for(base, registry, name)
    given = {key: value for key, value in options.items() if key in ("sequence_parallel", "expert_axes")}
    stacked = layout_of(base, registry, name=name, **given).stacked
    ranks = registry.size(*stacked) if stacked else 1
    names = expert_names(model, name, ranks) or [f"{name}.{index}" for index in range(ranks)]
    seeds = [zlib.crc32(each.encode()) for each in names]
    generators = [torch.Generator(_device_of(base)).manual_seed(seed + number) for number in seeds]
    return LoRA(base, r, alpha, registry, **{"generator": generators, **options}, name=name)


def _grouped_lora(
    base: nn.Module,
    name: str,
    parameters: list[str],
    r: int,
    alpha: float,
    registry: ProcessGroupRegistry | None,
    seed: int,
    options: dict[str, Any],
) -> GroupedLoRA:
    """Return the adapters of a module of several experts, with the options of `add_lora` that apply to it."""
    for key in ("use_dora", "dropout"):
        if options.get(key):
            raise ValueError(
                f"{name}: {key}={options[key]} is not supported on parameters of several experts; give their adapters in "
                f"another call of add_lora, without {key}"
            )
    given = {key: value for key, value in options.items() if key in ("use_rslora", "expert_axes", "dtype")}
    return GroupedLoRA(base, parameters, r, alpha, _registry_for(base, registry, name), seed=seed, name=name, **given)


def expert_names(model: nn.Module, name: str, ranks: int) -> list[str] | None:
    """Return the name that a layer has in the dense model, for each of ``ranks`` along the axes that stack experts.

    If each rank has the experts 0 to n - 1 in an `nn.ModuleList`, the expert i of the rank k is the expert k * n + i of the
    dense model. In nested lists, the innermost list has the experts. The result is None if the layer is in no list.
    """
    if ranks == 1:
        return [name]
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        parent = model.get_submodule(".".join(parts[:at]))
        if isinstance(parent, nn.ModuleList):
            numbers = [index * len(parent) + int(parts[at]) for index in range(ranks)]
            return [".".join([*parts[:at], str(number), *parts[at + 1 :]]) for number in numbers]
    return None


def _is_target(name: str, target: str) -> bool:
    is_pattern = re.search(r"[*?\[]", target) is not None
    return name == target or name.endswith(f".{target}") or (is_pattern and fnmatchcase(name, target))


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def full_factors(adapter: LoRA) -> dict[str, Tensor]:
    """Return the full factors of an adapter on every rank: "A" [r, in], "B" [out, r], with DoRA "magnitude" [out].

    Collectives: all-gathers over the axes that shard the factors, except axes along which experts differ.
    """
    layout = adapter._layout
    check_specs(adapter.named_factors(), layout)
    found = {}
    for kind, attribute in FACTORS.items():
        param: Tensor | None = getattr(adapter, attribute)
        if param is not None:
            spec = without_axes(spec_of(param, layout.registry.topology), layout.stacked)
            found[kind] = unshard(local_tensor(param), spec, layout.registry)
    return found


def _computed_weight(weight: Tensor, shape: tuple[int, int], layout: AdapterLayout) -> Tensor:
    """Return the shard [out, in], of shape ``shape``, of the weight with which the layer computes.

    Collectives: two all-gathers if `fully_shard` has sharded the weight further.
    """
    local = local_tensor(weight)
    if tuple(local.t().shape if layout.is_transposed_weight else local.shape) == shape:
        return local.t() if layout.is_transposed_weight else local
    registry = layout.registry
    full = unshard(local, without_axes(weight_spec(weight, registry.topology), layout.stacked), registry)
    full = full.t() if layout.is_transposed_weight else full
    where = registry.topology, registry.coordinate
    out_spans = without_axes(layout.second, layout.stacked).spans(0, full.size(0), *where)
    return elements_at(elements_at(full, 0, out_spans), 1, layout.first.spans(1, full.size(1), *where))


def _check_dropout(dropout: float, layout: AdapterLayout, name: str) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"{name}: dropout={dropout} must be at least 0 and below 1; write dropout=0.05, for example")
    if dropout and layout.stacked:
        raise ValueError(
            f"{name}: dropout={dropout} is not supported on a layer whose experts differ between ranks along "
            f"{' x '.join(layout.stacked)}: each rank draws a different number of random values, so later dropout masks of "
            "replicated layers would differ; adapt this layer in a separate call of add_lora, without dropout"
        )


def _compare_generators(device: torch.device, registry: ProcessGroupRegistry, name: str) -> None:
    """Raise ValueError on all ranks along the model axes if the states of torch's default generator differ between them.

    While a CUDA graph is captured, nothing is compared.

    Collectives: an all-reduce of two numbers over the model axes.
    Host synchronization: yes.
    """
    axes = tuple(axis for axis in registry.topology.model_axes if registry.topology.role(axis) != "pipe")
    if not axes or registry.size(*axes) == 1 or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    number = zlib.crc32(bytes(state.tolist()))
    found = torch.tensor([number, -number], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=registry.group(*axes))
    most, least = found.tolist()
    if most != -least:
        raise ValueError(
            f"{name}: dropout needs the same masks on all ranks along {' x '.join(axes)}, but the states of torch's "
            "default generator differ between these ranks; call torch.manual_seed with the same seed on these ranks"
        )


def _draw_factors(
    layout: AdapterLayout, r: int, generator: torch.Generator | None, drawn: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the initial full factors A [r, in], drawn, and B [out, r], zero. On an embedding B is drawn, and A is zero."""
    if layout.is_embedding:
        b = draw_embedding(layout.out_features, r, generator=generator, **drawn)
        return torch.zeros(r, layout.in_features, **drawn), b
    a, _ = draw_linear(layout.in_features, r, bias=False, generator=generator, **drawn)
    return a, torch.zeros(layout.out_features, r, **drawn)


def _registry_for(base: nn.Module, registry: ProcessGroupRegistry | None, name: str) -> ProcessGroupRegistry:
    if registry is not None:
        return registry
    own = getattr(base, "registry", None)
    if isinstance(own, ProcessGroupRegistry):
        return own
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{name} is a {type(base).__name__}, which has no ProcessGroupRegistry; pass the registry of the model as "
            "registry=, for DTensors for example ProcessGroupRegistry.from_device_mesh(mesh)"
        )
    return ProcessGroupRegistry(Topology())
