"""Save and load adapters in the file format of PEFT, from and onto any layout: `save_adapter` and `load_adapter`.

A folder has two files: ``adapter_model.safetensors`` with the full factors, and ``adapter_config.json`` with rank, alpha
and the names of the layers. PEFT itself is not needed; the package safetensors is (``pip install 'meshstep[lora]'``).
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..interop.local_parameters import local_tensor, spec_of
from ..layout.shard import shard, unshard
from ..layout.spec import P
from ..mesh.agreement import gather_objects, on_all_ranks, on_all_ranks_with
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.text import some
from .adapter_search import saved_modules
from .declaration import Adapter, adapters_of, derived_layout, is_merged, registry_in
from .grouped_lora import GroupedLayout, GroupedLoRA
from .lora import LoRA, expert_names

_PREFIX = "base_model.model."
_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_SETTINGS = ("r", "lora_alpha", "use_rslora", "use_dora")

Settings = dict[str, Any]


class StoredParameter(NamedTuple):
    """A parameter of the model, and its tensors in a file.

    With several ``keys``, the full parameter is the concatenation of these tensors along dim 0: each tensor belongs to the
    experts of one rank. ``pack`` and ``unpack`` convert the full tensor to the form in the file, and back.
    """

    param: Tensor
    spec: P
    keys: tuple[str, ...]
    pack: Callable[[Tensor], Tensor] = torch.Tensor.detach
    unpack: Callable[[Tensor], Tensor] = torch.Tensor.detach


def save_adapter(
    folder: str | os.PathLike[str],
    model: nn.Module,
    registry: ProcessGroupRegistry | None = None,
    *,
    adapter_name: str = "default",
    base_model: str | None = None,
) -> None:
    """Gather the adapters of a model, and save them in the files that PEFT loads. Call it on all ranks.

        save_adapter("adapter", model)
        # in one process: peft.PeftModel.from_pretrained(dense_model, "adapter")

    Rank 0 writes the files; existing files are replaced. Layers must have the same names as in the dense model. If each
    rank has the experts 0 to n - 1 of an `nn.ModuleList`, they are saved as k * n to k * n + n - 1, where k is
    the rank's index along the axes with different experts.

    Args:
        folder: Folder of the files; it is created.
        model: A model with `LoRA` modules, or with adapters that `declare_adapters` has declared.
        registry: The process groups. None: as in `declare_adapters`. Default: None.
        adapter_name: PEFT's name of the adapter, in a model with layers of PEFT. Default: "default".
        base_model: Name or path of the base model, for the field of this name in the configuration. None: the field is
            null. Default: None.
    Raises:
        ModuleNotFoundError: The package safetensors is not installed.
        ValueError: On every rank: a rank's model has no adapter of this name (with pipeline axes: all ranks' models);
            adapters have different settings ``use_rslora`` or ``use_dora``; a factor is declared with other shards than its
            base layer requires; the ranks have different experts that are in no `nn.ModuleList`; or stages have different
            adapters of the same name.
    Collectives: all-gathers of each factor over the axes that shard it, and object all-gathers over the world.
    Host synchronization: yes.
    """
    registry = registry or registry_in(model)
    settings: dict[str, Settings] = {}

    def prepare() -> tuple[tuple[Any, list[StoredParameter]], bool]:
        save_file, found = _safetensors().save_file, list[StoredParameter]()
        for adapter in _adapters(model, adapter_name, registry):
            names, params = _stored_parameters(adapter, model, registry)
            settings.update((name, _settings_of(adapter)) for name in names)
            found += params
        return (save_file, [*found, *_saved_parameters(model, adapter_name, registry)]), bool(settings)

    (save_file, params), have_adapters = on_all_ranks_with(prepare, registry)
    _check_any(have_adapters, adapter_name)
    tensors = dict[str, Tensor]()
    for param, spec, keys, pack, _ in params:
        full = pack(unshard(local_tensor(param), spec, registry).cpu())
        tensors.update(
            (key, part.clone(memory_format=torch.contiguous_format))
            for key, part in zip(keys, full.chunk(len(keys)), strict=True)
        )
    saved = {_without_prefix(module) for module, *_ in _saved(model, adapter_name)}
    is_first = all(
        registry.coordinate[axis] == 0 for axis in registry.topology.axes if registry.topology.role(axis) != "pipe"
    )
    by_rank = gather_objects((tensors, settings, saved) if is_first else None, registry)
    parts = [part for part in by_rank if part is not None]

    def write() -> None:
        stored = _joined([tensors for tensors, _, _ in parts])
        found = {name: values for _, settings, _ in parts for name, values in settings.items()}
        names = sorted({name for _, _, saved in parts for name in saved})
        text = json.dumps(_config(found, names, base_model), indent=2)
        if registry.global_rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for file, save in (
                (_TENSORS, lambda path: save_file(stored, path, metadata={"format": "pt"})),
                (_CONFIG, lambda path: Path(path).write_text(text + "\n")),
            ):
                path = os.path.join(folder, file)
                save(f"{path}.part")
                os.replace(f"{path}.part", path)

    on_all_ranks(write, registry)


@torch.no_grad()
def load_adapter(
    folder: str | os.PathLike[str],
    model: nn.Module,
    registry: ProcessGroupRegistry | None = None,
    *,
    adapter_name: str = "default",
) -> None:
    """Load adapters that `save_adapter` or PEFT has saved into a model on any layout. Call it on all ranks.

        adapters = add_lora(model, ["up", "head"], r=8, alpha=16)
        load_adapter("adapter", model)

    Every rank reads the files. Optimizer states are not in them; use `save_checkpoint` to continue training.

    Args:
        folder: Folder of the files.
        model: A model with adapters on the same layers, of the same rank and alpha.
        registry, adapter_name: As in `save_adapter`.
    Raises:
        ModuleNotFoundError: The package safetensors is not installed.
        FileNotFoundError: A file is missing. Ranks that have the files raise RuntimeError.
        ValueError: On every rank: the adapters of the file and of the model differ in layers, shapes or settings; an
            adapter is merged; or as in `save_adapter`. The model is unchanged in this case. If the topology has pipeline
            axes, layers that only the file has are no error.
    Collectives: an object all-gather over the world, and another one if the registry is derived from the model.
    Host synchronization: yes.
    """
    registry = registry or registry_in(model)

    def read() -> tuple[list[tuple[Tensor, Tensor]], bool]:
        stored: dict[str, Tensor] = _safetensors().load_file(os.path.join(folder, _TENSORS))
        config = json.loads(Path(folder, _CONFIG).read_text())
        params: list[StoredParameter] = []
        for adapter in (adapters := _adapters(model, adapter_name, registry)):
            if is_merged(adapter.module):
                raise ValueError(
                    f"the adapter of {adapter.name} is merged, so a later unmerge() would subtract other factors than "
                    "merge() has added; call unmerge() before load_adapter"
                )
            names, of_adapter = _stored_parameters(adapter, model, registry)
            params += of_adapter
            for name in names:
                _check_settings(name, adapter, config)
        params += _saved_parameters(model, adapter_name, registry)
        wanted = {key: None for param in params for key in param.keys}
        missing = [key for key in wanted if key not in stored]
        unused = [key for key in stored if key not in wanted]
        if missing or (unused and not registry.topology.pipe_axes):
            raise ValueError(
                f"{os.fspath(folder)} lacks {some(missing) or 'nothing'} and has {some(unused) or 'nothing'} that the "
                "model does not have; add adapters to the same layers as in the saved model"
            )
        return [_part_of(stored, param, registry) for param in params], bool(adapters)

    values, have_adapters = on_all_ranks_with(read, registry)
    _check_any(have_adapters, adapter_name)
    for param, value in values:
        local_tensor(param).copy_(value)


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "PEFT's file format needs the package safetensors; run pip install 'meshstep[lora]'"
        ) from error


def _adapters(model: nn.Module, key: str, registry: ProcessGroupRegistry) -> list[Adapter]:
    """Return the adapters with PEFT's name ``key``. Only with pipeline axes, a rank may have none."""
    found = [adapter for adapter in adapters_of(model) if adapter.key in (None, key)]
    if not registry.topology.pipe_axes:
        _check_any([bool(found)], key, f"{type(model).__name__} has no")
    return found


