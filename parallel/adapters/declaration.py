"""Declare the layouts of the adapters in a model: `declare_adapters`.

PEFT is not imported: its layers are found by their attributes ``lora_A``, ``lora_B``, ``lora_embedding_A``,
``lora_embedding_B``, ``lora_magnitude_vector`` and ``modules_to_save``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..interop.inferred_registry import registry_for
from ..interop.local_parameters import has_dtensors, local_tensor, spec_of
from ..layout.annotation import annotate, annotation_of, copy_annotation
from ..layout.shard import local_shape
from ..layout.spec import P
from ..mesh.agreement import on_all_ranks_with
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.stop_gradient import stop_gradient
from ..mesh.text import some
from .adapter_layout import (
    AdapterLayout,
    ColumnLayout,
    RowLayout,
    check_specs,
    layout_of,
    mesh_axes_of,
    weight_spec,
    without_axes,
)
from .adapter_search import Factor, is_of_peft, pair_of, saved_modules
from .grouped_lora import GroupedLoRA
from .lora import FACTORS, LoRA

_EXPERT_AXES = "_meshstep_expert_axes"  # attribute of an adapter's module: `expert_axes` of `declare_adapters`
_INSTEAD = "use LoRA(base, r, alpha) or add_lora of meshstep.parallel for this layer"
_INSTEAD_OF_PEFT = f"leave this layer out of PEFT's target_modules, and {_INSTEAD}"


class Adapter(NamedTuple):
    """An adapter in a model.

    Attributes:
        name: Name of the module that holds the adapter; for an adapter around a layer, the name of the layer.
        factors: The factors "A" [r, in] and "B" [out, r], and with DoRA the magnitudes, "magnitude" [out], with their
            names in the model. The factors of several experts have the shapes that `GroupedLoRA` describes.
        key: PEFT's name of the adapter; None for other adapters.
        layout: The layout of an adapter of meshstep; None for other adapters.
        parameter: Name of the parameter in ``base`` that a `GroupedLoRA` adapts; None for other adapters.
    """

    name: str
    module: nn.Module
    base: nn.Module
    factors: dict[str, Factor]
    key: str | None = None
    layout: AdapterLayout | None = None
    parameter: str | None = None


def declare_adapters(
    model: nn.Module,
    registry: ProcessGroupRegistry | None = None,
    *,
    sequence_parallel: bool | None = None,
    expert_axes: str | tuple[str, ...] = (),
) -> dict[str, P]:
    """Declare the layout of every adapter in a model, derived from the layout of its base layer.

    It finds LoRA layers of PEFT (also rsLoRA, DoRA, and ``modules_to_save``), `LoRA` and `GroupedLoRA` modules, and modules
    of your own that have two parameters or linear layers ``A`` and ``B`` (or ``a`` and ``b``, ``lora_a`` and ``lora_b``,
    ``lora_A`` and ``lora_B``) and one other layer with a weight.

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj"]))
        declare_adapters(model)

    In modules of your own, the forward must pass the output of A through `copy_to` on a column-parallel layer, and through
    `reduce_from` on a row-parallel layer. `prove` checks this.

    Args:
        model: The model, after adapters were added. The weights of base layers must be declared or DTensors, unless the
            mesh has one rank, or the registry is derived from the model.
        registry: The process groups. None: the registry of a layer of meshstep in the model, or else one derived from the
            model, as `ParallelOptimizer.for_model` does. Default: None.
        sequence_parallel: As in `LoRA`. Default: None.
        expert_axes: As in `LoRA`. Default: none.
    Returns:
        The specs by the names of the declared parameters.
    Raises:
        ValueError: The model has no adapter, and the topology has no pipeline axes; a base layer is not supported or not
            declared; a factor has a shape that does not fit its base layer; or PEFT's own forward or backward is wrong on
            this base layer. The message names the layer. No layout is declared in these cases, except that deriving a
            registry declares undeclared parameters ``P()``.
    Collectives and host synchronization: none, unless the registry is derived from the model.
    """
    registry = registry or registry_in(model)
    decided: dict[str, tuple[Tensor, P, tuple[int, ...] | None]] = {}
    for adapter in adapters_of(model):
        layout = _layout(adapter, registry, sequence_parallel, expert_axes)
        _check_forward(adapter, layout)
        fulls = layout.full_shapes(adapter.factors["B"].param.size(-1))
        for kind, (name, param, _) in adapter.factors.items():
            spec, full = layout.specs[kind], fulls[kind]
            _check_shape(param, name, spec, full, layout, _INSTEAD if adapter.key is None else _INSTEAD_OF_PEFT)
            decided[name] = (param, spec, None if layout.stacked else full)
    saved = list(saved_modules(model))
    if not decided and not saved and not registry.topology.pipe_axes:  # a pipeline stage may have no adapter
        raise ValueError(
            f"found no adapter in {type(model).__name__}: expected layers of PEFT or add_lora, or a module with two "
            "factors, such as lora_A and lora_B or A and B, and exactly one other layer; add the adapters before this call"
        )
    for name, (param, spec, full_shape) in decided.items():
        if not has_dtensors((param,)):
            annotate(param, spec, name, full_shape=full_shape)
        else:
            annotate(param, without_axes(spec, mesh_axes_of(param, registry.topology)), name)
    for adapter in adapters_of(model):
        setattr(adapter.module, _EXPERT_AXES, expert_axes)
    declared = {name: spec for name, (_, spec, _) in decided.items()}
    for name, original, copy in saved:
        if annotation_of(original) is not None:
            copy_annotation(original, copy)
            declared[name] = spec_of(copy)
    return declared


def derived_layout(adapter: Adapter, registry: ProcessGroupRegistry) -> AdapterLayout:
    """Return the layout of an adapter after `declare_adapters`, derived from its base layer.

    A factor that is declared with other shards than the base layer requires raises ValueError.
    """
    layout = _layout(adapter, registry, None, getattr(adapter.module, _EXPERT_AXES, ()))
    check_specs(((factor.name, factor.param) for factor in adapter.factors.values()), layout)
    return layout


# Finding adapters -----------------------------------------------------------------------------------------------------


def adapters_of(model: nn.Module) -> Iterator[Adapter]:
    """Iterate over the adapters in a model, in the order of its modules."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, LoRA):
            params = {kind: getattr(module, attribute) for kind, attribute in FACTORS.items()}
            factors = {
                kind: _factor(prefix + FACTORS[kind], param) for kind, param in params.items() if param is not None
            }
            yield Adapter(name, module, module.base_layer, factors, layout=module._layout)
        elif isinstance(module, GroupedLoRA):
            for each, layout in module._layouts.items():
                factors = {
                    "A": _factor(f"{prefix}lora_A.{each}", module.lora_A[each]),
                    "B": _factor(f"{prefix}lora_B.{each}", module.lora_B[each]),
                }
                yield Adapter(name, module, module.base_layer, factors, layout=layout, parameter=each)
        elif is_of_peft(module):
            yield from _peft_adapters(name, prefix, module)
        elif (pair := pair_of(module)) is not None:
            factors = {kind: factor._replace(name=prefix + factor.name) for kind, factor in pair.factors.items()}
            yield Adapter(name, module, pair.base, factors)


