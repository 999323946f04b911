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
    """Float32 copies of half-precision parameters, the *masters*, which replace them in an optimizer's param groups.

        masters = MasterWeights(optimizer)      # the optimizer's param groups now hold the masters
        loss.backward()                         # gradients accumulate in float32
        masters.collect()                       # master.grad is the model parameter's main gradient
        masters.step(optimizer.step)            # steps the masters, rounds them into the model
        masters.zero_grad()

    The optimizer updates a master, and the result is rounded into the model's parameter. A master takes its parameter's
    position in the param groups, so ``param_names`` stay correct. It gets the parameter's declared layout, and the
    parameter's optimizer state with half-precision tensors cast to float32.

    Parameters of other dtypes, such as batch norm in float32, are unchanged. A parameter that the model uses twice has one
    master. A frozen half-precision parameter (``requires_grad=False``) has no master; call `refresh` after you unfreeze
    it.

    Memory per element of a half-precision parameter: 4 bytes for the master, and with ``main_grads=True`` 4 bytes instead
    of 2 for the gradient. With ``main_grads=False`` and ``cast=True``, `collect` adds a gradient of 4 bytes.

    Args:
        optimizer: Any torch optimizer except L-BFGS; it may already have stepped. Its param groups and state are changed in
            place. Add param groups with `MasterWeights.add_param_group`. Its half-precision parameters must not be
            DTensors; for DTensors, use ``ParallelOptimizer(..., precision=)``.
        main_grads: If True, backward accumulates the gradients of these parameters in float32 (`Tensor.grad_dtype`). Pass
            False if other code reduces the gradients in the parameters' dtype, as `DistributedDataParallel` does
            ("Expected BFloat16, got Float"). Gradients then accumulate in half precision, and `collect` casts them.
            Default: True.
        cast: If False, and ``main_grads`` is False, `collect` gives masters the half-precision gradients without a cast,
            for an update that reads half precision. Default: True.

    Attributes:
        pairs: List of (model parameter, master), in the order in which the masters were created.
        param_of: Dict from each master to its model parameter.
    Collectives: none, except those of the ``update`` that `step` calls.
    Host synchronization: in `find_overwritten`; in `collect` if a weight was written since the last step; and if
    `load_state_dict` copies from another device. Otherwise none, except in ``update``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, main_grads: bool = True, cast: bool = True) -> None:
        self.optimizer, self.main_grads, self.cast = optimizer, main_grads, cast
        self.pairs: list[tuple[Tensor, nn.Parameter]] = []
        self._frozen: list[Tensor] = []
        self._versions: dict[int, int] = {}  # version counters of parameters and masters after the last step, by id
        self._addresses: list[int] = []  # memory addresses of the parameters in `pairs`
        self.param_of: dict[Tensor, Tensor] = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> int:
        """Create a master for each half-precision parameter in the param groups, unless the parameter is frozen.

        A parameter that already has a master keeps it, because the master has replaced it in the param groups.

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
            master.grad_dtype = None  # the gradient may have any dtype
        return master

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer, and create masters for its half-precision parameters.

        Args:
            param_group: As in ``torch.optim.Optimizer.add_param_group``.
        Raises:
            ValueError: A parameter is already in the optimizer, or has a master in the optimizer. Nothing is changed.
            ValueError, TypeError: As in ``torch.optim.Optimizer.add_param_group``.
        """
        self.optimizer.add_param_group(param_group)
        ids = {id(param) for param, _ in self.pairs}
        duplicate = next((param for param in self.optimizer.param_groups[-1]["params"] if id(param) in ids), None)
        if duplicate is not None:
            del self.optimizer.param_groups[-1]
            raise ValueError(
                f"{label_of(duplicate)} already has a master weight in this optimizer; leave this parameter out of the new "
                "param group"
            )
        self.refresh()

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, *, check_unfrozen: bool = True) -> None:
        """Set ``master.grad`` of each master from the gradient of its parameter.

        With ``main_grads=True`` both are the same float32 tensor. With ``main_grads=False``, ``master.grad`` is a float32
        copy of the parameter's gradient, or with ``cast=False`` the half-precision gradient itself. If the parameter has
        no gradient, a ``master.grad`` from an earlier `collect` is removed, and one that other code has set is kept.

        Args:
            check_unfrozen: False: ignore parameters that were unfrozen without `refresh`, because the caller reports
                them. Default: True, raise an error.
        Raises:
            RuntimeError: Other code changed the model's weights since the last step, and the next step would undo the
                change. Or only the optimizer's ``zero_grad`` was called after the last step, so the parameters still have
                the gradients of that step. Or a parameter without a master, which was frozen, has a gradient. In these
                cases no gradient is changed.
        """
        self._check_weights()
        for param in self._frozen:
            if param.grad is not None and (check_unfrozen or not param.requires_grad):
                write = (
                    "call MasterWeights.refresh() after unfreezing" if param.requires_grad else "set its .grad to None"
                )
                raise RuntimeError(
                    f"{label_of(param)} has a gradient, but was frozen when the master weights were created; {write}"
                )
        for param, master in self.pairs:
            if master.grad is None and hasattr(param.grad, _COLLECTED):
                raise RuntimeError(
                    f"the gradient of {label_of(param)} still contains the gradient of an earlier step, because "
                    "zero_grad() of the torch optimizer clears only the gradients of master weights; call "
                    "zero_grad() of the ParallelOptimizer or MasterWeights instead"
                )
        cast: dict[int, Tensor] = {}
        if self.cast and not self.main_grads:
            cast = float32_of(
                {
                    id(param): grad
                    for param, _ in self.pairs
                    if (grad := param.grad) is not None and is_half(grad) and grad.layout is torch.strided
                }
            )
        for param, master in self.pairs:
            grad = param.grad
            if grad is not None:
                setattr(grad, _COLLECTED, True)
                value = cast.get(id(param), grad)
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
        """Return a (model parameter, master) pair for each master that is in the param groups now.

        These are all masters, except during a step that updates the parameters bucket by bucket. The param groups then
        contain only the masters of one bucket.
        """
        tensors = (tensor for group in self.optimizer.param_groups for tensor in group["params"])
        return [(param, tensor) for tensor in tensors if (param := self.param_of.get(tensor)) is not None]

    @torch.no_grad()
    def write_back(self, written: Sequence[Tensor] = ()) -> None:
        """Round the masters in the param groups into the model's parameters.

        After a skipped step the call writes the same values again. It would overwrite values that other code has written
        to the parameters.

        Args:
            written: Model parameters that already contain their rounded masters, and are not written. Default: none.
        """
        held, done = self.held(), {id(param) for param in written}
        late = [pair for pair in held if id(pair[0]) not in done] if done else held
        copy_each_([param for param, _ in late], [master for _, master in late])
        self._record_versions(held)

    @torch.no_grad()
    def reload_from_model(self) -> None:
        """Set the masters to the values of the model's parameters. Call it after you load or change these parameters."""
        copy_each_([master for _, master in self.pairs], [param for param, _ in self.pairs])
        self._record_versions(self.pairs)
        self._addresses = [param.data_ptr() for param, _ in self.pairs]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in the optimizer, including masters, and of the masters' model parameters.

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
        self._versions |= {id(tensor): tensor._version for pair in pairs for tensor in pair}

    @torch.no_grad()
    def find_overwritten(self) -> Tensor | None:
        """Return the first model parameter that differs from its rounded master in the param groups; None if none differs.

        A write to the parameter after the last step causes such a difference, for example a write through ``.data``. A
        master that other code has written after the last step is not compared, because the next step copies it into the
        model.

        Host synchronization: one or two per compared master.
        """
        for param, master in self.held():
            if master._version == self._versions[id(master)] and not has_equal_values(param, master):
                return param
        return None

    def _check_weights(self) -> None:
        """Raise RuntimeError if other code has written a model parameter, and it now differs from its rounded master.

        A write through ``.data`` is detected only if it changes the parameter's memory address.
        """
        addresses = [param.data_ptr() for param, _ in self.pairs]
        moved = addresses != self._addresses
        for index, (param, master) in enumerate(self.pairs):
            if param._version != self._versions[id(param)] or (moved and addresses[index] != self._addresses[index]):
                if not has_equal_values(param, master):
                    raise RuntimeError(
                        f"{label_of(param)} was changed since the last step, and the next step would restore the old "
                        "weights from the master weight; call reload_from_model() after loading or changing the model's "
                        "weights"
                    )
                self._versions[id(param)] = param._version  # changed in place, but to equal values
        self._addresses = addresses

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"masters": {position: float32 tensor}}``. The tensors share memory with the masters.

        A position is the index of the master among all parameters of the optimizer, as in the optimizer's state dict.
        """
        return {"masters": {position: master.detach() for position, master in self._masters_by_position().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the masters in ``state`` into the masters of this object, and round them into the model's parameters.

        To continue from a state without masters, load the model's weights and call `reload_from_model` instead. The
        masters then have the values of the half-precision weights.

        Args:
            state: A dict with the entry ``"masters"`` that `state_dict` returns; other entries are ignored.
        Raises:
            ValueError: ``state`` has no entry ``"masters"``, or the entry is not a dict; its positions, or the shapes of
                its tensors, differ from those of the masters; or a value is not a floating-point tensor. The masters are
                unchanged.
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
    """Return ``state["masters"]`` after checking that they fit ``masters``. Both are by position in the optimizer."""
    saved: Mapping[int, Tensor] | None = state.get("masters")
    if saved is not None and not isinstance(saved, Mapping):
        raise wrong("the entry 'masters' of the state", saved, "a dict")
    if saved is None:
        raise ValueError(
            "the state has no master weights, so it was saved in a precision mode without them; use that precision mode, "
            "or load only the model's weights and call reload_from_model()"
        )
    if saved.keys() != masters.keys():
        raise ValueError(
            f"the state has {_describe(saved)}, but the optimizer has {_describe(masters)}; make the optimizer with the "
            "param groups, the frozen parameters and the precision mode of the run that saved the state"
        )
    for position, master in masters.items():
        if not isinstance(saved[position], Tensor) or not saved[position].is_floating_point():
            raise wrong(f"master weight {position} of the state", saved[position], "a tensor of floats")
        if saved[position].shape != master.shape:
            raise ValueError(
                f"the saved master weight {position} has shape {tuple(saved[position].shape)}, but that of "
                f"{label_of(master)} has {tuple(master.shape)}; load a state that this rank saved for the same model and "
                "param groups on the same topology"
            )
    return saved


def use_main_grad_(param: Tensor) -> None:
    """Make backward accumulate ``param.grad`` in float32. An existing gradient is cast to float32."""
    grad, param.grad = param.grad, None
    param.grad_dtype = torch.float32
    param.grad = None if grad is None else grad.float()


def _describe(positions: Mapping[int, object]) -> str:
    """Return a text such as ``"2 master weights, at positions 0, 3"``."""
    number = f"{len(positions)} master weight{'s' if len(positions) != 1 else ''}"
    shown = ", ".join(map(str, list(positions)[:5])) + (", ..." if len(positions) > 5 else "")
    return f"{number}, at position{'s' if len(positions) != 1 else ''} {shown}" if positions else number


# Optimizer states: tensors with one value per parameter element, and numbers that all elements of a parameter share ---

SCALAR_STATE = ("step", "mu", "mu_product", "eta")  # states of torch's optimizers with one number per parameter


def is_half_kept(key: str, value: Any, param: Tensor) -> bool:
    """Return True if an optimizer state may be stored in half precision.

    Such a state is a floating-point tensor, for example a moment. A number that all elements of the parameter share, such
    as a step count, must not be rounded, because its error would affect all elements. A state counts as a shared number if
    its key is in `SCALAR_STATE`, or if it is 0-dim although the parameter is not.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or key in SCALAR_STATE:
        return False
    return value.dim() > 0 or param.dim() == 0


