"""Checks that all ranks run together in the first accumulation windows, and again after param groups were changed.

An accumulation window is the sequence of micro-batches between two steps. The checks find missing gradients, gradients
of an unscaled loss, weights that the step would overwrite, and parameters that the loss does not use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...parallel.interop.local_parameters import local_tensor, named_shards, sums_seen
from ...parallel.layout.annotation import Sums
from ...parallel.mesh.agreement import gather_objects
from ...parallel.mesh.call_tracker import is_transport_error
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.text import named_ranks, some, without_wrappers
from ...parallel.mesh.topology import Topology
from ..gradients.reduce_in_backward import ArrivedGradients
from ..norm.plan import ReductionPlan
from ..norm.plan_agreement import Holders, identities_of
from .window import Window

SAY_SO = (
    "write optimizer.backward(loss) instead of loss.backward(), or, if other code calls backward, "
    "`with optimizer.window():` around that code, with optimizer.scale_loss(loss) as the loss"
)


_FINDERS: list[Callable[[object], str | None]] = []


def check_in_first_window(find: Callable[[object], str | None]) -> None:
    """Register a check that runs as ``find(optimizer.param_groups)`` in the first window of each `ParallelOptimizer`.

    It runs again in the first window after param groups were added or refreshed. ``find`` returns None if it finds no
    error, else an error message. If it returns a message on any rank, all ranks raise a ValueError with this message.
    """
    _FINDERS.append(find)


class GradientReport(NamedTuple):
    """One rank's report on its gradients at the end of a window; all ranks gather the reports."""

    calls: int  # number of micro-batches and `scale_loss` calls in the window
    some: bool  # the rank has a gradient, possibly of zeros
    some_not_zero: bool  # the rank has a non-zero gradient, and `Window.has_bypassed_grads` is True
    elsewhere: bool  # a parameter has a `main_grad` that is not None
    unknown: bool  # a backward of the window raised, so it is not known whether it left gradients
    divided_twice: bool  # a pipeline schedule divided gradients twice
    sums: Sums  # per DTensor, the axes over which its gradient is partial but not declared partial
    wrong: str | None  # message of a ValueError that `check_gradients_came` raises
    facts: int = 0  # summand of a `StepAgreement`; the sum over ranks is 0 if all ranks agree
    looked: bool = False  # the gradients of an earlier window were checked already
    written: tuple[int, int] = (0, 0)  # how many observed gradients other code changed, and how many are observed
    has_copies: bool = False  # the rank has master weights or other copies of weights
    missing: tuple[str, ...] = ()  # names of trainable parameters of the model that no optimizer has
    scaled_losses: int = 0  # number of losses that were multiplied by the loss scale in the window

    @classmethod
    def of(
        cls, window: Window, params: Sequence[Tensor], param_groups: object = None, facts: int = 0
    ) -> GradientReport:
        """Return the report of this rank. Call it before gradients are moved to other tensors, such as master weights.

        If ``param_groups`` is None, the checks of `check_in_first_window` do not run.
        Host synchronization: up to one per gradient if gradients bypassed the optimizer, and those of the checks.
        """
        gradients = [local_tensor(param.grad) for param in params if param.grad is not None]
        # Gradients of zeros do not count, because some trainers make a step with zero gradients to create states.
        not_zero = window.has_bypassed_grads(params) and any(
            g.layout != torch.strided or bool((g != 0).any()) for g in gradients
        )
        # After a reduction in backward, ``.grad`` may be None again, or may contain gradients of other ranks.
        some = window.saw_grads if window.reduced else bool(gradients)
        # torch's state-dict functions set gradients of zeros on the tensors that the optimizer steps. They count here,
        # so that they cause no error. A reduction in backward also sets gradients of zeros; they must not count.
        if isinstance(param_groups, list) and not window.reduced:
            some = some or any(param.grad is not None for group in param_groups for param in group["params"])
        elsewhere = any(getattr(param, "main_grad", None) is not None for param in params)
        found = (find(param_groups) for find in _FINDERS if param_groups is not None)
        wrong = next((problem for problem in found if problem is not None), None)
        sums: Sums = {}
        try:
            sums = sums_seen(params)
        except ValueError as error:
            wrong = str(error)
        return cls(
            calls=window.calls,
            some=some,
            some_not_zero=not_zero,
            elsewhere=elsewhere,
            unknown=window.phase == "broken",
            divided_twice=window.divided_twice,
            sums=sums,
            wrong=wrong,
            facts=facts,
            looked=window.grads_checked,
            written=window.count_written(params),
            scaled_losses=window.scaled_losses,
        )


