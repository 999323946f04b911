"""The accumulation window: the micro-batches between two steps, their total weight, and the state of their gradients.

With ``accumulation_steps`` (managed accumulation) the number of micro-batches per window is fixed; otherwise the caller
decides when to step. A window has these phases:

    open --begin--> accumulating --complete--> complete --clip--> clipped --close--> open
    open --complete, after `loss.backward()` without the optimizer--> complete
                    a backward that raises --> broken --clear--> open; a step does not end this phase

The gradient of a window is the mean over all of its samples or tokens, however they are distributed over micro-batches
and data ranks:

    grad = sum over data ranks, micro-batches of grad(loss_sum)  /  sum over data ranks, micro-batches of weight

The weight of a micro-batch is the divisor of its summed loss, such as its number of tokens. With the total weight W,
the sum of gradients must be divided by W. The average over D data ranks has divided it by D already, so gradients are
multiplied by D / W. The collective that measures the gradient norm also sums W, and D / W becomes part of the factor
that clips and unscales gradients. The mean of micro-batch means would be another value if micro-batches have different
numbers of tokens. Without weights, gradients are divided by the number of micro-batches in managed accumulation, and
are not divided otherwise. The loss of a micro-batch of weight 0 is multiplied by 0, because its samples don't count.
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
from ..clip.base import Clip
from ..clip.clipper import GradScaleInfo, StepDecision, WindowMean
from ..kernels.device_constants import Constants
from ..norm.packed_sum import PackedSum
from ..norm.powers import accumulation_dtype
from .step_agreement import NO_ERRORS, ErrorFacts

if TYPE_CHECKING:
    from .step_agreement import ParamFacts, StepAgreement

# The window's weight --------------------------------------------------------------------------------------------------

# The total weight of a window over all data ranks is summed in the collective that measures the gradient norm.


class Weight:
    """The sum of the weights of a window's micro-batches on this rank.

    If a weight since the last `clear` was a tensor, ``value`` is the 0-dim tensor ``sum``, else a number. Later windows
    reuse ``sum``, because replays of a CUDA graph add to this tensor. It is replaced only if the first weight tensor of a
    window is on another device.
    """

    def __init__(self) -> None:
        self.value: float | Tensor = 0.0
        self.sum: Tensor | None = None

    def clear(self) -> None:
        self.value = 0.0
        if self.sum is not None:
            self.sum.zero_()

    @torch.no_grad()
    def add(self, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor) and not isinstance(self.value, Tensor):
            if self.sum is None or self.sum.device != weight.device:
                self.sum = torch.zeros((), dtype=accumulation_dtype(weight.device), device=weight.device)
            self.value = self.sum.add_(self.value) if self.value else self.sum
        if isinstance(self.value, Tensor):
            self.value.add_(weight)
        else:
            self.value += weight

    def check_captured(self, weight: float | Tensor) -> None:
        """Raise RuntimeError if a CUDA graph captures the micro-batch and its replays could not add ``weight``."""
        if is_captured() and (self.sum is None or not isinstance(weight, Tensor)):
            raise RuntimeError(
                f"a CUDA graph captures a micro-batch with weight={weight!r}, but replays can only add a tensor to a sum "
                "that existed before the capture: give weight= a 0-dim tensor on the GPU, also in the steps before the "
                "capture, and write new values to this tensor before each replay"
            )


@dataclass(frozen=True)
class WindowPlace:
    """The pipeline stage of a rank and the sizes of the mesh, which are needed to sum micro-batch weights over ranks.

    ``sharers`` is the number of ranks along the model axes. These ranks see the same samples, so they have the same
    weight.
    """

    stages: int
    stage: int
    sharers: int
    data_ranks: int
    constants: Constants = field(default_factory=Constants)


_PLACES: WeakKeyDictionary[ProcessGroupRegistry, WindowPlace] = WeakKeyDictionary()


def place_of(registry: ProcessGroupRegistry) -> WindowPlace:
    place = _PLACES.get(registry)
    if place is None:
        topology = registry.topology
        stage = registry.rank(*topology.pipe_axes) if topology.pipe_axes else 0
        stages, sharers = topology.size(*topology.pipe_axes), topology.size(*topology.model_axes)
        place = WindowPlace(stages, stage, sharers, topology.size(*topology.data_axes))
        _PLACES[registry] = place
    return place


def window_fields(
    weight: float | Tensor,
    registry: ProcessGroupRegistry,
    device: torch.device,
    bypassed: float | None = None,
    agreement: int | None = None,
) -> PackedSum:
    """Return this rank's summands of up to three fields, which the collective of the gradient norm sums over all ranks.

    The field ``"window_weight"`` has one float64 value per pipeline stage. Ranks along the model axes have the same
    weight, so each of these ranks adds the weight divided by their number. Stages that compute no loss have no weight
    and add 0.

    ``bypassed`` is negative if gradients on this rank bypassed the optimizer. ``agreement`` is the result of
    `StepAgreement.number`. With None, the field does not exist. The tensor of the result may be cached, so do not write
    to it.
    """
    place = place_of(registry)
    found = {name: number for name, number in (("agreement", agreement), ("bypassed", bypassed)) if number is not None}
    more, sizes = list(map(float, found.values())), {"window_weight": place.stages, **dict.fromkeys(found, 1)}
    if not isinstance(weight, Tensor) and not is_captured():  # each replay of a graph would repeat the copy
        own = [0.0] * place.stages
        own[place.stage] = weight / place.sharers
        values = [*own, *more]
        return PackedSum(place.constants(tuple(values), values.copy, torch.float64, device), sizes)
    slots = torch.zeros(place.stages + len(more), dtype=torch.float64, device=device)
    # `slots[...] = number` would be a copy from the host in torch 2.11.
    slots[place.stage].fill_(weight / place.sharers)
    for at, number in enumerate(more, place.stages):
        if number:
            slots[at].fill_(number)
    return PackedSum(slots, sizes)


# Gradients that a pipeline schedule divides twice ---------------------------------------------------------------------

# With ``scale_grads=True`` every stage of `torch.distributed.pipelining` divides its parameters' gradients by the
# number of micro-batches at the end of the schedule. This is wrong for gradients that were divided before: if the
# schedule runs several times in a window, or if two stages of this rank share a parameter.


@contextmanager
def detect_double_division(window: Window, params: Sequence[Tensor]) -> Iterator[None]:
    """Return a context manager around a pipeline schedule's step, which detects gradients that are divided twice.

    It sets ``window.divided_twice`` to True if a pipeline stage divides a gradient that was divided before. While its
    body runs, it replaces torch's ``scale_grads`` in all stages.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        yield
        return
    kind: Any = module._PipelineStageBase  # the base class of stages; there is no public hook for the division
    divide = kind.scale_grads
    before = params if window.micro_batches > 1 else ()
    divided = {id(param) for param in before if param.grad is not None}

    def scale_grads(stage: Any, factor: int) -> None:
        divide(stage, factor)
        own = {id(param) for param in stage.submod.parameters() if param.grad is not None}
        window.divided_twice |= factor != 1 and bool(divided & own)
        divided.update(own)

    kind.scale_grads = scale_grads
    try:
        yield
    finally:
        kind.scale_grads = divide