def _peft_adapters(name: str, prefix: str, module: Any) -> Iterator[Adapter]:
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module.base_layer
    magnitudes = getattr(module, "lora_magnitude_vector", None) or {}
    for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        for key in getattr(module, first, None) or {}:
            factors = {
                "A": _factor(f"{prefix}{first}.{key}", getattr(module, first)[key]),
                "B": _factor(f"{prefix}{second}.{key}", getattr(module, second)[key]),
            }
            if key in magnitudes:
                factors["magnitude"] = _factor(f"{prefix}lora_magnitude_vector.{key}", magnitudes[key])
            yield Adapter(name, module, base, factors, key)


def _factor(name: str, part: Any) -> Factor:
    """Return the factor that is the parameter ``part``, or the weight of the module ``part``."""
    is_module = isinstance(part, nn.Module)
    return Factor(f"{name}.weight", part.weight, part) if is_module else Factor(name, part)


# Specs, constant norms and random factors for `prove` -----------------------------------------------------------------


def derived_specs(model: nn.Module) -> dict[str, P]:
    """Return the specs of the factors of all `LoRA` and `GroupedLoRA` modules by name, derived from the base layers."""
    found: dict[str, P] = {}
    for adapter in adapters_of(model):
        if (layout := adapter.layout) is not None:
            found |= {factor.name: layout.specs[kind] for kind, factor in adapter.factors.items()}
    return found


@contextmanager
def constant_norms(model: nn.Module) -> Iterator[None]:
    """Context manager in which PEFT's DoRA layers pass the norm of their weight through `stop_gradient`, for `prove`."""
    layers = [module for module in model.modules() if callable(getattr(module, "get_weight_norm", None))]
    for layer in layers:
        vars(layer)["get_weight_norm"] = _constant(layer.get_weight_norm)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["get_weight_norm"]


def _constant(function: Any) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: stop_gradient(function(*args, **kwargs))


