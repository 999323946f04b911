"""Where the optimizer is between two steps, and what the micro-batches of the window weigh together.

    open --begin--> accumulating --complete--> complete --clip--> clipped --close--> open
                    a backward that raises --> broken --clear--> open

The gradient of a window is the mean over everything in it, whatever the micro-batches and data ranks hold:

    grad = sum over data ranks, micro-batches of grad(loss_sum)  /  sum over data ranks, micro-batches of weight

Gradient synchronisation divides by the number of data ranks D, so D / W is left, with W the total weight. W travels in
the packed collective that the norm needs anyway, and D / W is folded into the same factor as clipping and unscaling.
Means of micro-batch means are something else where micro-batches hold different numbers of tokens. Without weights the
factor is 1 / K with K micro-batches in managed accumulation, and 1 where the caller decides when to step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...amp.capture import is_captured
from ...parallel.interop.local_parameters import has_dtensors
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.value_checks import check_scalar, is_whole
from ..clip.clipper import GradScaleInfo, StepDecision
from ..clip.rule import Clip
from ..kernels.device_constants import Constants
from ..norm.packed_sum import PackedSum
from ..norm.powers import accumulation_dtype

if TYPE_CHECKING:
    from .step_agreement import StepAgreement

# The window's weight --------------------------------------------------------------------------------------------------

# What the micro-batches of a window weigh, all data ranks together, on its way through the collective that measures.


class Weight:
    """What one rank's micro-batches of a window weigh together.

    Attributes:
        value: A number; where any micro-batch's weight is a tensor a 0-dim tensor, the same one for life: CUDA graphs of
            micro-batches add to it in every replay.
        sum: That tensor, from when there was one on; replays add to it while ``value`` is 0.
    """

    def __init__(self) -> None:
        self.value: float | Tensor = 0.0
        self.sum: Tensor | None = None

    def clear(self) -> None:
        """Nothing has come."""
        self.value = 0.0
        if self.sum is not None:
            self.sum.zero_()

    @torch.no_grad()
    def add(self, weight: float | Tensor) -> None:
        """Of one more micro-batch; 0-dim."""
        if isinstance(weight, Tensor) and not isinstance(self.value, Tensor):
            if self.sum is None or self.sum.device != weight.device:
                self.sum = torch.zeros((), dtype=accumulation_dtype(weight.device), device=weight.device)
            self.value = self.sum.add_(self.value) if self.value else self.sum
        if isinstance(self.value, Tensor):
            self.value.add_(weight)
        else:
            self.value += weight

    def check_captured(self, weight: float | Tensor) -> None:
        """Raise RuntimeError for a weight that the replays of a CUDA graph would not add, where one is made."""
        if is_captured() and (self.sum is None or not isinstance(weight, Tensor)):
            raise RuntimeError(
                f"weight={weight!r} in a micro-batch that is captured in a CUDA graph, of which every replay would add the "
                "same: give a 0-dim tensor on the GPU, which you write to, in the windows before that are not captured too"
            )


@dataclass(frozen=True)
class WindowPlace:
    """Where a rank is, as far as weights ask."""

    stages: int
    stage: int
    sharers: int
    data_ranks: int
    constants: Constants = field(default_factory=Constants)

    @classmethod
    def of(cls, registry: ProcessGroupRegistry) -> WindowPlace:
        topology = registry.topology
        stage = registry.rank(*topology.pipe_axes) if topology.pipe_axes else 0
        stages, sharers = topology.size(*topology.pipe_axes), topology.size(*topology.model_axes)
        return cls(stages, stage, sharers, topology.size(*topology.data_axes))


_PLACES: WeakKeyDictionary[ProcessGroupRegistry, WindowPlace] = WeakKeyDictionary()


def place_of(registry: ProcessGroupRegistry) -> WindowPlace:
    """Of this rank."""
    place = _PLACES.get(registry)
    if place is None:
        place = _PLACES[registry] = WindowPlace.of(registry)
    return place


def window_fields(
    weight: float | Tensor,
    registry: ProcessGroupRegistry,
    device: torch.device,
    bypassed: float | None = None,
    agreement: int | None = None,
) -> PackedSum:
    """Pack this rank's part of the window's weight W, [pipeline stages] float64, as the field ``"window_weight"``.

    All ranks of a stage that share a data coordinate know the same weight, so each adds its part of it. Stages that know
    none (only the last one computes a loss) add 0. `inverse_weight` reads the sum over ranks.

    Args:
        bypassed, agreement: Values of fields of these names; None: there is no such field.
    Returns:
        The packed fields. Don't write to the values of numbers, which are made once.
    """
    place = place_of(registry)
    found = {name: number for name, number in (("agreement", agreement), ("bypassed", bypassed)) if number is not None}
    more, sizes = list(map(float, found.values())), {"window_weight": place.stages, **dict.fromkeys(found, 1)}
    if not isinstance(weight, Tensor) and not is_captured():  # a graph would copy from the host in every replay
        own = [0.0] * place.stages
        own[place.stage] = weight / place.sharers
        values = [*own, *more]
        return PackedSum(place.constants(tuple(values), values.copy, torch.float64, device), sizes)
    slots = torch.zeros(place.stages + len(more), dtype=torch.float64, device=device)
    # Not `slots[...] = number`, which in torch 2.11 is a copy from the host.
    slots[place.stage].fill_(weight / place.sharers)
    for at, number in enumerate(more, place.stages):
        if number:
            slots[at].fill_(number)
    return PackedSum(slots, sizes)


def reference_inverse_weight(weights: Sequence[Sequence[float]]) -> float:
    """D / W in plain numbers: ``weights[d][k]`` is that of micro-batch k on data coordinate d."""
    total = sum(sum(of_rank) for of_rank in weights)
    return len(weights) / total if total else 1.0


# Gradients that a pipeline schedule divides twice ---------------------------------------------------------------------

# With ``scale_grads=True`` every stage of `torch.distributed.pipelining` divides the gradients of its parameters by the
# number of micro-batches when the schedule is through: right where each is of this call alone, and is divided once.


@contextmanager
def watching_stages(window: Window, params: Sequence[Tensor]) -> Iterator[None]:
    """Around a schedule's step: note in the window where stages divide what was divided already.

    Args:
        params: Whose gradients add up.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        yield
        return
    kind: Any = module._PipelineStageBase  # of all stages; nothing public tells when they divide
    divide = kind.scale_grads
    before = params if window.micro_batches > 1 else ()
    divided = {id(param) for param in before if param.grad is not None}

    def scale_grads(stage: Any, factor: int) -> None:
        divide(stage, factor)
        own = {id(param) for param in stage.submod.parameters() if param.grad is not None}
        window.divided_again |= factor != 1 and bool(divided & own)
        divided.update(own)

    kind.scale_grads = scale_grads
    try:
        yield
    finally:
        kind.scale_grads = divide


