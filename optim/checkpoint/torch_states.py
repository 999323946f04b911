"""`TorchStates`: optimizer states of sharded parameters as DTensors, for `torch.distributed.checkpoint.state_dict`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.interop.local_parameters import has_dtensors, local_parameter
from ...parallel.layout.shard import Region
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import check_all_say_the_same, gather_objects, on_all_ranks, on_all_ranks_with
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.value_checks import anything, dict_of, fields, list_of
from ..build import check_is_parallel
from ..norm.param_table import SteppedTensor
from ..norm.plan import ParameterEntry
from ..parallel_optimizer import ParallelOptimizer
from ..states.masters import SplitMasters
from ..step.wrapped_optimizer import own_calls, parts_of
from .contents import find_master_weights, is_scalar, portable_entries

# States of one parameter as DTensors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterStates:
    """A model parameter, and the shards of it that this rank's optimizer steps.

    ``local`` is ``param``, or its local tensor if it is a DTensor. ``held`` has (position in the param groups, stepped
    tensor) for each shard of ``local`` that this rank steps. ``sharded_over`` are the mesh axes over which `Sharded`
    (ZeRO) divides ``local`` into shards; None: no axes.
    """

    registry: ProcessGroupRegistry
    param: Tensor
    local: Tensor
    entry: ParameterEntry
    held: list[tuple[int, SteppedTensor]]
    sharded_over: tuple[str, ...] | None

    def spec_and_region(self) -> tuple[P, Region]:
        """Return the layout of a state as a DTensor, and this rank's region of it.

        With `Sharded`, unless the parameter is 0-dim, the DTensor is sharded by rows over the axes of `Sharded`, in
        addition to the parameter's layout. Raise ValueError if a DTensor does not support the layout, or the full shape
        is unknown.
        """
        entry, registry = self.entry, self.registry
        if entry.full_shape is None:
            raise ValueError(
                f"{entry.name} has shards of unequal sizes, so its full shape is unknown; make each sharded dim divisible "
                "by the product of the sizes of its mesh axes, or give annotate(..., full_shape=...)"
            )
        if entry.spec.blocks:
            raise ValueError(
                f"{entry.name}: a DTensor does not support sharded blocks, as in {entry.spec}; use save_checkpoint"
            )
        if any(isinstance(at, str) for _, at in entry.spec.owned):
            raise ValueError(
                f"{entry.name}: a DTensor does not support owned={{axis: axis}}, as in {entry.spec}; use save_checkpoint"
            )
        if self.sharded_over is None or not entry.shape:
            return entry.spec, self._region()
        dims = [entry.spec.joint_dim_axes(dim) for dim in range(len(entry.shape))]
        spec = P((*dims[0], self.sharded_over), *dims[1:])
        rows = -(-entry.shape[0] // registry.size(*self.sharded_over))
        first = min(registry.rank(*self.sharded_over) * rows, entry.shape[0])
        shape = (min(rows, entry.shape[0] - first), *entry.shape[1:])
        where = registry.topology, registry.coordinate
        return spec, Region.of_shard(entry.full_shape, shape, spec, *where, entry.name)

    def whole(self, pieces: list[tuple[SteppedTensor, Any]]) -> Tensor:
        """Return one optimizer state of the parameter, as a DTensor of the full shape.

        If the state is not sharded over axes larger than 1, return a plain tensor. ``pieces`` has (stepped tensor, its
        state) for each shard that this rank steps. It may be empty with `Sharded` only.

        Collectives: with `Sharded`, an object all-gather and an all-reduce over its axes.
        """
        from torch.distributed.tensor import DTensor, Shard

        spec, region = self.spec_and_region()
        if self.sharded_over is None:
            local: Tensor = pieces[0][1].detach()
        else:
            local = self._combine_shards({piece.offset: value for piece, value in pieces}).view(self.entry.shape)
            if self.entry.shape:
                local = local.narrow(0, self._first_row(region), region.shape[0]).clone()
        axes = self._cut_axes(spec)
        if not axes:
            return local
        stride = torch.empty(region.full_shape, device="meta").stride()
        return DTensor.from_local(
            local.contiguous(),
            self.registry.device_mesh(*axes),
            [Shard(dim) for dim in axes.values()],
            run_check=False,
            shape=torch.Size(region.full_shape),
            stride=stride,
        )

    def _cut_axes(self, spec: P) -> dict[tuple[str, ...], int]:
        """Return {mesh axes: tensor dim that they shard}, without axes of size 1. Items are dims of the DTensor's mesh."""
        dims = {axes: dim for dim in range(len(self.entry.shape)) for axes in spec.joint_dim_axes(dim)}
        return {axes: dim for axes, dim in dims.items() if self.registry.size(*axes) > 1}

    def _first_row(self, region: Region) -> int:
        """Return the index of the first row of ``region`` in this rank's local tensor; 0 for an empty region."""
        return region.offsets[0] - self._region().offsets[0] if region.numel else 0

    def _region(self) -> Region:
        region = self.entry.region(self.registry.topology, self.registry.coordinate)
        assert region is not None
        return region

    def _combine_shards(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Return a state of the entire local tensor, flattened, from the shards on all ranks of the axes of `Sharded`.

        The elements are bitwise equal to the shards' elements. ``parts`` are this rank's shards, by the shard's offset
        in the flattened local tensor.

        Collectives: an object all-gather and an all-reduce over the axes of `Sharded`.
        Host synchronization: yes.
        """
        assert self.sharded_over is not None
        group = self.registry.group(*self.sharded_over)
        dtypes: list[Any] = [None] * self.registry.size(*self.sharded_over)
        dist.all_gather_object(dtypes, next((part.dtype for part in parts.values()), None), group=group)
        dtype = next(found for found in dtypes if found is not None)
        flat = torch.zeros(self.local.numel(), dtype=dtype, device=self.registry.device)
        for offset, part in parts.items():
            flat[offset : offset + part.numel()].copy_(part.reshape(-1))
        dist.all_reduce(flat.view(torch.uint8), group=group)  # exact, because all ranks except one add zeros
        return flat

    def local_part(self, value: Tensor) -> Tensor:
        """Return the part of a saved state that belongs to this rank's local tensor of the parameter.

        Collectives: if ``value`` is a DTensor of another layout, those of ``value.full_tensor()``. If it is a DTensor
            of the same layout, and `Sharded` is used, an object all-gather and an all-reduce over the axes of `Sharded`.
            Otherwise none.
        """
        if not has_dtensors((value,)):
            return value if value.shape == self.entry.shape else self._shard_of(value)
        from torch.distributed.tensor import DTensor, Shard

        assert isinstance(value, DTensor)
        spec, region = self.spec_and_region()
        axes = self._cut_axes(spec)
        # All ranks must take the same branch. So mesh and placements are compared, not shapes, which may match on some
        # ranks only.
        same = axes and value.device_mesh == self.registry.device_mesh(*axes)
        if not same or list(value.placements) != [Shard(dim) for dim in axes.values()]:
            return self._shard_of(value.full_tensor())
        rows = value._local_tensor
        if self.sharded_over is None:
            return rows
        parts = {self._first_row(region) * (rows.numel() // region.shape[0]): rows} if region.numel else {}
        return self._combine_shards(parts).view(self.entry.shape)

    def _shard_of(self, full: Tensor) -> Tensor:
        region = self._region()
        if tuple(full.shape) != tuple(region.full_shape):
            raise ValueError(
                f"a saved state of {self.entry.name} has shape {tuple(full.shape)}, but the parameter has shape "
                f"{tuple(region.full_shape)}; give the state of a run of the same model"
            )
        return region.of(full)


# The adapter ----------------------------------------------------------------------------------------------------------

_OWN = "meshstep/"  # prefix of meshstep's entries in a param group
_CHECK_STATE = fields(
    {
        "state": dict_of(dict_of(anything), key=anything),
        "param_groups": list_of(fields({"params": list_of(anything)})),
    }
)
# The clipping rule's state is one JSON text, because torch's flattened state dict repeats each entry of a param group for
# every parameter.
_CLIP = _OWN + "clip"


class TorchStates(torch.optim.Optimizer):
    """Adapter of a `ParallelOptimizer`: an optimizer to pass to `torch.distributed.checkpoint.state_dict`.

        states = TorchStates(optimizer)
        saved = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, states)}
        dcp.save(saved, checkpoint_id=path)
        ...
        dcp.load(saved, checkpoint_id=path)
        set_optimizer_state_dict(model, states, saved["optim"])

    Optimizer states and master weights (state ``"master"``) of sharded parameters become DTensors of the full shape, so
    that they can be loaded in another layout. This holds for parameters that are sharded by a declaration, by
    `fully_shard` or by `Sharded`. The weights of the model do not go through this class. If only a declaration shards a
    weight, it is a plain tensor, and torch.distributed.checkpoint (DCP) saves one rank's shard only: use
    `save_checkpoint`. The loss scale, the numbers of skipped steps and similar values become numbers in the param
    groups. The state of a clipping rule becomes a text there. If the optimizer has no states yet, the constructor
    creates its initial states.

    Args:
        optimizer: The optimizer. Keep its registry open while you use this object. Create a new `TorchStates` after
            `add_param_group`.
    Raises:
        TypeError: ``optimizer`` is not a `ParallelOptimizer`.
    Collectives: an object all-gather in the constructor. If a full-tensor optimizer, such as `Muon`, has no states yet,
        the constructor also runs the collectives of one step.
    Memory: with `Sharded`, one more state tensor of the parameter's local shape.
    Host synchronization: yes.
    """

    def __init__(self, optimizer: ParallelOptimizer) -> None:
        # super().__init__ is not called: param groups and state are properties, computed from the ParallelOptimizer.
        check_is_parallel(optimizer)
        self._optimizer, self.registry = optimizer, optimizer.registry
        self._parameters = self._parameters_by_group()
        if not optimizer.state:
            self._make_states()
        self._keys = self._gather_keys()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return copies of the param groups, with the model's parameters and extra entries such as the loss scale."""
        own: dict[str, Any] = {f"{_OWN}{name}": value for name, value in _numbers(self._rest())}
        if self._optimizer.clip is not None and self._optimizer.clip.initial():
            own[_CLIP] = json.dumps(self._optimizer.state_dict()["meshstep"]["clip"])
        groups = []
        for group, items in zip(self._optimizer.param_groups, self._parameters, strict=True):
            names = {"param_names": [item.entry.name for item in items]} if "param_names" in group else {}
            groups.append({**group, "params": [item.param for item in items], **names, **own})
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return {parameter: {name of a state: None}} for the parameters that have states."""
        names = [(item.param, self._keys.get(item.entry.name, ())) for group in self._parameters for item in group]
        return {param: dict.fromkeys(keys) for param, keys in names if keys}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. torch's state-dict functions call it after they set gradients to create states."""
        self._optimizer.transforms.clear(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Do nothing, because the constructor has created initial states if the optimizer has any.

        torch's state-dict functions call it to create states if `state` is empty.
        """

    # Locations of states ----------------------------------------------------------------------------------------------

    def _parameters_by_group(self) -> list[list[ParameterStates]]:
        optimizer = self._optimizer
        transforms = optimizer.transforms.transforms
        held: dict[int, list[tuple[int, SteppedTensor]]] = {}
        for position, row in enumerate(optimizer.stepped_tensors()):
            held.setdefault(id(row.param), []).append((position, row))
        entries = iter(optimizer.model_plan.entries)

        def one(param: Tensor) -> ParameterStates:
            local = local_parameter(param)
            cut = next((axes for transform in transforms if (axes := transform.sharded_over(local))), None)
            return ParameterStates(self.registry, param, local, next(entries), held.get(id(local), []), cut)

        return [[one(param) for param in group] for group in optimizer.model_param_groups]

    def _make_states(self) -> None:
        """Create initial optimizer states by a step with zero gradients at learning rate 0; then reset changed states."""
        inner = self._optimizer.optimizer
        stepped = [param for group in inner.param_groups for param in group["params"]]
        kept = [(param, param.grad) for param in stepped]
        rates = [(group, group["lr"]) for group in inner.param_groups]
        for param in stepped:
            if param.requires_grad:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype or param.dtype)
        for group in inner.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        split = next(
            (transform for transform in self._optimizer.transforms.transforms if isinstance(transform, SplitMasters)),
            None,
        )
        with own_calls:
            if split is None:
                inner.step()
            else:
                split.step_as_masters(inner.step)
        for group, rate in rates:
            group["lr"] = rate
        for param, grad in kept:
            param.grad = grad
        for part in parts_of(inner):
            for group in part.param_groups:
                for param in group["params"]:
                    for key, value in part.state.get(param, {}).items():
                        if key in ("step", "mu_product"):
                            value.fill_(0 if key == "step" else 1)
                        elif key in ("eta", "step_size"):  # states of ASGD and Rprop, initially the learning rate
                            value.fill_(float(group["lr"]))

    def _gather_keys(self) -> dict[str, list[str]]:
        """Return, for each parameter of this rank, the names of the states that any rank has for it.

        Collectives: an object all-gather.
        """
        own = self._own_states()
        mine = {item.entry.name: sorted(values) for item, values in own}
        found: dict[str, set[str]] = {}
        for keys in gather_objects(mine, self.registry):
            for name, names in keys.items():
                found.setdefault(name, set()).update(names)
        return {item.entry.name: sorted(found[item.entry.name]) for item, _ in own}

    def _own_states(self) -> list[tuple[ParameterStates, dict[str, list[tuple[SteppedTensor, Any]]]]]:
        """Return (parameter, its states on this rank) pairs.

        The states of a parameter are lists of (shard, value), by name of the state. Master weights are included as states
        with the name "master".
        """
        state = self._optimizer.state_dict()
        masters = find_master_weights(state["meshstep"]["weights"])
        result = []
        for item in (item for group in self._parameters for item in group):
            values: dict[str, list[tuple[SteppedTensor, Any]]] = {}
            for position, piece in item.held:
                own = dict(state["state"].get(position, {}))
                if position in masters:
                    own["master"] = masters[position].detach()
                for key, value in own.items():
                    values.setdefault(key, []).append((piece, value))
            result.append((item, values))
        return result

    def _rest(self) -> dict[str, Any]:
        """Return the loss scale, the numbers of skipped steps, and layout-independent entries about the weights."""
        own = self._optimizer.state_dict()["meshstep"]
        kept = {key: own[key] for key in ("loss_scale", "skipped_steps", "vetoed_steps")}
        return {**kept, "weights": portable_entries(own["weights"])}

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's optimizers, with states of sharded parameters as DTensors.

        Raises:
            ValueError: On every rank: shards of a parameter have unequal sizes that are not declared. Or a DTensor does
                not support the layout of a parameter (sharded blocks, shards on a diagonal). Or a state is neither a
                number nor of the shard's shape. Or a number differs between shards. `save_checkpoint` supports all cases
                except the first.
        Collectives: object all-gathers. With `Sharded`, also an object all-gather and an all-reduce per state.
        Host synchronization: yes.
        """
        own = self._own_states()
        numbers = on_all_ranks(lambda: self._check(own), self.registry)
        known: dict[str, dict[str, Any]] = {}
        for found in gather_objects(numbers, self.registry):
            for name, values in found.items():
                for key, value in values.items():
                    if known.setdefault(name, {}).setdefault(key, value) != value:
                        raise ValueError(
                            f"the optimizer state {key!r} of {name} is {known[name][key]} on one rank and {value} on "
                            "another rank, but must be one number for the full parameter: use "
                            "meshstep.optim.save_checkpoint"
                        )
        state: dict[int, dict[str, Any]] = {}
        for position, (item, values) in enumerate(own):
            kept, own_numbers = {}, known.get(item.entry.name, {})
            for key in self._keys[item.entry.name]:
                if key in own_numbers:
                    number = own_numbers[key]
                    kept[key] = torch.tensor(number) if isinstance(number, float) else number
                elif key in values or item.sharded_over is not None:
                    kept[key] = item.whole(values.get(key, []))
            if kept:
                state[position] = kept
        groups, first = [], 0
        for group in self.param_groups:
            past = first + len(group["params"])
            groups.append({**group, "params": list(range(first, past))})
            first = past
        return {"state": state, "param_groups": groups}

    def _check(
        self, own: list[tuple[ParameterStates, dict[str, list[tuple[SteppedTensor, Any]]]]]
    ) -> dict[str, dict[str, Any]]:
        """Return the states that are numbers, by parameter and name; raise ValueError if a state can't be resharded."""
        numbers: dict[str, dict[str, Any]] = {}
        for item, values in own:
            if values:
                item.spec_and_region()
            for key, (piece, value) in ((key, pair) for key, pairs in values.items() for pair in pairs):
                if not isinstance(value, Tensor) or is_scalar(key, value, piece.tensor.dim()):
                    kept = value.double().item() if isinstance(value, Tensor) else value
                    if numbers.setdefault(item.entry.name, {}).setdefault(key, kept) != kept:
                        first = numbers[item.entry.name][key]
                        raise ValueError(
                            f"the optimizer state {key!r} of {item.entry.name} is {first} for one shard and {kept} for "
                            "another shard of this rank, but must be one number for the full parameter: use "
                            "meshstep.optim.save_checkpoint"
                        )
                elif value.shape != piece.tensor.shape:
                    raise ValueError(
                        f"the optimizer state {key!r} of {item.entry.name} has shape {tuple(value.shape)}, but the "
                        f"tensor that the optimizer steps on this rank has shape {tuple(piece.tensor.shape)}: only "
                        "numbers and states of the same shape can be resharded; use save_checkpoint"
                    )
        return numbers

    # Loading ----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` into the `ParallelOptimizer`. It may come from another layout.

        Raises:
            ValueError: On every rank: the state has other param groups, or other states of a parameter, such as missing
                master weights. Or a state has another shape, or its layout differs between ranks. Or a number, such as
                the loss scale, is missing or wrong, or the text of a clipping rule is wrong. The classes of the
                optimizers are not compared.
        Collectives: object all-gathers, and all-gathers of DTensors of another layout. With `Sharded`, also an object
            all-gather and an all-reduce per state, and all-gathers of the weights that are written to the model.
        Host synchronization: yes.
        """

        def read() -> tuple[list[tuple[ParameterStates, Mapping[str, Any]]], dict[str, str]]:
            found = self._saved_states(state_dict)
            return found, self._saved_layouts(found)

        saved_states, layouts = on_all_ranks_with(read, self.registry)
        check_all_say_the_same(layouts)
        state: dict[int, dict[str, Any]] = {}
        masters: dict[int, Tensor] = {}
        error: Exception | None = None
        for item, saved in saved_states:
            for key in (key for key in self._keys[item.entry.name] if key in saved):
                try:
                    parts = dict(self._parts(item, key, saved[key]))
                except Exception as caught:  # raised below, because the other ranks wait in collectives of later states
                    error = error or caught
                    continue
                for position, value in parts.items():
                    if key == "master":
                        masters[position] = value
                    else:
                        state.setdefault(position, {})[key] = value
        inner = self._optimizer.state_dict()
        groups = [
            {
                **now,
                **{key: value for key, value in saved.items() if key in now and key not in ("params", "param_names")},
            }
            for now, saved in zip(inner["param_groups"], state_dict["param_groups"], strict=True)
        ]

        def read_rest() -> dict[str, Any]:
            if error is not None:
                raise error
            return self._saved_rest(state_dict)

        rest = on_all_ranks(read_rest, self.registry)
        weights = {**inner["meshstep"]["weights"], **rest.pop("weights")}
        if masters:
            weights["masters"] = masters
        before = {key: value for key, value in inner["meshstep"].items() if key != "clip"}
        self._optimizer.load_state_dict(
            {"state": state, "param_groups": groups, "meshstep": {**before, **rest, "weights": weights}}
        )

    def _saved_rest(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved loss scale, numbers of skipped steps and similar values; raise ValueError if one is wrong."""
        numbers = {
            key[len(_OWN) :]: value for key, value in state_dict["param_groups"][0].items() if key.startswith(_OWN)
        }
        clip = numbers.pop(_CLIP[len(_OWN) :], None)
        try:
            rest = _with_numbers(self._rest(), numbers)
            return rest if clip is None else {**rest, "clip": json.loads(clip)}
        except (TypeError, RecursionError, json.JSONDecodeError) as problem:
            raise ValueError(
                f"the state has {_CLIP}={clip!r:.80}, which is not valid JSON ({problem}); give the result of state_dict()"
            ) from None

    def _saved_states(self, state_dict: Mapping[str, Any]) -> list[tuple[ParameterStates, Mapping[str, Any]]]:
        """Return (parameter, its saved states by name) pairs; raise ValueError if they don't fit this optimizer."""
        _CHECK_STATE(state_dict, "the state")
        items = [item for group in self._parameters for item in group]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        if lengths != [len(group) for group in self._parameters] or len(names) != len(items):
            raise ValueError(
                f"the param groups of the state have {lengths} parameters, but the param groups of this optimizer have "
                f"{[len(group) for group in self._parameters]}; create the optimizer with the saved param groups"
            )
        found = [(item, state_dict["state"].get(name, {})) for item, name in zip(items, names, strict=True)]
        for item, saved in found:
            if saved and set(self._keys[item.entry.name]) != set(saved):
                raise ValueError(
                    f"the state has {', '.join(sorted(saved))} of {item.entry.name}, but this optimizer has "
                    f"{', '.join(sorted(self._keys[item.entry.name])) or 'no states'}: use the optimizer and the precision "
                    "mode of the saved run"
                )
        return found

    def _saved_layouts(self, found: list[tuple[ParameterStates, Mapping[str, Any]]]) -> dict[str, str]:
        """Return texts with the placements of saved states that are DTensors, by name of the state.

        Ranks compare these texts, because the collectives in `_parts` depend on them.
        """
        layouts = {}
        for item, saved in found:
            for key in self._keys[item.entry.name]:
                name = f"{key} of {item.entry.name}"
                if key in saved:
                    value = saved[key]
                    layouts[name] = f"a DTensor of {value.placements}" if has_dtensors((value,)) else "no DTensor"
                elif item.sharded_over is not None:
                    layouts[name] = "missing"
        return layouts

    def _parts(self, item: ParameterStates, key: str, value: Any) -> Iterator[tuple[int, Any]]:
        """Yield (position in the param groups, part of the saved state ``value``) for each shard that this rank steps."""
        if not isinstance(value, Tensor) or is_scalar(key, value, item.local.dim()):
            for position, _ in item.held:
                yield position, value.clone() if isinstance(value, Tensor) else value
            return
        local = item.local_part(value)
        for position, piece in item.held:
            part = local.reshape(-1)[piece.offset : piece.offset + piece.tensor.numel()]
            yield position, part.view(piece.tensor.shape).clone()


def _numbers(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{before}{key}", value


def _with_numbers(content: Mapping[str, Any], numbers: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return a copy of the nested dict ``content``, with each number replaced by the number in ``numbers``.

    ``numbers`` are numbers or tensors by path in ``content``: the keys joined by "/". ``before`` is the path of
    ``content`` in the outermost dict, ending in "/". Raise ValueError if a number is missing, or a value is not a
    number.
    """
    result: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            result[key] = _with_numbers(value, numbers, f"{before}{key}/")
        elif isinstance(value, (int, float)):
            if f"{before}{key}" not in numbers:
                raise ValueError(
                    f"the state has no entry {_OWN}{before}{key}, so it was saved in another precision mode, or without "
                    "TorchStates: continue in the precision mode of the saved run, or give the state_dict() of a "
                    "TorchStates"
                )
            found = numbers[f"{before}{key}"]
            try:
                result[key] = type(value)(found.item() if isinstance(found, Tensor) else found)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise ValueError(
                    f"the state has {_OWN}{before}{key}={found!r:.80}, which is not a number; give the result of "
                    "state_dict()"
                ) from None
        else:
            result[key] = value
    return result