@contextmanager
def random_factors(model: nn.Module, registry: ProcessGroupRegistry, seed: int = 0) -> Iterator[tuple[str, ...]]:
    """Context manager that sets the zero factors of all adapters to random values, and sets them to zero at its end.

    One factor of a LoRA adapter is zero at first. The gradient of the other factor is then zero, so a check of gradients
    cannot detect a missing sum of this gradient. `prove` enters this context itself.

        with random_factors(model, registry):
            loss_of(model).backward()
            print(audit(model, registry))

    Replicas get equal values, shards get distinct values. The context yields the names of the factors that were zero on all
    ranks that have them. Every rank must enter it.

    Args:
        model: A model with adapters (`declare_adapters`). Without adapters the context changes nothing.
        registry: The process groups.
        seed: Seed of the values. Default: 0.
    Raises:
        ValueError: On every rank: an adapter is merged on a rank.
    Collectives: an object all-gather over the world. Host synchronization: yes.
    """

    def find() -> tuple[dict[str, Tensor], tuple[dict[str, bool], list[str]]]:
        adapters = [*adapters_of(model)]
        factors = {
            factor.name: factor.param
            for adapter in adapters
            for kind, factor in adapter.factors.items()
            if kind != "magnitude"
        }
        zero = {name: not bool(local_tensor(param).detach().any()) for name, param in factors.items()}
        return factors, (zero, [adapter.name for adapter in adapters if is_merged(adapter.module)])

    factors, by_rank = on_all_ranks_with(find, registry)
    if merged := [*dict.fromkeys(name for _, names_of_rank in by_rank for name in names_of_rank)]:
        raise ValueError(
            f"the adapter of {some(merged)} is merged, so its factors take no part in the forward and have no "
            "gradients to check; call unmerge() first"
        )
    names = tuple(name for name in factors if all(of_rank.get(name, True) for of_rank, _ in by_rank))
    try:
        for name in names:
            _fill(factors[name], name, registry, seed)
        yield names
    finally:
        with torch.no_grad():
            for name in names:
                local_tensor(factors[name]).zero_()


def is_merged(module: nn.Module) -> bool:
    return bool(getattr(module, "is_merged", False) or getattr(module, "merged", False))


@torch.no_grad()
def _fill(param: Tensor, name: str, registry: ProcessGroupRegistry, seed: int) -> None:
    """Set a factor to random values that depend on its name and on this rank's shard."""
    annotation = annotation_of(param)
    spec = P() if annotation is None and not has_dtensors((param,)) else spec_of(param, registry.topology)
    shards = [f"{axis}={registry.coordinate[axis]}" for axis in spec.distinct_axes(registry.topology)]
    number = zlib.crc32(" ".join([name, *shards]).encode())
    local = local_tensor(param)
    generator = torch.Generator(local.device).manual_seed(seed + number)
    local.normal_(0.0, max(min(param.shape), 1) ** -0.5, generator=generator)


# Registry, layout and checks of an adapter ----------------------------------------------------------------------------


def registry_in(model: nn.Module) -> ProcessGroupRegistry:
    """Return the registry of a layer of meshstep in the model, or else one derived from the model (`registry_for`)."""
    for module in model.modules():
        found = getattr(module, "registry", None)
        if isinstance(found, ProcessGroupRegistry):
            return found
    return registry_for(model)


def _layout(
    adapter: Adapter, registry: ProcessGroupRegistry, sequence_parallel: bool | None, expert_axes: str | tuple[str, ...]
) -> AdapterLayout:
    if adapter.layout is not None:
        return adapter.layout
    if hasattr(adapter.module, "parameter_name"):
        return _layout_of_grouped(adapter, registry)
    name = f"{adapter.name}: the base layer" if adapter.name else "the base layer"
    layout = layout_of(adapter.base, registry, sequence_parallel=sequence_parallel, expert_axes=expert_axes, name=name)
    conv = getattr(adapter.module, "fan_in_fan_out", False)
    if conv and not layout.is_transposed_weight and type(layout) is not AdapterLayout:
        raise ValueError(
            f"{name} stores its weight as [in, out] (fan_in_fan_out) and is sharded, which is not supported; replace it by "
            "a sharded layer with a weight of [out, in]"
        )
    if conv:
        layout = replace(layout, in_features=layout.out_features, out_features=layout.in_features)
    return layout