def _check_any(have_adapters: Iterable[bool], key: str, problem: str = "the model has on no rank an") -> None:
    if not any(have_adapters):
        raise ValueError(f"{problem} adapter named {key!r}; add adapters with add_lora, or give adapter_name=")


def _stored_parameters(
    adapter: Adapter, model: nn.Module, registry: ProcessGroupRegistry
) -> tuple[list[str], list[StoredParameter]]:
    """Return (names of the adapted layers in the dense model, factors with PEFT's names of their tensors in a file)."""
    layout = derived_layout(adapter, registry)
    if isinstance(layout, GroupedLayout):
        return _stored_factors_of_experts(adapter, layout, registry)
    names = expert_names(model, adapter.name, registry.size(*layout.stacked) if layout.stacked else 1)
    if names is None:
        raise ValueError(
            f"{adapter.name} has experts that differ between ranks along {' x '.join(layout.stacked)}, but is in no "
            "nn.ModuleList that numbers the experts; put the experts of a rank into an nn.ModuleList, or use "
            "save_checkpoint"
        )
    stored = [_without_prefix(name) for name in names]
    names = [_parameter_name(adapter, name) for name in stored]
    keys = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
    if layout.is_embedding:
        keys |= {"A": "lora_embedding_A", "B": "lora_embedding_B"}
    return names, [
        StoredParameter(
            factor.param,
            spec_of(factor.param, registry.topology),
            tuple(f"{_PREFIX}{name}.{keys[kind]}" for name in stored),
        )
        for kind, factor in adapter.factors.items()
    ]


