"""Float32 master weights and main grads for the half-precision parameters of an optimizer.

An update smaller than half a unit in the last place is lost in a half-precision weight (bfloat16 has 8 significant
bits: 1 + 0.003 is 1), and so is a small micro-batch gradient that is added to a large one. So the optimizer steps a
float32 copy, the *master*, and gradients add up in float32, the *main grad*.

Reference: Micikevicius et al. 2017, "Mixed precision training", arXiv:1710.03740.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.layout.annotation import annotation_of, copy_annotation
from ..parallel.mesh.value_checks import wrong
from .casting import copy_each_, float32_of, has_equal_values, is_half

_COLLECTED = "_meshstep_collected"


class MasterWeights:
    """Puts float32 masters in the place of an optimizer's half-precision parameters.

        masters = MasterWeights(optimizer)      # the optimizer's param groups now hold the masters
        loss.backward()                         # adds up in float32
        masters.collect()                       # master.grad is the model parameter's main grad
        masters.step(optimizer.step)            # steps the masters, rounds them back into the model
        masters.zero_grad()

    A master stands at its parameter's position in the param groups (``param_names`` stay right), has its annotation,
    and takes over its optimizer state, in float32. Parameters of other dtypes stay as they are, so a mixed model (batch
    norm in float32) works; a parameter that the model uses twice has one master. Frozen half-precision parameters get
    none, and cost nothing; call `refresh` after some have been unfrozen.

    Memory for each half-precision parameter element: 4 bytes of master, and 4 of gradient instead of 2.

    Args:
        optimizer: Any torch optimizer; it may have stepped already. Its param groups and state are changed in place; add
            param groups through `add_param_group` here.
        main_grads: Let backward itself add up in float32 (`Tensor.grad_dtype`). False where something else reduces the
            gradients in the parameters' dtype, as `DistributedDataParallel` must ("Expected BFloat16, got Float"):
            `collect` casts them then, and accumulation over micro-batches rounds to half precision.
        cast: False: without ``main_grads`` masters get the half-precision gradients as they are, for an update that reads
            them so; who writes to them casts first.

    Attributes:
        pairs: (model parameter, master), in the order in which the masters were made.
        param_of: The model parameter of each master.
    Collectives: none, in any method. Host reads: none, except to make an error sure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, main_grads: bool = True, cast: bool = True) -> None:
        self.optimizer, self.main_grads, self.cast = optimizer, main_grads, cast
        self.pairs: list[tuple[Tensor, nn.Parameter]] = []
        self._frozen: list[Tensor] = []
        self._versions: dict[Tensor, int] = {}  # of the parameters and masters, after the last step
        self._addresses: list[int] = []  # of the parameters in `pairs`
        self.param_of: dict[Tensor, Tensor] = {}  # of each master
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> int:
        """Make masters for those half-precision parameters in the param groups that require gradients and have none.

        Returns:
            How many were made. Whoever keeps a list of the optimizer's parameters must then make it anew.
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
        self._note_versions(made.items())
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
            master.grad_dtype = None  # any
        return master

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer, and masters for its half-precision parameters.

        Raises:
            ValueError: A parameter is in the optimizer already; nothing is changed.
        """
        self.optimizer.add_param_group(param_group)
        known = {id(param) for param, _ in self.pairs}
        twice = next((param for param in self.optimizer.param_groups[-1]["params"] if id(param) in known), None)
        if twice is not None:
            del self.optimizer.param_groups[-1]
            raise ValueError(
                f"{label_of(twice)} has a master in this optimizer already; a parameter belongs to one group"
            )
        self.refresh()

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self) -> None:
        """Give every master the main grad of its parameter: the same tensor, not a copy (cast without ``main_grads``).

        Where the parameter has none, a gradient that was given to the master itself stays.

        Raises:
            RuntimeError: The model's weights were changed since the last step, which would be undone by the next; or
                gradients were cleared by the optimizer's ``zero_grad``, so that old ones are still in the sum; or a
                frozen parameter without master has a gradient. Nothing is changed.
        """
        self._check_weights()
        for param in self._frozen:
            if param.grad is not None:
                raise RuntimeError(
                    f"{label_of(param)} was frozen when the masters were made and has a gradient now; call refresh() "
                    "after unfreezing"
                )
        for param, master in self.pairs:
            if master.grad is None and hasattr(param.grad, _COLLECTED):
                raise RuntimeError(
                    f"the gradient of {label_of(param)} still holds that of an earlier step: the optimizer's zero_grad() "
                    "clears the masters' gradients only; call MasterWeights.zero_grad() instead"
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
            elif hasattr(master.grad, _COLLECTED):  # else somebody gave the master itself one
                master.grad = None

    def step(self, update: Callable[[], object]) -> None:
        """Call ``update``, which steps the optimizer or skips, and then `publish`."""
        update()
        self.publish()

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """The pairs of those masters that are in the param groups now: someone may step a part of them at a time."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return [(self.param_of[param], param) for param in params if param in self.param_of]

    @torch.no_grad()
    def publish(self, written: Sequence[Tensor] = ()) -> None:
        """Round the masters that are in the param groups into the model's parameters: one multi-tensor copy.

        Nothing changes where a master hasn't, so a skipped step needs no exception from it.

        Args:
            written: Parameters into which they have been rounded already.
        """
        held, done = self.held(), {id(param) for param in written}
        late = [pair for pair in held if id(pair[0]) not in done] if done else held
        if late:
            params, masters = zip(*late, strict=True)
            copy_each_(params, masters)
        self._note_versions(held)

    @torch.no_grad()
    def reload_from_model(self) -> None:
        """Set the masters to the model's weights, after those were loaded or changed."""
        if self.pairs:
            params, masters = zip(*self.pairs, strict=True)
            copy_each_(masters, params)
        self._note_versions(self.pairs)
        self._addresses = [param.data_ptr() for param, _ in self.pairs]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer's parameters, the masters and the model parameters they stand for."""
        self.optimizer.zero_grad(set_to_none)
        for param, _ in self.pairs:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def _note_versions(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._versions |= {tensor: tensor._version for pair in pairs for tensor in pair}

    @torch.no_grad()
    def find_overwritten(self) -> Tensor | None:
        """Return the first parameter that does not have its master's value, as after a write through ``.data``.

        Masters that were written to after the last step are left out: the next step brings them into the model. Host
        synchronization: one per master.
        """
        for param, master in self.held():
            if master._version == self._versions[master] and not has_equal_values(param, master):
                return param
        return None

    def _check_weights(self) -> None:
        """Find weights that were written since the last step: a checkpoint that was loaded into the model, say.

        Writes through ``.data`` are not seen, except where they give the parameter other memory; see `find_overwritten`.
        """
        addresses = [param.data_ptr() for param, _ in self.pairs]
        moved = addresses != self._addresses
        for index, (param, master) in enumerate(self.pairs):
            if param._version != self._versions[param] or (moved and addresses[index] != self._addresses[index]):
                if not torch.equal(param, master.to(param.dtype)):
                    raise RuntimeError(
                        f"{label_of(param)} was changed since the last step, and the next would put the master's old "
                        "weights back: call reload_from_model() after loading or changing the model's weights"
                    )
                self._versions[param] = param._version  # the same values were put back
        self._addresses = addresses

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``{"masters": {position: float32 tensor}}``, the position being that in the optimizer's own state dict."""
        return {"masters": {position: master.detach() for position, master in self._by_position().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the masters bit for bit, and round them into the model's parameters.

        A state that was saved without masters (by a mode that has none) is an error. To go on from one, load the
        model's weights and call `reload_from_model`: the masters are then the float32 values of those.

        Raises:
            ValueError: There are no masters in it, or they don't fit in number or shape; nothing is changed.
        """
        masters = self._by_position()
        saved = check_saved(state, masters)
        for position, master in masters.items():
            master.copy_(saved[position])
        self.publish()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where `load_state_dict` would."""
        check_saved(state, self._by_position())

    def _by_position(self) -> dict[int, nn.Parameter]:
        ids = {id(master): master for _, master in self.pairs}
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {position: ids[id(param)] for position, param in enumerate(params) if id(param) in ids}


def check_saved(state: Mapping[str, Any], masters: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """The masters in a saved state. Raises ValueError where there are none, or where they don't fit in number or shape.

    Args:
        masters: What they are loaded into, by position.
    """
    saved: Mapping[int, Tensor] | None = state.get("masters")
    if saved is not None and not isinstance(saved, Mapping):
        raise wrong("masters", saved, "a dict")
    if saved is None:
        raise ValueError(
            "the state has no master weights: it was saved in a mode without. Load it there, or load the model's "
            "weights, call reload_from_model() and load only the optimizer's own state"
        )
    if saved.keys() != masters.keys():
        raise ValueError(
            f"the state has {len(saved)} masters, at positions {_some(saved)}, but the optimizer has "
            f"{len(masters)}, at {_some(masters)}; build the same param groups in the "
            "same precision mode as when it was saved"
        )
    for position, master in masters.items():
        if not isinstance(saved[position], Tensor) or not saved[position].is_floating_point():
            raise wrong(f"master {position}", saved[position], "a tensor of floats")
        if saved[position].shape != master.shape:
            raise ValueError(
                f"the saved master {position} has shape {tuple(saved[position].shape)}, but {label_of(master)} has "
                f"{tuple(master.shape)}; a state fits only the topology and rank that saved it"
            )
    return saved


def use_main_grad_(param: Tensor) -> None:
    """Let backward add up the gradients of ``param`` in float32 from now on, starting from the one that is there."""
    grad, param.grad = param.grad, None
    param.grad_dtype = torch.float32
    param.grad = None if grad is None else grad.float()


def label_of(param: Tensor) -> str:
    annotation = annotation_of(param)
    return (annotation.name if annotation else None) or f"a parameter of shape {tuple(param.shape)}"


def _some(positions: Mapping[int, object]) -> str:
    shown = ", ".join(map(str, list(positions)[:5]))
    return shown + (", ..." if len(positions) > 5 else "") or "none"


# What of an optimizer's state belongs to the elements of a parameter, and what is one number of all of it -------------

SCALAR_STATE = ("step", "mu", "mu_product", "eta")  # one number a parameter in torch's optimizers, whatever its shape


def is_half_kept(key: str, value: Any, param: Tensor) -> bool:
    """Whether a state may be kept in half precision between steps: not a number that all elements share, of which a
    rounded value would be wrong for all of them alike.

    Args:
        param: Whose state ``value`` is, under ``key``.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or key in SCALAR_STATE:
        return False
    return value.dim() > 0 or param.dim() == 0


def load_shared_numbers_exactly(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer.load_state_dict`` leave those numbers in their dtype; torch casts all but ``"step"``."""
    _load_uncast(optimizer, lambda key, value, param: key in SCALAR_STATE)


def load_states_exactly(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> None:
    """Let ``optimizer.load_state_dict`` give ``params``, which are in half precision, their states in the dtype
    that they were saved in, and the shared numbers of all parameters too; torch casts all but ``"step"``."""
    _load_uncast(optimizer, lambda key, _, param: key in SCALAR_STATE or param in params)


def _load_uncast(optimizer: torch.optim.Optimizer, wanted: Callable[[str, Tensor, Tensor], bool]) -> None:
    """Put values in the place of those that torch has cast, where they are ``wanted`` (key, saved value, parameter); half
    precision becomes float32."""
    given: dict[int, dict[str, Tensor]] = {}

    def note(_: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        given.clear()
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for position, index in enumerate(saved):
            state = state_dict["state"].get(index, {})
            given[position] = {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def put_back(optimizer: torch.optim.Optimizer) -> None:
        for position, param in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
            for key, value in given.get(position, {}).items():
                loaded = optimizer.state[param][key]
                if loaded.dtype != value.dtype and wanted(key, value, param):
                    to = torch.float32 if is_half(value) else value.dtype
                    optimizer.state[param][key] = value.to(loaded.device, to, copy=True)
        given.clear()

    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.register_load_state_dict_post_hook(put_back)