# The window -----------------------------------------------------------------------------------------------------------

Phase = Literal["open", "accumulating", "complete", "clipped", "broken"]


class Window:
    """The micro-batches since the last step: how many, their weight here, and what has been done with the gradients.

    No other object remembers where the optimizer is between two steps.

    Args:
        steps: Micro-batches a window in managed accumulation; None: the caller decides when to step.
        scaled: There is a loss scale, in which gradients must have come.
    Raises:
        ValueError: steps is no whole number >= 1.

    Attributes:
        phase: Where it is.
        micro_batches: How many have come; those without a loss count.
        calls: Backward calls, and losses scaled for those of others, since the last step.
        strays: At the end of a window with a loss scale, `has_strays`.
        several: The micro-batch may have more backward calls than one.
        entered: A micro-batch has begun and not ended.
        captured: The step, or explicit clip, that was called last is one that a CUDA graph is made of.
        scale: The loss scale that the gradients contain, 0-dim; None: they contain none. Set when they are completed.
        left_out: torch's data parallelism was told to leave the last micro-batch out.
        reduced: A backward has reduced the gradients while it ran.
        asked: What an explicit call in the middle of the window wants done at its end.
        decision: What was decided and done in this window by an explicit call.
        explicit: The rules of the window's explicit clips, in their order.
        holds_old: The gradients of the window before have been reduced and nobody has cleared them.
        came: A backward has left a gradient on this rank, ever.
        divided_again: A pipeline schedule has divided gradients that were divided before, ever.
        looked: The gradients of a window have been checked by all ranks together, which the first step does.
    """

    def __init__(self, steps: int | None, scaled: bool = False) -> None:
        if steps is not None and not is_whole(steps, 1):
            raise ValueError(f"accumulation_steps={steps!r}: give a whole number >= 1, or None to decide yourself")
        self.steps, self.scaled = steps, scaled
        self.holds_old = self.left_out = self.several = self.captured = self.came = self.divided_again = False
        self.entered = self.looked = False
        self.scale: Tensor | None = None
        self._stepped_with: _Gradient | None = None
        self._weight = Weight()
        self._fields: tuple[tuple[object, ...], PackedSum, WindowPlace] | None = None
        self._facts: int | None = None  # in their slot
        self._watched: _OtherBackward | None = None
        self.close()

    def close(self, params: Sequence[Tensor] = ()) -> None:
        """The step is over, or the window was given up: start an empty one.

        Args:
            params: After a step: those whose gradients stay until somebody clears them.
        """
        if params:
            self._stepped_with = _Gradient.last_of(params)
        self.phase: Phase = "open"
        self.micro_batches = 0
        self.calls = 0
        self.strays = False
        if self.has_weight or self._weight.sum is not None:
            self._weight.clear()
        self.reduced = False
        self.asked: Clip | None = None
        self.decision: StepDecision | None = None
        self.explicit: tuple[Clip | None, ...] = ()
        self._weighted: bool | None = None
        self._with_gradient: list[int] = []
        self._recorded: list[_Gradient] = []
        self._stop_watching()
        self._handled: BaseException | None = None  # when the last micro-batch began

    def clear(self) -> None:
        """The gradients are gone, and the window with them."""
        self.holds_old = False
        self._stepped_with = None
        self.close()

    def has_strays(self, params: Sequence[Tensor]) -> bool:
        """Whether gradients are there that came past `backward` and `window`, as far as this rank can tell: those that the
        last step left are none."""
        if self.calls:
            return False
        found = _Gradient.last_of(params)
        return found is not None and not found.is_still(self._stepped_with)

    def count_written(self, params: Sequence[Tensor]) -> tuple[int, int]:
        """Return how many gradients were written to in place since the last micro-batch, and of how many that is known.

        Known before the first check of gradients only, of plain tensors.
        """
        written = [before for before in self._recorded if before.was_written(params[before.position].grad)]
        return len(written), len(self._recorded)

    def forget_gradients(self) -> None:
        """Let others write to the gradients of this window."""
        self._recorded = []

    @property
    def weight(self) -> float | Tensor:
        """Of all micro-batches so far on this rank, a number or a 0-dim tensor; 0 where none was given."""
        return self._weight.value

    @property
    def has_weight(self) -> bool:
        """Whether this rank gave any other than 0."""
        return isinstance(self.weight, Tensor) or self.weight != 0

    @property
    def is_weighted(self) -> bool:
        """Whether the micro-batches so far were given weights, 0 among them."""
        return bool(self._weighted)

    def number_of_facts(self, agreement: StepAgreement, changed: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
        """Return this rank's part of the slot of a `StepAgreement`. Host reads: none.

        Args:
            changed: The indices of parameters that were frozen, and of those that were unfrozen.
        """
        return agreement.number(self.micro_batches, self.weight if self.is_weighted else None, *changed, self.explicit)

    @property
    def count(self) -> int:
        """What the sum of the micro-batches' gradients is divided by where no rank gave a weight."""
        return 1 if self.steps is None else max(1, self.micro_batches)

    @property
    def is_full(self) -> bool:
        """Whether a step is due: always, where the caller decides."""
        return self.steps is None or self.micro_batches >= self.steps

    def not_captured(self, device: torch.device) -> Iterator[str]:
        """Yield the reasons why a step of this window can't be captured in a CUDA graph, with gradients on ``device``."""
        if not self.is_full:
            yield (
                f"{self.micro_batches} of accumulation_steps={self.steps} micro-batches have come, which replays would not "
                "count: capture a whole window, or leave accumulation_steps out and call step only in the graph of the "
                "last one"
            )
        if isinstance(self.weight, Tensor) and self.weight.device != device:
            yield f"the weight of the window is on {self.weight.device}: give tensors on {device}"

    @property
    def is_unused(self) -> bool:
        """Whether, in managed accumulation, no micro-batch has come."""
        return self.steps is not None and not self.micro_batches

    @property
    def next_is_last(self) -> bool:
        """Whether, in managed accumulation, the next micro-batch is the last one."""
        return self.steps is not None and self.micro_batches % self.steps == self.steps - 1

    def ends(self, last: bool) -> bool:
        """Whether `step` is to do anything; ``last``: the window is a short one, the tail of an epoch.

        Raises:
            RuntimeError: A backward of this window raised.
        """
        self._check_whole()
        return self.is_full or (last and self.micro_batches > 0)

    def may_clear(self) -> bool:
        """Whether `zero_grad` is to do anything: not in the middle of a window of managed accumulation, unless that is
        given up: a backward raised, or the caller is handling an error that has come since the last micro-batch began.
        """
        if self.steps is None or not self.micro_batches or self.phase == "broken":
            return True
        return sys.exc_info()[1] not in (None, self._handled)

    def scale_info(
        self,
        registry: ProcessGroupRegistry,
        scale: Tensor | None,
        device: torch.device,
        facts: int | None = None,
        facts_of_tensors: Tensor | None = None,
    ) -> GradScaleInfo:
        """Return what gradients, on ``device``, are to be divided by: the loss scale, if there is one, and the weight of
        the window or its number of micro-batches.

        Args:
            facts, facts_of_tensors: This rank's part of the slot of a `StepAgreement`; None: there is none, or no tensors.
        """
        alone, vote = registry.topology.world_size == 1, None
        if self.scaled and not (alone and self.calls):  # or this rank knows that there was one, and has nobody to tell
            vote = _SCALED if self.calls else -1.0 if self.strays else 0.0
        done = self.decision is not None  # they were clipped in place in this window, and have it in them already
        pack, place = self._fields_of(self.weight, vote, registry, device, facts)
        if facts_of_tensors is not None:
            pack = replace(pack, values=pack.values.clone())
            pack.split(pack.values)["agreement"] += facts_of_tensors
        is_one = alone and self.count == 1 and not self.has_weight
        is_weighted = not done and not is_one
        return GradScaleInfo(pack, None if done else scale, is_weighted, place.data_ranks, scale, self.count)

    def _fields_of(
        self,
        weight: float | Tensor,
        vote: float | None,
        registry: ProcessGroupRegistry,
        device: torch.device,
        facts: int | None,
    ) -> tuple[PackedSum, WindowPlace]:
        """Return `window_fields`, kept where they are of numbers; a graph would read them there for ever."""
        if self.captured or isinstance(weight, Tensor):
            return window_fields(weight, registry, device, vote, facts), place_of(registry)
        key = weight, vote, registry, device, facts is None
        if self._fields is None or self._fields[0] != key:
            pack, place = window_fields(weight, registry, device, vote, facts), place_of(registry)
            if facts is not None:
                pack = replace(pack, values=pack.values.clone())
            self._fields, self._facts = (key, pack, place), facts
        _, pack, place = self._fields
        if facts is not None and facts != self._facts:  # with a learning rate that a schedule moves in every step
            self._facts = facts
            pack.split(pack.values)["agreement"].fill_(facts)
        return pack, place

    # Micro-batches ---------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(
        self,
        weight: float | Tensor | None,
        params: Sequence[Tensor],
        around: Sequence[Callable[[Window], AbstractContextManager[None]]],
        several: bool = False,
    ) -> Iterator[None]:
        """Around the backward of one micro-batch; where it raises, the window is broken.

        Args:
            weight, params: As for `begin`.
            several: There may be more backward calls than one, whose gradients add up.
            around: What every rank enters, whether it has something to compute or not.
        """
        if self.entered:
            raise RuntimeError(
                "backward was called within window(), or window() within window(), which counts one micro-batch twice: "
                "write one of them. Within window() call scale_loss(loss).backward() of this optimizer's scale_loss"
            )
        self.begin(weight, params)
        self.several, self.entered = several, True
        try:
            with ExitStack() as stack:
                if several:
                    stack.enter_context(watching_stages(self, params))
                for enter in around:
                    stack.enter_context(enter(self))
                yield
                self.came = self.came or any(param.grad is not None for param in params)
        except BaseException:
            self.phase = "broken"
            raise
        finally:
            self.entered = False
        if not self.looked:
            self._recorded = _Gradient.all_of(params)
        if self.steps != 1:
            self._with_gradient = [index for index, param in enumerate(params) if param.grad is not None]
        if self.steps is not None and not self.is_full:
            self._watch(params)

    def begin(self, weight: float | Tensor | None, params: Sequence[Tensor]) -> None:
        """Count one micro-batch, before its backward.

        Args:
            weight: What the summed loss is to be divided by, e.g. its number of tokens; a number or a 0-dim tensor. None:
                the loss is a mean; it counts 1 in managed accumulation, and nothing is divided otherwise, as in torch.
            params: Whose gradients add up.
        Raises:
            ValueError: The window is full; some of its micro-batches have a weight and some have none; a number is
                negative or infinite.
            RuntimeError: The gradients have been clipped; an earlier backward raised; gradients were cleared in between;
                or, in managed accumulation, another backward was called since the last micro-batch.
        """
        if self.phase == "clipped":
            raise RuntimeError(
                "the gradients of this window have been clipped, and no more can be added to them: call step() or "
                "zero_grad() before the next backward, and clip when the last micro-batch has come"
            )
        self._check_whole()
        self._check_gradients(params)
        self._count(weight)
        self.phase, self.left_out = "accumulating", False
        self.calls += 1
        self._handled = sys.exc_info()[1]

    def _count(self, weight: float | Tensor | None) -> None:
        if self.steps is not None and self.micro_batches >= self.steps:
            raise ValueError(
                f"the window of accumulation_steps={self.steps} micro-batches is full; call step() before the next backward"
            )
        if self._weighted not in (None, weight is not None):
            raise ValueError(
                "give every micro-batch of a window a weight, or none: sums and means don't add up. A micro-batch without "
                "samples has the weight 0: backward(None, weight=0)"
            )
        if weight is not None:
            check_scalar(weight, "weight", "a number or a 0-dim tensor, such as the number of tokens in the loss")
        if weight is not None and not isinstance(weight, Tensor) and not 0 <= weight < inf:
            raise ValueError(f"weight={weight}: give a finite number >= 0, such as the number of tokens in the loss")
        if weight is not None:
            self._weight.check_captured(weight)
        self._weighted = weight is not None
        if weight is not None and (isinstance(weight, Tensor) or weight):
            self._weight.add(weight)
        self.micro_batches += 1

    def complete(self) -> None:
        """The gradients have been reduced. A broken window stays broken."""
        self.phase, self.left_out = "broken" if self.phase == "broken" else "complete", False

    def clipped(self, decision: StepDecision) -> None:
        """An explicit call has unscaled and clipped them."""
        self.phase, self.decision = "broken" if self.phase == "broken" else "clipped", decision

    def _check_gradients(self, params: Sequence[Tensor]) -> None:
        for index in self._with_gradient:
            if params[index].grad is None:
                raise RuntimeError(
                    f"after {self.micro_batches} micro-batches of this window gradients were cleared (parameter {index}, "
                    f"shape {tuple(params[index].shape)}): a forward, module.zero_grad() or another optimizer did it; "
                    "clear them with this optimizer's zero_grad(), which waits for the end of the window"
                )
        if self._watched is not None and self._watched.has_added(params):
            raise RuntimeError(
                f"loss.backward() was called after micro-batch {self.micro_batches} of a window of accumulation_steps="
                f"{self.steps}, and has added gradients that are not counted: write optimizer.backward(loss) for every "
                "micro-batch, and clear the gradients with zero_grad() while this error is handled"
            )
        self._stop_watching()

    def _watch(self, params: Sequence[Tensor]) -> None:
        """Notice a backward between this micro-batch and the next, by the last parameter with a gradient.

        By a hook, because scripts may clip or mask gradients in between.
        """
        last = _Gradient.last_of(params, trained=True)
        if last is not None:
            self._watched = _OtherBackward(last)
            self._remove_hook = params[last.position].register_post_accumulate_grad_hook(self._watched).remove

    def _stop_watching(self) -> None:
        if self._watched is not None:
            self._remove_hook()
            self._watched = None

    def _check_whole(self) -> None:
        if self.phase == "broken":
            raise RuntimeError(
                "a backward of this window raised, so that some gradients have its part and some do not: call zero_grad() "
                "of this optimizer and begin the window anew"
            )