def _stored_factors_of_experts(
    adapter: Adapter, layout: GroupedLayout, registry: ProcessGroupRegistry
) -> tuple[list[str], list[StoredParameter]]:
    """Return the result of `_stored_parameters` for the adapters of a parameter of several experts.

    PEFT nests one adapter per parameter around a module; the adapter of its last parameter is the outermost. A file has A
    as [experts * r, in], with the expert as the slower index of dim 0, and B as [out, r * experts], with the expert as the
    faster index of dim 1.
    """
    module, name, experts = adapter.module, _without_prefix(adapter.name), layout.experts
    assert isinstance(module, GroupedLoRA)
    assert adapter.parameter is not None
    outer = len(module._layouts) - 1 - [*module._layouts].index(adapter.parameter)
    prefix, r = f"{_PREFIX}{name}{'.base_layer' * outer}", module.r
    first, second = adapter.factors["A"].param, adapter.factors["B"].param
    return [f"{name}.{adapter.parameter}"], [
        StoredParameter(
            first,
            spec_of(first, registry.topology),
            (f"{prefix}.lora_A.weight",),
            lambda full: full.reshape(experts * r, -1),
            lambda stored: stored.reshape(experts, -1, stored.size(-1)),
        ),
        StoredParameter(
            second,
            spec_of(second, registry.topology),
            (f"{prefix}.lora_B.weight",),
            lambda full: full.permute(1, 2, 0).reshape(full.size(1), -1),
            lambda stored: stored.reshape(stored.size(0), -1, experts).permute(2, 0, 1),
        ),
    ]


def _parameter_name(adapter: Adapter, name: str) -> str:
    """Return the name of the adapted layer, or of the adapted parameter for PEFT's adapters of parameters."""
    parameter = getattr(adapter.module, "parameter_name", None)
    return name if parameter is None else f"{name.replace('.base_layer', '')}.{parameter}"


def _saved(model: nn.Module, key: str) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name of the module, name of the parameter in it, parameter) of PEFT's ``modules_to_save`` of an adapter."""
    for name, _, param in saved_modules(model):
        module, _, inner = name.partition(f".modules_to_save.{key}.")
        if inner:
            yield module, inner, param


def _saved_parameters(model: nn.Module, key: str, registry: ProcessGroupRegistry) -> list[StoredParameter]:
    return [
        StoredParameter(param, spec_of(param, registry.topology), (f"{_PREFIX}{_without_prefix(module)}.{inner}",))
        for module, inner, param in _saved(model, key)
    ]


