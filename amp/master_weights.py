"""Float32 master weights and main gradients for the half-precision parameters of an optimizer.

A half-precision weight loses updates below half a unit in the last place: bfloat16 has 8 significant bits, so 1 + 0.003
is 1. Likewise a sum of gradients loses small micro-batch gradients. The optimizer therefore updates a float32 copy of
the weight, the *master*, and gradients accumulate in float32, in the *main gradient*.

Reference: Micikevicius et al. 2017, "Mixed precision training", arXiv:1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.layout.annotation import copy_annotation, label_of
from ..parallel.mesh.deprecation import renamed_members
from ..parallel.mesh.value_checks import wrong
from .casting import copy_each_, float32_of, has_equal_values, is_half

_COLLECTED = "_meshstep_collected"


@renamed_members(publish="write_back")
class MasterWeights:
    """Float32 masters that replace half-precision parameters in an optimizer's param groups.

        masters = MasterWeights(optimizer)      # the optimizer's param groups now hold the masters
        loss.backward()                         # gradients accumulate in float32
        masters.collect()                       # master.grad is the model parameter's main gradient
        masters.step(optimizer.step)            # steps the masters, rounds them into the model
        masters.zero_grad()

    A master takes its parameter's position in the param groups, so ``param_names`` stay correct. It gets the
    parameter's annotation and optimizer state, in float32. Parameters of other dtypes are unchanged, so mixed models
    work, for example with batch norm in float32. A parameter that the model uses twice has one master. Frozen
    half-precision parameters get no master and no memory; call `refresh` after you unfreeze some.

    Memory per element of a half-precision parameter: 4 bytes for the master, and 4 bytes instead of 2 for the gradient.

    Args:
        optimizer: Any torch optimizer; it may already have stepped. Its param groups and state are changed in place.
            Add param groups with `MasterWeights.add_param_group`.
        main_grads: If True, backward accumulates in float32 (`Tensor.grad_dtype`). Pass False if other code reduces the
            gradients in the parameters' dtype, as `DistributedDataParallel` does ("Expected BFloat16, got Float").
            `collect` then casts the gradients, and accumulation over micro-batches rounds to half precision. Default:
            True.
        cast: If False, and ``main_grads`` is False, masters get the half-precision gradients without a cast, for an
            update that reads half precision. Code that writes to these gradients must cast them first. Default: True.

    Attributes:
        pairs: List of (model parameter, master), in the order in which the masters were created.
        param_of: Dict from each master to its model parameter.
    Collectives: none, in any method.
    Host synchronization: none, except in `find_overwritten`, and in `collect` if a weight was written since the last step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, main_grads: bool = True, cast: bool = True) -> None:
        self.optimizer, self.main_grads, self.cast = optimizer, main_grads, cast
        self.pairs: list[tuple[Tensor, nn.Parameter]] = []
        self._frozen: list[Tensor] = []
        self._versions: dict[Tensor, int] = {}  # version counters of parameters and masters after the last step
        self._addresses: list[int] = []  # memory addresses of the parameters in `pairs`
        self.param_of: dict[Tensor, Tensor] = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> int:
        """Create masters for half-precision parameters in the param groups that require gradients and have no master.

        Returns:
            The number of new masters. If it is not 0, lists of the optimizer's parameters that your code stores are
            outdated, because masters have replaced parameters in the param groups.
        """
        made: dict[Tensor, nn.Parameter] = {}
        for group in self.optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if is_half(param) and param.requires_grad:
                    if param not in made:
                        made[param] = self._make_master(param)
                    group["params"][index] = made[param]
        self.pairs += made.items()
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._frozen = [param for param in params if is_half(param)]
        self.param_of |= {master: param for param, master in made.items()}
        self._addresses += [param.data_ptr() for param in made]
        self._record_versions(made.items())
        return len(made)

    def _make_master(self, param: Tensor) -> nn.Parameter:
        master = nn.Parameter(param.detach().float())
        copy_annotation(param, master)
        if param in self.optimizer.state:
            state = self.optimizer.state.pop(param)
            self.optimizer.state[master] = {
                key: value.float() if isinstance(value, Tensor) and is_half(value) else value
                for key, value in state.items()
            }
        if self.main_grads:
            use_main_grad_(param)
        elif not self.cast:
            master.grad_dtype = None  # accepts any dtype
        return master

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer, and create masters for its half-precision parameters.

        Args:
            param_group: As in ``torch.optim.Optimizer.add_param_group``.
        Raises:
            ValueError: A parameter is already in the optimizer; nothing is changed.
        """
        self.optimizer.add_param_group(param_group)
        ids = {id(param) for param, _ in self.pairs}
        duplicate = next((param for param in self.optimizer.param_groups[-1]["params"] if id(param) in ids), None)
        if duplicate is not None:
            del self.optimizer.param_groups[-1]
            raise ValueError(
                f"{label_of(duplicate)} already has a master in this optimizer; leave it out of the new param group"
            )
        self.refresh()

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self) -> None:
        """Set ``master.grad`` of each master from the gradient of its parameter.

        With ``main_grads`` it is the parameter's main gradient itself. Otherwise it is a float32 copy of the parameter's
        gradient, or, with ``cast=False``, the parameter's half-precision gradient itself. If the parameter has no
        gradient, the master loses the gradient of an earlier `collect`, and keeps a gradient that other code has set.

        Raises:
            RuntimeError: The model's weights changed since the last step, and the next step would undo the change. Or
                only the optimizer's ``zero_grad`` was called, so the parameters' gradients still contain the gradients of
                an earlier step. Or a frozen parameter without master has a gradient. No gradient is changed.
        """
        self._check_weights()
        for param in self._frozen:
            if param.grad is not None:
                raise RuntimeError(
                    f"{label_of(param)} has a gradient, but was frozen when the masters were created; call refresh() "
                    "after unfreezing"
                )
        for param, master in self.pairs:
            if master.grad is None and hasattr(param.grad, _COLLECTED):
                raise RuntimeError(
                    f"the gradient of {label_of(param)} still contains the gradient of an earlier step, because the "
                    "optimizer's zero_grad() clears only the masters' gradients; call MasterWeights.zero_grad() instead"
                )
        gradients = {param: param.grad for param, _ in self.pairs if param.grad is not None}
        cast: dict[Tensor, Tensor] = {}
        if self.cast and not self.main_grads:
            halves = [param for param, grad in gradients.items() if is_half(grad) and grad.layout is torch.strided]
            cast = dict(zip(halves, float32_of([gradients[param] for param in halves]), strict=True))
        for param, master in self.pairs:
            grad = gradients.get(param)
            if grad is not None:
                setattr(grad, _COLLECTED, True)
                value = cast.get(param, grad)
                master.grad = value.float() if self.cast else value
                setattr(master.grad, _COLLECTED, True)
            elif hasattr(master.grad, _COLLECTED):  # keeps a gradient that was assigned to the master directly
                master.grad = None

    def step(self, update: Callable[[], object]) -> None:
        """Call ``update``, then `write_back`.

        Args:
            update: Steps the optimizer or skips the step; takes no arguments.
        """
        update()
        self.write_back()

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """Return (model parameter, master) for each master that is in the param groups now.

        During a step that updates one bucket at a time, the param groups contain only the masters of one bucket.
        """
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return [(self.param_of[param], param) for param in params if param in self.param_of]

    @torch.no_grad()
    def write_back(self, written: Sequence[Tensor] = ()) -> None:
        """Round the masters in the param groups into the model's parameters, with multi-tensor copies.

        Call it after skipped steps too: an unchanged master leaves its parameter unchanged, unless other code wrote it.

        Args:
            written: Model parameters that already contain their rounded masters. Default: none.
        """
        held, done = self.held(), {id(param) for param in written}
        late = [pair for pair in held if id(pair[0]) not in done] if done else held
        if late:
            params, masters = zip(*late, strict=True)
            copy_each_(params, masters)
        self._record_versions(held)

    @torch.no_grad()
    def reload_from_model(self) -> None:
        """Set the masters to the values of the model's parameters. Call it after you load or change these parameters."""
        if self.pairs:
            params, masters = zip(*self.pairs, strict=True)
            copy_each_(masters, params)
        self._record_versions(self.pairs)
        self._addresses = [param.data_ptr() for param, _ in self.pairs]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer's parameters, the masters and their model parameters.

        Args:
            set_to_none: If True, set the gradients to None; if False, fill them with zeros. Default: True.
        """
        self.optimizer.zero_grad(set_to_none)
        for param, _ in self.pairs:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def _record_versions(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._versions |= {tensor: tensor._version for pair in pairs for tensor in pair}

    @torch.no_grad()
    def find_overwritten(self) -> Tensor | None:
        """Return the first parameter that differs from its rounded master, or None.

        A write to the parameter causes such a difference, for example through ``.data``. The method ignores masters
        that other code has written after the last step, because the next step copies them into the model.

        Host synchronization: one per master.
        """
        for param, master in self.held():
            if master._version == self._versions[master] and not has_equal_values(param, master):
                return param
        return None

    def _check_weights(self) -> None:
        """Raise RuntimeError if a parameter differs from its rounded master because the model's weights were written.

        A write through ``.data`` is detected only if it changes the parameter's memory address; see `find_overwritten`.
        """
        addresses = [param.data_ptr() for param, _ in self.pairs]
        moved = addresses != self._addresses
        for index, (param, master) in enumerate(self.pairs):
            if param._version != self._versions[param] or (moved and addresses[index] != self._addresses[index]):
                if not torch.equal(param, master.to(param.dtype)):
                    raise RuntimeError(
                        f"{label_of(param)} was changed since the last step, and the next step would restore the master's "
                        "old weights; call reload_from_model() after loading or changing the model's weights"
                    )
                self._versions[param] = param._version  # written with equal values
        self._addresses = addresses

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"masters": {position: float32 tensor}}``. The tensors are the masters themselves, not copies.

        A position is the index of the master in the optimizer's state dict.
        """
        return {"masters": {position: master.detach() for position, master in self._masters_by_position().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy saved masters into the masters, and round them into the model's parameters.

        To continue from a state that a mode without masters saved, load the model's weights and call `reload_from_model`
        instead. The masters are then the float32 values of the weights.

        Args:
            state: A dict with the entry that `state_dict` returns; other entries are ignored.
        Raises:
            ValueError: The state has no masters, their positions or shapes differ, or one is not a floating-point tensor.
                The masters are unchanged.
        """
        masters = self._masters_by_position()
        saved = check_saved(state, masters)
        for position, master in masters.items():
            master.copy_(saved[position])
        self.write_back()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise the ValueError that `load_state_dict` would raise, without changing anything."""
        check_saved(state, self._masters_by_position())

    def _masters_by_position(self) -> dict[int, nn.Parameter]:
        ids = {id(master): master for _, master in self.pairs}
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {position: ids[id(param)] for position, param in enumerate(params) if id(param) in ids}


def check_saved(state: Mapping[str, Any], masters: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Return the saved masters in ``state`` by position, after checking them.

    Args:
        state: The saved dict.
        masters: The masters of this optimizer by position, into which the state will be loaded.
    Raises:
        ValueError: The state has no masters, or their positions or shapes differ from ``masters``, or a value is not a
            floating-point tensor.
    """
    saved: Mapping[int, Tensor] | None = state.get("masters")
    if saved is not None and not isinstance(saved, Mapping):
        raise wrong("masters", saved, "a dict")
    if saved is None:
        raise ValueError(
            "the state has no master weights, because a mode without masters saved it; load it in that mode, or load the "
            "model's weights, call reload_from_model() and load only the optimizer's own state"
        )
    if saved.keys() != masters.keys():
        raise ValueError(
            f"the state has {len(saved)} masters, at positions {_shorten(saved)}, but the optimizer has {len(masters)} "
            f"masters, at positions {_shorten(masters)}; build the param groups and the precision mode of the saved state"
        )
    for position, master in masters.items():
        if not isinstance(saved[position], Tensor) or not saved[position].is_floating_point():
            raise wrong(f"master {position}", saved[position], "a tensor of floats")
        if saved[position].shape != master.shape:
            raise ValueError(
                f"the saved master {position} has shape {tuple(saved[position].shape)}, but {label_of(master)} has shape "
                f"{tuple(master.shape)}; load the state on the topology and rank that saved it"
            )
    return saved


def use_main_grad_(param: Tensor) -> None:
    """Make backward accumulate ``param.grad`` in float32. An existing gradient is cast to float32."""
    grad, param.grad = param.grad, None
    param.grad_dtype = torch.float32
    param.grad = None if grad is None else grad.float()


def _shorten(positions: Mapping[int, object]) -> str:
    shown = ", ".join(map(str, list(positions)[:5]))
    return shown + (", ..." if len(positions) > 5 else "") or "none"


# Optimizer states: tensors with one value per element, and numbers that all elements share ----------------------------

SCALAR_STATE = ("step", "mu", "mu_product", "eta")  # states of torch's optimizers with one number per parameter


def is_half_kept(key: str, value: Any, param: Tensor) -> bool:
    """Return True if an optimizer state may be stored in half precision: a float tensor that is not a shared number.

    A number that all elements of a parameter share, such as a step count, must not be rounded, because the rounding error
    would affect all elements equally. Such a number has a key in `SCALAR_STATE`, or is 0-dim although its parameter is not.

    Args:
        key: The key of the state.
        value: The value of the state.
        param: The parameter to which the state belongs.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or key in SCALAR_STATE:
        return False
    return value.dim() > 0 or param.dim() == 0


def load_shared_numbers_exactly(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.load_state_dict`` keep the dtype of `SCALAR_STATE` entries.

    torch casts all these entries except ``"step"`` to the dtype of the parameter. This function undoes such casts: the
    entry gets its saved dtype, or float32 if a half-precision value was cast.
    """
    _load_uncast(optimizer, lambda key, value, param: key in SCALAR_STATE)


def load_states_exactly(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> None:
    """Make ``optimizer.load_state_dict`` keep the saved dtypes of states.

    torch casts all states except ``"step"`` to the dtype of the parameter. This function undoes such casts. A saved
    half-precision state of another dtype than its parameter becomes float32.

    Args:
        optimizer: The optimizer that gets the hooks.
        params: Half-precision parameters that keep the dtypes of all their states. For other parameters, only
            `SCALAR_STATE` entries keep their dtypes.
    """
    _load_uncast(optimizer, lambda key, _, param: key in SCALAR_STATE or param in params)


def _load_uncast(optimizer: torch.optim.Optimizer, wanted: Callable[[str, Tensor, Tensor], bool]) -> None:
    """Register hooks on ``optimizer`` that undo the casts of its ``load_state_dict`` for some states.

    If ``wanted(key, saved value, parameter)`` is True and the load changed the dtype, the loaded state is replaced by the
    saved value, as float32 if that is in half precision.
    """
    saved_states: dict[int, dict[str, Tensor]] = {}

    def record(_: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        saved_states.clear()
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for position, index in enumerate(saved):
            state = state_dict["state"].get(index, {})
            saved_states[position] = {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def restore(optimizer: torch.optim.Optimizer) -> None:
        for position, param in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
            for key, value in saved_states.get(position, {}).items():
                loaded = optimizer.state[param][key]
                if loaded.dtype != value.dtype and wanted(key, value, param):
                    to = torch.float32 if is_half(value) else value.dtype
                    optimizer.state[param][key] = value.to(loaded.device, to, copy=True)
        saved_states.clear()

    optimizer.register_load_state_dict_pre_hook(record)
    optimizer.register_load_state_dict_post_hook(restore)


# Split masters: a float32 master stored as the bfloat16 weight and a 16-bit remainder ---------------------------------

# Weight and remainder take 4 bytes per element, and keep all bits of the master. The weight is the nearest bfloat16, so
# the master differs from it by at most half a unit in the last place. The remainder is this difference:
#
#     master bits = weight bits x 2^16 + remainder,   remainder in [-2^15, 2^15)
#
# The interval contains only its lower end. If ties were rounded to even, both ties next to an even weight would round to
# it. 2^16 + 1 masters would then have this weight, more than a 16-bit remainder distinguishes. Ties are therefore rounded
# away from zero. All other values round as usual: values above the largest bfloat16 become infinity, and denormals are
# ordinary numbers.
#
# NaN. Interpreted as integers, the bits of some NaNs would round to infinity or overflow into -0. `split_master` lowers
# the bits of a NaN by half a unit (`_code`), so the weight of every NaN is a NaN. The 131,070 signalling NaNs whose
# upper half is 0x7f80 or 0xff80 would leave the range of NaNs. `split_master` makes these quiet first, as any
# arithmetic would. All other masters are restored bitwise.
#
# Written weights. The model's code may write a weight without its remainder, which then belongs to an older weight.
# `join_master` accepts any pair: the master it returns always rounds to the weight. `split_master` never produces two
# kinds of pairs: a zero with a negative remainder, and an infinity with a positive one. Their sums would be the bits of
# NaNs, so `join_master` ignores the remainder of such pairs. An infinity with a negative remainder is a finite master
# above the largest bfloat16.

_SIZE = 0x7FFFFFFF  # all bits except the sign
_INFINITY = 0x7F800000
_QUIET = 0x400000
_HALF = 2**15  # half a unit of the weight


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight and the int16 remainder of a float32 master. Ties round away from zero.

    Args:
        master: float32 tensor of any shape, strides and bits. Weight and remainder have the same shape and strides.
    Collectives: none. Host synchronization: none. Temporary memory: 12 bytes per element.
    """
    code = _code(master.view(torch.int32))
    remainder = code.to(torch.int16)  # the lower half
    return code.add_(_HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), remainder


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a weight and its remainder, bitwise as given to `split_master`.

    If ``weight`` was written after `split_master`, the result is some master that rounds to ``weight``.

    Args:
        weight: bfloat16 tensor of any shape, strides and bits; it may have been written after `split_master`.
        remainder: int16 tensor of the same shape.
    Collectives: none. Host synchronization: none. Temporary memory: 12 bytes per element.
    """
    bits = weight.view(torch.int16)
    size = bits & 0x7FFF
    is_stale = (size == 0) & (remainder < 0) | (size == _INFINITY >> 16) & (remainder > 0)
    code = bits.to(torch.int32).bitwise_left_shift_(16).add_(remainder.masked_fill(is_stale, 0))
    is_nan = (code & _SIZE) >= _INFINITY + _HALF
    return code.add_(is_nan.to(torch.int32), alpha=_HALF).view(torch.float32)


def _code(bits: Tensor) -> Tensor:
    """Return a copy of ``bits``, float32 values as int32, in which NaNs are changed such that each rounds to a NaN."""
    size = bits & _SIZE
    nan = (size > _INFINITY).to(torch.int32)  # int32, because bool masks are slow on a CPU
    without_room = (size < _INFINITY + 2 * _HALF).to(torch.int32).mul_(nan)
    return (bits | without_room.mul_(_QUIET)).sub_(nan.mul_(_HALF))