_SCALED = 2.0**30  # more than there are ranks: one that knows of a scaled loss speaks for all


class _OtherBackward:
    """A hook that notes a backward; it keeps no window alive.

    Args:
        before: The last gradient. A backward that leaves it unchanged, such as that of `prove`, added nothing to it.
    """

    def __init__(self, before: _Gradient) -> None:
        self._before, self._has_come = before, False

    def __call__(self, _: Tensor) -> None:
        self._has_come = True

    def has_added(self, params: Sequence[Tensor]) -> bool:
        """Return whether a backward came and the gradient is another one, or was written to."""
        after = _Gradient.last_of(params, trained=True)
        return self._has_come and (after is None or not after.is_still(self._before))


class _Gradient(NamedTuple):
    """A gradient as it was at a time, which it does not keep alive."""

    position: int
    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def last_of(cls, params: Sequence[Tensor], trained: bool = False) -> _Gradient | None:
        """Return the gradient of the last parameter that has one, which is nearest to the loss.

        Args:
            trained: Look only at parameters that the next backward gives a gradient.
        """
        for index in range(len(params) - 1, -1, -1):
            gradient = params[index].grad
            if gradient is not None and (params[index].requires_grad or not trained):
                return cls(index, weakref.ref(gradient), gradient._version)
        return None

    @classmethod
    def all_of(cls, params: Sequence[Tensor]) -> list[_Gradient]:
        """Those of all parameters which have one; without DTensors, of which torch's own functions know the full tensor."""
        gradients = ((index, param.grad) for index, param in enumerate(params))
        return [
            cls(index, weakref.ref(gradient), gradient._version)
            for index, gradient in gradients
            if gradient is not None and not has_dtensors((gradient,))
        ]

    def was_written(self, now: Tensor | None) -> bool:
        """Return whether ``now`` is the same tensor and was written to in place."""
        return now is not None and self.tensor() is now and now._version != self.version

    def is_still(self, before: _Gradient | None) -> bool:
        """Whether it is the same, and has not been written to."""
        if before is None or (self.position, self.version) != (before.position, before.version):
            return False
        return self.tensor() is before.tensor() is not None