# The window -----------------------------------------------------------------------------------------------------------

Phase = Literal["open", "accumulating", "complete", "clipped", "broken"]


class Window:
    """The accumulation window: the micro-batches since the last step, their total weight, and the phase of their gradients.

    An explicit clip is a call such as `ParallelOptimizer.clip_grad_by_norm` before `step`.

    Args:
        steps: Micro-batches per window (``accumulation_steps``); None: the caller decides when to step.
        scaled: True if every loss must be multiplied by a loss scale.
        alone: True if there is one rank.

    Attributes:
        phase: "open": no micro-batch yet. "accumulating": a micro-batch has begun. "complete": gradients are reduced.
            "clipped": an explicit clip has clipped them. "broken": a backward raised.
        micro_batches: The number of micro-batches so far, including micro-batches without a loss.
        calls: The number of micro-batches and `scale_loss` calls in this window; 0: all new gradients bypassed the
            optimizer.
        scaled_losses: The number of losses that `scale_loss` or `backward` multiplied by the loss scale in this window.
        unscaled_grads: The result of `has_bypassed_grads` at the end of a window with a loss scale.
        several: True if the current micro-batch may have several backward calls.
        micro_batch_weight: The weight of the micro-batch that runs; None: none runs, or it has no weight.
        captured: True if a CUDA graph captures the latest step or explicit clip.
        scale: The loss scale that the window's gradients contain; None: no loss scale.
        sync_skipped: True if gradient reduction in backward was turned off for the last micro-batch.
        reduced: True if a backward of this window has reduced gradients, or if gradients were moved out of the parameters
            during or after it.
        pending_clip: The clipping rule of an explicit clip before the window was full, which `step` applies; or None.
        decision: The step decision of an explicit clip in this window; or None.
        explicit: The rules of the window's explicit clips, in the order of the calls.
        has_stale_grads: True from the reduction of a window's gradients until gradients are cleared.
        saw_grads: True after a backward has left a gradient on this rank, in this or an earlier window.
        divided_twice: True after a pipeline schedule has divided gradients that were divided before.
        grads_checked: True after all ranks have checked the gradients of a window together, in the first step.
        error: The error of `defer` in this window; None: no error.
        failed: The number of steps and explicit clips in which this rank raised an error at once (`ErrorFacts.failed`).
        last_failure: The class name and text of the last of these errors; empty: there was none.
    """

    def __init__(self, steps: int | None, scaled: bool = False, alone: bool = True) -> None:
        if steps is not None and not is_whole(steps, 1):
            raise ValueError(
                f"accumulation_steps={steps!r}: give a whole number >= 1, or None, so that every call of step() updates "
                "the weights"
            )
        self.steps, self.scaled, self.alone = steps, scaled, alone
        self.failed, self.last_failure = 0, ""
        self.has_stale_grads = self.sync_skipped = self.saw_grads = self.divided_twice = False
        self.several = self.captured = self.entered = self.grads_checked = False
        self.micro_batch_weight: float | Tensor | None = None
        self.scale: Tensor | None = None
        self._stepped_with: _Gradient | None = None
        self._weight = Weight()
        self._fields: tuple[tuple[object, ...], PackedSum, WindowPlace] | None = None
        self._facts: int | None = None  # the value of the field "agreement" in the cached fields
        self._watched: _OtherBackward | None = None
        self.close()

    def close(self, params: Sequence[Tensor] = ()) -> None:
        """Start an empty window, after a step or when the window is abandoned.

        After a step, the last gradient in ``params`` is recorded, so that `has_bypassed_grads` recognizes a gradient
        that the step did not clear.
        """
        if params:
            self._stepped_with = _Gradient.last_of(params)
        self.phase: Phase = "open"
        self.micro_batches = 0
        self.calls = self.scaled_losses = 0
        self._left_grads = False  # a micro-batch of this window has left a gradient on this rank
        self.unscaled_grads = False
        if self.has_weight or self._weight.sum is not None:
            self._weight.clear()
        self.reduced = False
        self.pending_clip: Clip | None = None
        self.decision: StepDecision | None = None
        self.explicit: tuple[Clip | None, ...] = ()
        self.error: Exception | None = None
        self._weighted: bool | None = None
        self._with_gradient: list[int] = []
        self._recorded: list[_Gradient] = []
        self._stop_watching()
        self._handled: BaseException | None = None  # the exception being handled when the last micro-batch began

    def close_after_step(self, params: Sequence[Tensor]) -> None:
        """Start an empty window after a step. If this window is broken, the new one is too. ``params`` as in `close`."""
        is_broken = self.phase == "broken"
        self.close(params)
        self.phase = "broken" if is_broken else "open"

    def clear(self) -> None:
        """Start an empty window after all gradients were cleared."""
        self.has_stale_grads = False
        self._stepped_with = None
        self.close()

    def has_bypassed_grads(self, params: Sequence[Tensor]) -> bool:
        """Return True if this rank has gradients from a backward that bypassed the optimizer's `backward` and `window`.

        Without a loss scale, the result is False after any micro-batch or `scale_loss` call of this window. With a loss
        scale, it is False after any loss of this window was multiplied by the scale. Gradients that the last step
        left do not count.
        """
        if self.scaled_losses if self.scaled else self.calls:
            return False
        found = _Gradient.last_of(params)
        if found is None:
            return self.reduced and self._left_grads  # a reduction in backward has moved the gradients
        return not found.is_still(self._stepped_with)

    def count_written(self, params: Sequence[Tensor]) -> tuple[int, int]:
        """Return the numbers of gradients written in place since the last micro-batch, and of observed gradients."""
        written = [before for before in self._recorded if before.was_written(params[before.position].grad)]
        return len(written), len(self._recorded)

    def forget_gradients(self) -> None:
        """Stop observing writes to this window's gradients, so that `count_written` returns (0, 0)."""
        self._recorded = []

    @property
    def weight(self) -> float | Tensor:
        return self._weight.value

    @property
    def has_weight(self) -> bool:
        weight = self._weight.value
        return isinstance(weight, Tensor) or weight != 0

    @property
    def is_weighted(self) -> bool:
        """Return True if the micro-batches so far were given weights, including weights of 0."""
        return bool(self._weighted)

    def number_of_facts(
        self, agreement: StepAgreement, params: ParamFacts, device: torch.device
    ) -> tuple[int, Tensor | None]:
        """Return this rank's summands of the field ``"agreement"``: an integer, and a 0-dim float64 tensor or None.

        The sum over ranks is 0 if their settings agree and no rank has deferred an error. If the settings can't be
        read, the error is deferred. ``device`` is the device of the tensor.
        """
        weight = self.weight if self.is_weighted else None
        try:
            number = agreement.number(self.micro_batches, weight, params, self.explicit, self._errors())
            return number, agreement.of_tensors(device)
        except Exception as error:  # of any type, because a hyper-parameter may be any object
            self.defer(error)
            return agreement.number_of_errors(self._errors()), None

    @property
    def mean_of(self) -> int:
        """Return the divisor of the window's summed gradients if no micro-batch of any rank was given a ``weight=``."""
        return 1 if self.steps is None else max(1, self.micro_batches)

    @property
    def is_full(self) -> bool:
        return self.steps is None or self.micro_batches >= self.steps

    def not_captured(self, device: torch.device) -> Iterator[str]:
        if not self.is_full:
            yield (
                f"{self.micro_batches} of accumulation_steps={self.steps} micro-batches have run, and replays would not "
                "count them: capture all micro-batches of a step in one graph, or leave accumulation_steps out and call "
                "step only in the graph of the last micro-batch"
            )
        if isinstance(self.weight, Tensor) and self.weight.device != device:
            yield f"the sum of weight= is on {self.weight.device}: give backward weight= tensors on {device}"

    @property
    def is_unused(self) -> bool:
        return self.steps is not None and not self.micro_batches

    @property
    def next_is_last(self) -> bool:
        return self.steps is not None and self.micro_batches % self.steps == self.steps - 1

    def ends(self, final: bool, may_defer: bool = False) -> bool:
        """Return True if a call of `step` ends the window now; False if `step` must do nothing.

        With ``final``, the window may end with fewer micro-batches than ``steps``, but at least one. If a backward of
        the window raised, this function raises too; with ``may_defer``, an error of a window that ends is deferred to
        the end of the step.
        """
        ends = self.is_full or (final and self.micro_batches > 0)
        if self.phase == "broken":
            if ends and may_defer:
                self.defer(self._broken_error(is_skipped=True))
                return True
            error = self._broken_error()
            if ends:
                self.count_failure(error)
            raise error
        return ends

    def may_clear(self) -> bool:
        """Return True if `zero_grad` may clear gradients now.

        With ``accumulation_steps``, the result is False after the first micro-batch of a window, unless the window is
        abandoned: a backward raised, or the caller is in an ``except`` block for an error that was raised after the
        last micro-batch began.
        """
        if self.steps is None or not self.micro_batches or self.phase == "broken":
            return True
        return sys.exc_info()[1] not in (None, self._handled)

    def scale_info(
        self,
        registry: ProcessGroupRegistry,
        scale: Tensor | None,
        device: torch.device,
        is_summed: bool,
        facts: int | None = None,
        facts_of_tensors: Tensor | None = None,
    ) -> GradScaleInfo:
        """Return the divisors of this window's gradients: the loss scale, and the total weight or number of micro-batches.

        After an explicit clip, gradients are already divided. The result then only reports the loss scale.

        ``is_summed`` is as in `mean`.
        ``facts`` and ``facts_of_tensors`` are the results of `number_of_facts`; the second is added to the first.
        """
        alone, vote = registry.topology.world_size == 1, None
        if self.scaled and not (alone and self.scaled_losses):  # else the field is not needed
            vote = _SCALED if self.scaled_losses else -1.0 if self.unscaled_grads else 0.0
        done = self.decision is not None  # an explicit clip has already divided the gradients
        pack, place = self._fields_of(self.weight, vote, registry, device, facts)
        if facts_of_tensors is not None:
            pack = replace(pack, values=pack.values.clone())
            pack.split(pack.values)["agreement"] += facts_of_tensors
        # With several ranks it always divides, because another rank may have weights.
        divides = not done and not (alone and self.mean_of == 1 and not self.has_weight)
        mean = self.mean(place.data_ranks, is_summed) if divides else None
        return GradScaleInfo(pack, None if done else scale, mean, scale)

    def mean(self, data_ranks: int, is_summed: bool) -> WindowMean:
        """Return the mean that the window's gradients must become after their reduction over ``data_ranks`` ranks.

        With ``is_summed``, the reduction sums over the ranks, as with ``sum_order="fixed"``; otherwise it averages.
        """
        return WindowMean(1, self.mean_of * data_ranks) if is_summed else WindowMean(data_ranks, self.mean_of)

    def _fields_of(
        self,
        weight: float | Tensor,
        vote: float | None,
        registry: ProcessGroupRegistry,
        device: torch.device,
        facts: int | None,
    ) -> tuple[PackedSum, WindowPlace]:
        """Return the result of `window_fields`, and this rank's `WindowPlace`."""
        if self.captured or isinstance(weight, Tensor):
            return window_fields(weight, registry, device, vote, facts), place_of(registry)
        key = weight, vote, registry, device, facts is None
        if self._fields is None or self._fields[0] != key:
            pack, place = window_fields(weight, registry, device, vote, facts), place_of(registry)
            if facts is not None:
                pack = replace(pack, values=pack.values.clone())
            self._fields, self._facts = (key, pack, place), facts
        _, pack, place = self._fields
        if facts is not None and facts != self._facts:  # e.g. after a change of the learning rate
            self._facts = facts
            pack.split(pack.values)["agreement"].fill_(facts)
        return pack, place

    # Errors of this rank ---------------------------------------------------------------------------------------------

    # An error of one rank takes one of five routes through `ParallelOptimizer.step`. Except on the first route, the rank
    # raises the error at the end of the step, because other ranks would wait in the remaining collectives.
    #
    # | route                                 | example                   | result on all ranks                        |
    # |---------------------------------------|---------------------------|--------------------------------------------|
    # | raised at once, then `count_failure`  | a converted parameter     | all later steps are skipped, unless every  |
    # |                                       |                           | rank raised an error                       |
    # | `defer`                               | unusable master weights   | the step is skipped: `ErrorFacts`          |
    # | returned by `GradientCompletion`      | a sparse gradient         | the step is skipped: NaN in the gradient   |
    # |                                       | an unfrozen parameter     | the step is skipped: `ParamFacts`          |
    # | `StepDecision.problem`                | an exception in `commit`  | the step is skipped: the rank's vote       |
    # | `TransformChain.take_error`           | an exception in           | the step is taken                          |
    # |                                       | `StepObserver.update`     |                                            |

    def defer(self, error: Exception) -> None:
        """Record an error of this rank: the step is skipped on all ranks, and this rank raises the error at its end.

        If the rank raised at once, the other ranks would wait in the collectives of the step. With one rank, the error
        is raised at once. Only the first error of a window is recorded.
        """
        if self.alone:
            raise error
        self.error = self.error or error

    def take_error(self) -> Exception | None:
        error, self.error = self.error, None
        return error

    def count_failure(self, error: Exception) -> None:
        """Count an error that this rank raises at once, from `step` or an explicit clip.

        If other ranks raised no error, all ranks skip all later steps, because the steps of the other ranks no longer
        correspond to those of this rank, or their weights differ.
        """
        self.failed, self.last_failure = self.failed + 1, _error_text(error)

    def _errors(self) -> ErrorFacts:
        error = self.error or (self._broken_error() if self.phase == "broken" else None)
        if error is None and not self.failed:
            return NO_ERRORS
        return ErrorFacts(None if error is None else _error_text(error), self.failed, self.last_failure)

    # Micro-batches ---------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(
        self,
        weight: float | Tensor | None,
        params: Sequence[Tensor],
        around: Sequence[Callable[[Window], AbstractContextManager[None]]],
        several: bool = False,
    ) -> Iterator[None]:
        """Return a context manager around the backward of one micro-batch. If the backward raises, the window is broken."""
        if self.entered:
            raise RuntimeError(
                "optimizer.backward() or optimizer.window() was called within optimizer.window(), which would count one "
                "micro-batch twice: use only one of them per micro-batch. Within window(), write "
                "optimizer.scale_loss(loss).backward()"
            )
        self.begin(weight, params)
        self.several, self.entered, self.micro_batch_weight = several, True, weight
        try:
            with ExitStack() as stack:
                if several:
                    stack.enter_context(detect_double_division(self, params))
                for enter in around:
                    stack.enter_context(enter(self))
                yield
                self._left_grads = self._left_grads or any(param.grad is not None for param in params)
                self.saw_grads = self.saw_grads or self._left_grads
        except BaseException:
            self.phase = "broken"
            raise
        finally:
            self.entered, self.micro_batch_weight = False, None
        if not self.grads_checked:
            self._recorded = _Gradient.all_of(params)
        if self.steps != 1:
            self._with_gradient = [index for index, param in enumerate(params) if param.grad is not None]
        if self.steps is not None and not self.is_full:
            self._watch(params)

    def mask_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss``, times 0 if the running micro-batch has the weight 0. No host synchronization.

        The backward of such a loss must still run, because other ranks may wait in collectives of the backward.
        """
        weight = self.micro_batch_weight
        if isinstance(weight, Tensor):
            return loss * (weight != 0)
        return loss * 0 if weight is not None and weight == 0 else loss

    def begin(self, weight: float | Tensor | None, params: Sequence[Tensor]) -> None:
        """Count one micro-batch before its backward, and add its weight to the window's weight.

        ``weight`` is the divisor of the summed loss, such as the number of tokens. None: the loss is a mean. With
        ``accumulation_steps``, gradients are then divided by the number of micro-batches; otherwise they are not
        divided.

        Raises:
            ValueError: The window is full; only some of its micro-batches have a weight; or the weight is a number that
                is negative or not finite.
            TypeError: The weight is neither a number nor a 0-dim tensor.
            RuntimeError: The gradients have been clipped; an earlier backward raised; gradients were cleared within the
                window; with ``accumulation_steps``, a backward bypassed the optimizer since the last micro-batch; or a
                CUDA graph captures the micro-batch, and its replays could not add the weight.
        """
        if self.phase == "clipped":
            raise RuntimeError(
                "backward was called after the gradients of this step had been clipped: call step() before the next "
                "backward, and clip only after the last micro-batch of a step"
            )
        if self.phase == "broken":
            raise self._broken_error()
        self._check_gradients(params)
        self._count(weight)
        self.phase, self.sync_skipped = "accumulating", False
        self.calls += 1
        self._handled = sys.exc_info()[1]

    def _count(self, weight: float | Tensor | None) -> None:
        if self.steps is not None and self.micro_batches >= self.steps:
            raise ValueError(
                f"this step already has all its micro-batches (accumulation_steps={self.steps}): call step() before the "
                "next backward"
            )
        if self._weighted not in (None, weight is not None):
            raise ValueError(
                "some micro-batches of this step have a weight (their losses are sums), and others have none (means), so "
                "their gradients can't be added: give weight= to every backward of a step, or to none. A micro-batch "
                "without samples has the weight 0: backward(None, weight=0)"
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
        self.phase, self.sync_skipped = "broken" if self.phase == "broken" else "complete", False

    def clipped(self, decision: StepDecision) -> None:
        self.phase, self.decision = "broken" if self.phase == "broken" else "clipped", decision

    def _check_gradients(self, params: Sequence[Tensor]) -> None:
        for index in self._with_gradient:
            if params[index].grad is None:
                raise RuntimeError(
                    f"gradients were cleared after micro-batch {self.micro_batches} of this step (parameter {index}, shape "
                    f"{tuple(params[index].shape)}), for example by module.zero_grad() or another optimizer: clear "
                    "gradients only with zero_grad() of this optimizer. To abandon this step, call optimizer.zero_grad() "
                    "in the `except` block of this error"
                )
        if self._watched is not None and self._watched.has_added(params):
            raise RuntimeError(
                f"loss.backward() was called after micro-batch {self.micro_batches} of {self.steps}, and added gradients "
                "of a micro-batch that the optimizer did not count: write optimizer.backward(loss) for every micro-batch. "
                "To abandon this step, call optimizer.zero_grad() in the `except` block of this error"
            )
        self._stop_watching()

    def _watch(self, params: Sequence[Tensor]) -> None:
        """Register a hook on the last parameter with a gradient, to detect a backward before the next micro-batch.

        A changed gradient alone does not prove a backward, because a script may clip or mask gradients between
        micro-batches.
        """
        last = _Gradient.last_of(params, trained=True)
        if last is not None:
            self._watched = _OtherBackward(last)
            self._remove_hook = params[last.position].register_post_accumulate_grad_hook(self._watched).remove

    def _stop_watching(self) -> None:
        if self._watched is not None:
            self._remove_hook()
            self._watched = None

    def _broken_error(self, is_skipped: bool = False) -> RuntimeError:
        """Return the error for a broken window. ``is_skipped``: all ranks skip the step, and this rank raises the error."""
        cause = "a backward since the last step raised an error, so the accumulated gradients are incomplete"
        repeat = "call optimizer.zero_grad() on all ranks, and repeat all micro-batches since the last step"
        if self.alone:
            return RuntimeError(f"{cause}: {repeat}")
        if is_skipped:
            return RuntimeError(
                f"{cause}. All ranks skip this step, and raise an error within 16 steps: catch both errors and go on with "
                "the next micro-batch, or resume from a checkpoint"
            )
        return RuntimeError(
            f"{cause}. If the backward raised on every rank, {repeat}. If it raised on this rank only, call step() as the "
            "other ranks do, and all ranks skip the step; with accumulation_steps= or data_parallel=, resume from a "
            "checkpoint instead"
        )


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# The value of the field "bypassed" on a rank that has scaled a loss. A rank with only unscaled gradients adds -1. So the
# sum over fewer than 2^30 ranks is > 0 if any rank has scaled a loss.
_SCALED = 2.0**30


class _OtherBackward:
    """A hook on a parameter that records that a backward ran. It keeps no reference to the window, to avoid a cycle.

    The record ``before`` has the last parameter's gradient when the hook was registered. A backward is accepted if this
    gradient is unchanged afterwards; for example, `prove` restores gradients.
    """

    def __init__(self, before: _Gradient) -> None:
        self._before, self._has_come = before, False

    def __call__(self, _: Tensor) -> None:
        self._has_come = True

    def has_added(self, params: Sequence[Tensor]) -> bool:
        """Return True if, after the hook was registered, a backward ran and the last gradient in ``params`` changed."""
        after = _Gradient.last_of(params, trained=True)
        return self._has_come and (after is None or not after.is_still(self._before))


class _Gradient(NamedTuple):
    """A record of a gradient: the index of its parameter, a weak reference to it, and its version counter."""

    position: int
    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def last_of(cls, params: Sequence[Tensor], trained: bool = False) -> _Gradient | None:
        """Return the record of the gradient of the last parameter that has a gradient; None: no parameter has one."""
        for index in range(len(params) - 1, -1, -1):
            gradient = params[index].grad
            if gradient is not None and (params[index].requires_grad or not trained):
                return cls(index, weakref.ref(gradient), gradient._version)
        return None

    @classmethod
    def all_of(cls, params: Sequence[Tensor]) -> list[_Gradient]:
        gradients = ((index, param.grad) for index, param in enumerate(params))
        return [
            cls(index, weakref.ref(gradient), gradient._version)
            for index, gradient in gradients
            if gradient is not None and not has_dtensors((gradient,))
        ]

    def was_written(self, now: Tensor | None) -> bool:
        return now is not None and self.tensor() is now and now._version != self.version

    def is_still(self, before: _Gradient | None) -> bool:
        if before is None or (self.position, self.version) != (before.position, before.version):
            return False
        return self.tensor() is before.tensor() is not None