def check_gradients_came(seen: Sequence[GradientReport], scaled: bool) -> None:
    """Raise an error if the report of a rank in ``seen`` shows a mistake. All ranks raise the same error."""
    for rank, of_rank in enumerate(seen):
        if of_rank.wrong is not None:
            raise ValueError(f"rank {rank}: {of_rank.wrong}")
    if any(rank.divided_twice for rank in seen):
        raise RuntimeError(
            "a pipeline schedule with scale_grads=True has divided gradients twice: gradients of a parameter that two "
            "stages of a rank share, or gradients of earlier runs of the schedule since the last step. Run the schedule "
            "with meshstep.optim.Pipeline(schedule, optimizer), which divides the loss; or give scale_grads=False, and "
            "divide the loss by the number of micro-batches in the schedule's loss function"
        )
    called = any(rank.calls for rank in seen)
    if scaled and not any(rank.scaled_losses for rank in seen) and any(rank.some_not_zero for rank in seen):
        raise RuntimeError(
            "there are gradients, but their loss was not multiplied by the loss scale, and step() divides gradients by it: "
            + SAY_SO
        )
    none = not any(rank.some or rank.unknown for rank in seen)
    if none and not called and not any(rank.looked for rank in seen):
        raise RuntimeError(
            "step() or a clip was called before optimizer.backward, and no parameter of the optimizer has a gradient on "
            "any rank: call optimizer.backward(loss) first. If other code has called backward, create the torch optimizer "
            "from model.parameters() after moving, sharding or wrapping the model"
        )
    if none and called:
        where = (
            "the gradients are in param.main_grad; give the module that stores them there, Megatron's "
            "DistributedDataParallel, as data_parallel="
            if any(rank.elsewhere for rank in seen)
            else "create the torch optimizer from model.parameters() after moving, sharding or wrapping the model, because "
            "these may replace parameters, and don't clear gradients between backward and step"
        )
        raise RuntimeError(f"no parameter of the optimizer has a gradient on any rank, after a backward: {where}")


OnMissingParams = Literal["raise", "warn"]
"""The reaction of the first step to trainable parameters of the model that no optimizer has."""


class ModelParams:
    """A check for trainable parameters of the model that no optimizer has."""

    def __init__(self, modules: Iterable[nn.Module], on_missing: OnMissingParams) -> None:
        self.modules, self.on_missing = list(modules), on_missing

    def missing_from(self, params: Iterable[Tensor]) -> tuple[str, ...]:
        own, found = {id(param) for param in params}, dict[int, str]()
        for module in self.modules:
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            for name, param in named_shards(inner).items():
                if param.requires_grad and id(param) not in own:
                    found.setdefault(id(param), without_wrappers(name))
        return tuple(found.values())

    def check(self, missing: Sequence[tuple[str, ...]]) -> None:
        """Raise RuntimeError or warn, on every rank, if a rank has trainable parameters that no optimizer has."""
        ranks = [rank for rank, names in enumerate(missing) if names]
        if not ranks:
            return
        names = dict.fromkeys(name for of_rank in missing for name in of_rank)
        text = (
            f"the model has trainable parameters that the optimizer does not have and will never step, on "
            f"{named_ranks(ranks)}: {some(names)}. A module or parameter was added or replaced after the optimizer was "
            "made, as by model.head = ... or an adapter, or was left out of it: make the optimizer after all changes of "
            "the model, or add the parameters with add_param_group. Call requires_grad_(False) on parameters that are not "
            "trained, or give on_missing_params='warn' if other code steps them"
        )
        if self.on_missing == "raise":
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=2)


def warn_of_written_gradients(seen: Sequence[GradientReport], topology: Topology, scaled: bool, averaged: bool) -> None:
    """Warn on every rank if all gradients of some rank were written to between the last backward and the first `step`.

    The usual cause is torch's gradient clipping, which would clip gradients that are not reduced yet, or that contain the
    loss scale. Do not warn if neither is the case. If only some gradients of a rank were written to, such writes are
    usually intended. Gradients that are DTensors are not observed.
    """
    others = topology.world_size if not averaged else topology.world_size // topology.size(*topology.data_axes)
    ranks = [rank for rank, of_rank in enumerate(seen) if 0 < of_rank.written[0] == of_rank.written[1]]
    if not ranks or (others == 1 and not scaled):
        return
    state = "local to that rank, not reduced over ranks yet" if others > 1 else "still multiplied by the loss scale"
    warnings.warn(
        f"all gradients of rank {ranks[0]} were written to between backward and step, as by torch.nn.utils.clip_grad_norm_ "
        f"or clip_grad_value_. These gradients were {state}: to clip, remove that call and give ParallelOptimizer "
        "max_norm=. If you "
        "change gradients on purpose, silence this: warnings.filterwarnings('ignore', message='.*were written to between "
        "backward and step')",
        stacklevel=2,
    )