def load_shared_numbers_exactly(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.load_state_dict`` keep the dtype of the states with the keys in `SCALAR_STATE`.

    torch casts these states, except ``"step"``, to the dtype of the parameter. Hooks on the optimizer undo the cast: the
    number gets its saved dtype, or float32 if a half-precision value was cast.
    """
    _load_uncast(optimizer, lambda key, value, param: key in SCALAR_STATE)


def load_states_exactly(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> None:
    """Make ``optimizer.load_state_dict`` keep the saved dtypes of the states of ``params``, which is read at each load.

    torch casts all states except ``"step"`` to the dtype of the parameter. Hooks on the optimizer undo the cast: the state
    gets its saved dtype, or float32 if a half-precision value was cast. For other parameters, only the numbers with keys in
    `SCALAR_STATE` keep their dtypes.
    """
    _load_uncast(optimizer, lambda key, _, param: key in SCALAR_STATE or param in params)


def _load_uncast(optimizer: torch.optim.Optimizer, wanted: Callable[[str, Tensor, Tensor], bool]) -> None:
    """Undo the casts of ``optimizer.load_state_dict`` for states for which ``wanted(key, saved value, parameter)`` is True.

    A saved value in half precision is cast to float32.
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
# The interval of remainders contains its lower end but not its upper end. If ties were rounded to even, both ties next to
# an even weight would round to this weight. 2^16 + 1 masters would then have this weight, more than a 16-bit remainder
# distinguishes. Ties are therefore rounded away from zero. All other values round to nearest: values more than half a unit
# above the largest bfloat16 become infinity, and denormals are ordinary numbers.
#
# NaN. The bits of a master are rounded as an integer. The bits of some NaNs would round to infinity, or overflow into
# a zero of the opposite sign. `split_master` therefore lowers the bits of a NaN by half a unit (`_code`), so the weight of
# a NaN is a NaN. For the 131,070 signalling NaNs whose upper half is 0x7f80 or 0xff80, the weight would still be an
# infinity. `split_master` first makes these NaNs quiet, as any arithmetic would. All other masters are restored bitwise.
#
# Written weights. The model's code may write a weight but not its remainder. The remainder then belongs to an older
# weight. `join_master` accepts any pair of weight and remainder: the master that it returns always rounds to the weight.
# `split_master` never produces two kinds of pairs: a zero with a negative remainder, and an infinity with a positive
# remainder. Their sums would be the bits of NaNs, so `join_master` ignores the remainder of such a pair. An infinity with
# a negative remainder is a finite master above the largest bfloat16.

_SIZE = 0x7FFFFFFF  # all bits except the sign
_INFINITY = 0x7F800000
_QUIET = 0x400000
_HALF = 2**15  # half a unit in the last place of the weight


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight and the int16 remainder that together store a float32 master weight.

    The weight is the nearest bfloat16, and ties round away from zero. The remainder is the difference of the bits.
    ``master`` may have any shape, strides and bits. Peak memory: 16 bytes per element.
    """
    code = _code(master.view(torch.int32))
    remainder = code.to(torch.int16)  # the lower half
    return code.add_(_HALF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), remainder


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master weight that `split_master` has split into ``weight`` and ``remainder``.

    The result is bitwise the argument of `split_master`, except that some signalling NaNs are quiet. If ``weight`` was
    written after `split_master`, the result is a value that rounds to the written ``weight``. Both tensors may have any
    strides and bits. Peak memory: 12 bytes per element, including the result.
    """
    bits = weight.view(torch.int16)
    size = bits & 0x7FFF
    is_stale = (size == 0) & (remainder < 0) | (size == _INFINITY >> 16) & (remainder > 0)
    code = bits.to(torch.int32).bitwise_left_shift_(16).add_(remainder.masked_fill(is_stale, 0))
    is_nan = (code & _SIZE) >= _INFINITY + _HALF
    return code.add_(is_nan.to(torch.int32), alpha=_HALF).view(torch.float32)


def _code(bits: Tensor) -> Tensor:
    """Return a copy of ``bits`` (float32 viewed as int32) in which every NaN rounds to a bfloat16 NaN."""
    size = bits & _SIZE
    nan = (size > _INFINITY).to(torch.int32)  # int32, because bool masks are slow on a CPU
    without_room = (size < _INFINITY + 2 * _HALF).to(torch.int32).mul_(nan)
    return (bits | without_room.mul_(_QUIET)).sub_(nan.mul_(_HALF))