def _layout_of_grouped(adapter: Adapter, registry: ProcessGroupRegistry) -> AdapterLayout:
    """Return the layout of PEFT's adapter of a parameter of several experts. The parameter must be replicated."""
    module: Any = adapter.module
    parameter = f"{adapter.name}.{module.parameter_name}"
    spec = weight_spec(getattr(adapter.base, module.parameter_name), registry.topology, parameter)
    if spec.sharded_axes and registry.size(*spec.sharded_axes) > 1:
        raise ValueError(
            f"{parameter}, a parameter of several experts, is sharded ({spec}), but PEFT's adapter of such a parameter "
            "(target_parameters) has the size of the full parameter; leave it out of target_parameters, and use add_lora "
            "of meshstep.parallel with the name of this parameter"
        )
    in_features, out_features = adapter.factors["A"].param.size(1), adapter.factors["B"].param.size(0)
    return AdapterLayout(registry, in_features, out_features, P(), P())


def _check_forward(adapter: Adapter, layout: AdapterLayout) -> None:
    """Raise ValueError if the adapter is of PEFT, and PEFT's forward or backward is wrong for this base layer."""
    if adapter.key is None or not isinstance(layout, ColumnLayout | RowLayout):
        return
    over = " x ".join(f"{axis}={layout.registry.size(axis)}" for axis in layout.axes)
    if layout.registry.size(*layout.axes) == 1:
        return
    first, second = adapter.factors["A"].module, adapter.factors["B"].module
    if layout.is_embedding:
        raise ValueError(
            f"{adapter.name}: PEFT's LoRA looks up all ids in this rank's columns of lora_embedding_A, but the table is "
            f"sharded over {over}, and PEFT does not sum the results; {_INSTEAD_OF_PEFT}"
        )
    if isinstance(layout, ColumnLayout):
        if not _communicates(second):
            raise ValueError(
                f"{adapter.name}: the output features of this layer are sharded over {over}, but PEFT's lora_B does not "
                "sum the gradient of its input over these ranks, so the gradients of lora_A and of all earlier layers "
                f"would be partial; {_INSTEAD_OF_PEFT}"
            )
        return
    if not _communicates(first):
        raise ValueError(
            f"{adapter.name}: the input features of this layer are sharded over {over}, but PEFT's lora_A does not sum its "
            f"output over these ranks, so each rank would add a different output; {_INSTEAD_OF_PEFT}"
        )
    given = getattr(first, "in_features", layout.in_features)
    if given != layout.in_features:
        raise ValueError(
            f"{adapter.name}: the {layout.in_features} input features of this row-parallel layer are sharded over {over}, "
            f"but PEFT's lora_A has in_features={given}, so its forward fails with an error about shapes; "
            f"{_INSTEAD_OF_PEFT}"
        )


def _communicates(module: nn.Module | None) -> bool:
    """Return True if a factor's module may issue collectives: it has hooks, or another forward than `nn.Linear`.

    The result is True if ``module`` is None, because the factor is then a parameter, and the forward is unknown.
    """
    if module is None:
        return True
    has_hooks = bool(module._forward_pre_hooks or module._forward_hooks)
    return type(module).forward is not nn.Linear.forward or "forward" in vars(module) or has_hooks


def _check_shape(param: Tensor, name: str, spec: P, full: tuple[int, ...], layout: AdapterLayout, instead: str) -> None:
    """Raise ValueError unless this rank's shard of a factor has the shape that ``spec`` gives to the shape ``full``.

    If `fully_shard` has sharded the factor over data axes, its global shape is compared instead. The layout of a DTensor
    over the axes of its mesh is compared too.
    """
    topology, coordinate = layout.registry.topology, layout.registry.coordinate
    single = without_axes(spec, layout.stacked)
    expected, found = local_shape(full, single, topology, coordinate), tuple(local_tensor(param).shape)
    kind = "shape"
    if has_dtensors((param,)):
        meshed = mesh_axes_of(param, topology)
        placed = spec_of(param, topology)
        stored = [axis for axis in placed.sharded_axes if axis in meshed and topology.role(axis) == "data"]
        outside = [axis for axis in (*placed.sharded_axes, *single.sharded_axes) if axis not in meshed]
        given, wanted = without_axes(placed, [*stored, *outside]), without_axes(single, outside)
        if (given.entries, given.blocks) != (wanted.entries, wanted.blocks):
            raise ValueError(
                f"{name} is a DTensor with the layout {placed}, but its base layer requires {single}; {instead}"
            )
        if stored:  # `fully_shard` has sharded the factor further, so only its global shape can be compared
            expected, found = local_shape(full, without_axes(single, meshed), topology, coordinate), tuple(param.shape)
            kind = "global shape"
    if found != expected:
        raise ValueError(
            f"{name} has {kind} {found}, but its base layer needs {expected} (full shape {full}, layout {single}); "
            f"{instead}"
        )