def _settings_of(adapter: Adapter) -> Settings:
    module: Any = adapter.module
    key = adapter.key
    if isinstance(module, LoRA | GroupedLoRA):
        r, alpha, use_rslora, dropout = module.r, module.alpha, module.use_rslora, module.dropout
    elif key is not None:
        r, alpha, use_rslora = module.r[key], module.lora_alpha[key], module.use_rslora[key]
        dropout = getattr(module.lora_dropout[key], "p", 0.0)
    else:
        r, use_rslora, dropout = adapter.factors["A"].param.size(0), False, 0.0
        alpha = getattr(module, "alpha", r)
    return {
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "use_dora": "magnitude" in adapter.factors,
        "lora_dropout": dropout,
        "is_parameter": adapter.parameter is not None or hasattr(module, "parameter_name"),
    }


def _config(settings: Mapping[str, Settings], saved: list[str], base_model: str | None) -> dict[str, Any]:
    """Return the content of the configuration file; raise ValueError if ``use_rslora`` or ``use_dora`` differ."""
    first_name, first = next(iter(settings.items()))
    for name, values in settings.items():
        for key in ("use_rslora", "use_dora"):
            if values[key] != first[key]:
                raise ValueError(
                    f"{key} is {first[key]} for {first_name} and {values[key]} for {name}, but PEFT's configuration file "
                    f"stores one {key} for all layers; save the model with save_checkpoint instead"
                )
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "task_type": None,
        "inference_mode": True,
        **{key: first[key] for key in _SETTINGS},
        "rank_pattern": {name: values["r"] for name, values in settings.items() if values["r"] != first["r"]},
        "alpha_pattern": {
            name: values["lora_alpha"]
            for name, values in settings.items()
            if values["lora_alpha"] != first["lora_alpha"]
        },
        "target_modules": sorted(name for name, values in settings.items() if not values["is_parameter"]),
        "target_parameters": sorted(name for name, values in settings.items() if values["is_parameter"]) or None,
        "modules_to_save": saved or None,
        "lora_dropout": first["lora_dropout"],
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _check_settings(name: str, adapter: Adapter, config: Mapping[str, Any]) -> None:
    """Raise ValueError unless the `_SETTINGS` of the adapter of a layer equal those in the configuration file."""
    patterns = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
    settings = _settings_of(adapter)
    for key in _SETTINGS:
        value = settings[key]
        found: Mapping[str, Any] = config.get(patterns.get(key, ""), None) or {}
        # `save_adapter` writes full names. PEFT uses the first pattern that matches the end of the name.
        matching = (found[each] for each in found if re.match(rf"(.*\.)?({each})$", name))
        stored = found[name] if name in found else next(matching, config.get(key, False))
        if stored != value:
            argument = "alpha" if key == "lora_alpha" and adapter.key is None else key  # PEFT's argument is lora_alpha
            raise ValueError(
                f"{name} has {key}={value}, but the saved adapter has {key}={stored}; create the adapters with "
                f"{argument}={stored}"
            )


def _part_of(
    stored: Mapping[str, Tensor], stored_param: StoredParameter, registry: ProcessGroupRegistry
) -> tuple[Tensor, Tensor]:
    """Return a parameter, and this rank's shard of its full value in a file."""
    param, spec, keys, _, unpack = stored_param
    full = unpack(torch.cat([stored[key] for key in keys]))
    value = shard(full, spec, registry, uneven=True)
    if value.shape != local_tensor(param).shape:
        raise ValueError(
            f"{keys[0]} has shape {tuple(stored[keys[0]].shape)} in the file, which gives this rank a shard of shape "
            f"{tuple(value.shape)}, but its parameter has shape {tuple(local_tensor(param).shape)}; create the adapters "
            "with the r of the file, in a model with the sizes of the saved model"
        )
    return param, value


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the union of the tensors of all pipeline stages."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for key, tensor in part.items():
            if key in found and not torch.equal(found[key], tensor):
                raise ValueError(
                    f"two pipeline stages have different tensors named {key.removeprefix(_PREFIX)}; name the layers of "
                    "each stage as in the dense model, or save the adapters with save_checkpoint"
                )
            found[key] = tensor
    return found


def _without_prefix(name: str) -> str:
    return name.removeprefix(_PREFIX)