def check_window_is_used(window: Window, params: Sequence[Tensor], registry: ProcessGroupRegistry) -> None:
    """Raise RuntimeError if a rank has non-zero gradients although the window has no micro-batch. `step` would ignore them.

    Call it only if ``accumulation_steps`` is set.
    Collectives: an object all-gather, which fails if other ranks have micro-batches and do not call this function.
    """
    try:
        seen = gather_objects(GradientReport.of(window, params), registry)
    except Exception as error:
        if not is_transport_error(error):
            raise
        # The text must contain "got no reply": `is_transport_error` then treats the error as explained.
        raise RuntimeError(
            f"rank {registry.global_rank} called step() without a backward since its last update (accumulation_steps="
            f"{window.steps}), and got no reply from ranks that have called backward. Call backward equally "
            "often on every rank, and backward(None) on a rank without samples. torch reports: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    if any(rank.some_not_zero for rank in seen):
        raise RuntimeError(
            f"there are gradients, but none of the accumulation_steps={window.steps} micro-batches was counted, so step() "
            "would never update: " + SAY_SO
        )


# Weights that were written through ``.data`` while masters or other copies exist ----------------------------------------


def check_not_overwritten(names: Sequence[str | None], has_fingerprints: bool) -> None:
    """Raise RuntimeError on every rank if other code wrote weights on a rank and the step would overwrite these values.

    ``names`` has the result of `TransformChain.find_overwritten` on each global rank. With ``has_fingerprints``, a name
    on exactly one of several ranks is not an error here: it may be a flipped bit, for which `Fingerprints` report the
    tensor and the rank.
    """
    if has_fingerprints and len(names) > 1 and sum(name is not None for name in names) == 1:
        return
    for rank, name in enumerate(names):
        if name is not None:
            raise RuntimeError(
                f"{name} was changed since the last step on rank {rank}, and the next step would restore the old weights "
                "from a master weight or another copy: call optimizer.reload_from_model() each time after writing weights. "
                "Writes through param.data are detected only in the second and the 16th step, and undone silently in other "
                "steps"
            )


# Unused parameters ----------------------------------------------------------------------------------------------------

# A warning for parameters of the optimizer that get no gradient on any rank, such as parameters of a replaced module.

WINDOWS = 16  # number of checked windows; an expert may get no tokens in a single window


class UnusedParameters:
    """A check for parameters that have no gradient on any rank in `WINDOWS` windows. It warns once, on rank 0.

    The windows are the first ones after the optimizer was made, or after param groups were added or refreshed.

    ``params`` are in the order of the plan's entries. With ``reduces_in_backward``, gradients may be reduced, moved or
    cleared before a window ends, so hooks record the parameters with a gradient.
    """

    def __init__(
        self, params: Sequence[Tensor], plan: ReductionPlan, registry: ProcessGroupRegistry, reduces_in_backward: bool
    ) -> None:
        self.plan, self.registry, self._params = plan, registry, list(params)
        self.windows = 0
        self._without = {index for index, param in enumerate(self._params) if param.requires_grad}
        self._arrived = ArrivedGradients(dict(enumerate(self._params))) if reduces_in_backward else None

    @property
    def is_last(self) -> bool:
        return self.windows >= WINDOWS - 1

    def end_window(self, overwritten: str | None = None, has_fingerprints: bool = False) -> bool:
        """Record which parameters have a gradient. Call it at the end of each window, before `step` reduces gradients.

        Return True if more windows must be checked. ``overwritten`` is the name of a parameter whose weights the step
        would overwrite, given to `check_not_overwritten` in the last window.
        Collectives, host synchronization: an object all-gather in the last window, otherwise none.
        """
        if self._arrived is None:
            self._without = {index for index in self._without if self._params[index].grad is None}
        else:
            self._without = {*self._arrived.missing()}
        self.windows += 1
        if self.windows < WINDOWS:
            return True
        self._warn(overwritten, has_fingerprints)
        self._params.clear()
        self._arrived = None  # removes the hooks
        return False

    def _warn(self, overwritten: str | None, has_fingerprints: bool) -> None:
        topology, ranks_of = self.plan.topology, dict[Holders, int]()
        identities = identities_of(self.plan) if self._without else []
        mine = dict[tuple[str, str | int], tuple[str, int]]()
        for index in sorted(self._without):
            (holders, position), name, _ = identities[index]
            if self._params[index].requires_grad:
                if holders not in ranks_of:
                    ranks_of[holders] = sum(map(holders.include, map(topology.coordinate, range(topology.world_size))))
                mine[str(holders), position] = name, ranks_of[holders]
        found = gather_objects((mine, overwritten), self.registry)
        check_not_overwritten([name for _, name in found], has_fingerprints)
        by_rank = [of_rank for of_rank, _ in found]
        counted: dict[tuple[str, str | int], list[str]] = {}
        holding = {key: ranks for of_rank in by_rank for key, (_, ranks) in of_rank.items()}
        for of_rank in by_rank:
            for key, (name, _) in of_rank.items():
                counted.setdefault(key, []).append(name)
        unused = [names[0] for key, names in counted.items() if len(names) == holding[key]]
        if unused and self.registry.global_rank == 0:
            warnings.warn(
                f"in {WINDOWS} steps no rank had a gradient for {some(unused)}: these parameters are not trained. If a "
                "module or parameter was replaced after the optimizer was created, as by model.head = ..., the optimizer "
                "still has the old parameters: create the optimizer after the replacement, or add the new parameters with "
                "add_param_group. If the loss does not use the parameters, call requires_grad_(False) on them before you "
                "create the optimizer",
                stacklevel=2,
            )
