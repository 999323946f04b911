"""The order of a step's stages: complete the gradients -> measure -> decide -> count -> update."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, overload

import torch
from torch import Tensor, nn

from ..amp.by_name import Mode, precision_of
from ..amp.precision import Precision
from ..parallel.interop.transformers import registry_of
from ..parallel.mesh.call_tracker import public_call, track_call
from ..parallel.mesh.registry import ProcessGroupRegistry
from .build import AllOptions, Setup, Stats_co, as_one, check_loss, wrong_arguments
from .capture import check_captured
from .clip.clipper import Divisor, Verdict
from .clip.rule import ByNorm, Clip
from .clip.rules import ByValue, Given, in_use
from .clip_now import clip_now, clip_or_ask
from .facade import OptimizerFacade
from .norm.measure import GradStats, Measure
from .states.chain import Placement, named_params_of
from .step.call_guard import guard_calls
from .step.combined_optimizer import unchanged
from .step.data_parallel import Reduce
from .step.first_window_checks import check_window_is_used
from .step.skips import OnNonfinite, SkipMonitor
from .step.stopped import stopped
from .step.update_request import UpdateRequest
from .step.window import Window

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ParallelOptimizer(OptimizerFacade, Generic[Stats_co]):
    """Steps a torch optimizer by the exact global gradient norm of a model that is split over a mesh.

        optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters(), fused=True), registry, max_norm=1.0)
        optimizer.backward(loss)
        stats = optimizer.step()
        optimizer.zero_grad()

    `step` completes the gradients (data axes averaged, pending sums made, tied copies combined), measures them, clips,
    and steps the wrapped optimizer, on every rank or on none: a norm that is not finite skips the step everywhere. Every
    rank must construct it at the same point with its own part of the model (a rank that has none gives
    ``[{"params": []}]``), and call the same methods in the same order.

    A parameter that is frozen when the optimizer is made has no part in any collective, and to unfreeze it later is an
    error; one that is frozen later, on all ranks, is left out of the steps from then on.

    Args:
        optimizer: A torch optimizer over declared parameters. Adam, AdamW, SGD and Adagrad with ``fused=True`` take the
            factor and the skip on the device; any other costs one pass over the gradients and one host read a step.
            In modes with master weights its param groups then hold the masters, and in the place of DTensor parameters
            (`fully_shard`, `parallelize_module`; see `meshstep.parallel.interop.dtensor`) their local tensors. Or a list of
            optimizers, with no parameter in two: one norm, one verdict, one state; ``"optimizer"`` in a group says whose.
            While the `ParallelOptimizer` lives, ``optimizer.step()`` is a RuntimeError; ``zero_grad``, ``load_state_dict``,
            ``add_param_group``, ``train`` and ``eval`` of ``optimizer`` call the method of the `ParallelOptimizer`.
        registry: The groups of the mesh that the specs name.
        max_norm: Clip the global norm to this; in unscaled gradient units, finite, > 0. Or another rule (`Clip`), or by
            name (`ByName`). None: measure only. A param group with its own ``"max_norm"`` is clipped by that (``math.inf``:
            not at all), the others by theirs together; ranks agree on these here, and change them if all have all groups.
        precision: The mode's name or object (`meshstep.amp`). ``precision.prepare(model)`` makes the model run in it;
            here it says whether there are master weights and a loss scale.
        accumulation_steps: K: manage windows of K micro-batches, each a `backward`; `step` and `zero_grad` do nothing
            before the K-th, and the gradient is the mean over the window. None: gradients add up until you call `step`.
        data_parallel: The `DistributedDataParallel` (torch's, Megatron's) or `fully_shard` module that averages gradients,
            in the last micro-batch of a window; a list where a rank has several pipeline stages. None: `step` averages,
            in a few collectives, also what `fully_shard` left. `Reduce` says how, or that others do.
        states: Where optimizer states and masters are kept: `Sharded`, `Offloaded`, both, or a `Placement` of your own.
            The param groups then hold what is stepped; see `pieces`.
        measure: What ranks find out together in each step, and who may refuse it; see `Measure`.
        on_nonfinite: ``"skip"`` the step on every rank (`Skip` says how many in a row are an error), or ``"raise"``
            FloatingPointError on every rank with the parameters' names (one host read a step).

    Raises:
        ValueError, TypeError: On every rank, when an argument is out of range or when, on any rank, a parameter is
            undeclared, complex, sparse or laid out in a way that does not fit; when ranks declare different things.
            The optimizer is left as it was.
    Collectives: here, object all-gathers. A step: one all-reduce a bucket of gradients, and one to measure. Host reads:
    none in a step but where said above, and on the first one, which checks on all ranks that gradients are dense and real.
    """

    @overload
    def __init__(
        self: ParallelOptimizer[GradStats],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        registry: ProcessGroupRegistry,
        *,
        accumulation_steps: None = None,
        **options: Unpack[AllOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ParallelOptimizer[GradStats | None],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        registry: ProcessGroupRegistry,
        *,
        accumulation_steps: int | None,
        **options: Unpack[AllOptions],
    ) -> None: ...
    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        registry: ProcessGroupRegistry,
        *,
        max_norm: Given = None,
        precision: Mode | Precision = "fp32",
        accumulation_steps: int | None = None,
        data_parallel: nn.Module | Sequence[nn.Module] | Reduce | None = None,
        states: Placement | Sequence[Placement] = (),
        measure: Measure = Measure(),  # noqa: B008 (frozen)
        on_nonfinite: OnNonfinite = "skip",
        **removed: object,
    ) -> None:
        optimizer = as_one(optimizer, registry)
        super().__init__(optimizer)
        self.registry, self.on_nonfinite = registry, on_nonfinite
        given = (registry, max_norm, precision, accumulation_steps, data_parallel, states, measure, on_nonfinite)
        self._setup = Setup(optimizer, *given, wrong_arguments(removed, optimizer, ParallelOptimizer))
        self._groups = [named_params_of([group]) for group in self.param_groups]
        with unchanged(optimizer):
            self._plan, thresholds, self._agreement = self._setup.agreed_plan(self._groups)
        self._clip, self.precision = in_use(max_norm), precision_of(precision)
        self._device = self._setup.device_of(self._groups)
        self.loss_scale = self.precision.make_loss_scale(self._device)
        self._window: Window[Clip, Verdict] = Window(accumulation_steps, scaled=self.loss_scale is not None)
        self._scale = None if self.loss_scale is None else self.loss_scale.scale
        self._scaled_loss: weakref.ref[Tensor] | None = None  # the last result of scale_loss
        self._states = self._setup.chain(self.precision)
        self._bind(thresholds)
        self._skips = SkipMonitor(self._device)
        self.last_stats: GradStats | None = None
        guard_calls(optimizer, self)

    @classmethod
    def for_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> ParallelOptimizer[Any]:
        """Of a Transformers model that `from_pretrained` has split: on its `meshstep.parallel.registry_of`, which says the
        rest, and ``data_parallel=model`` where it is fully sharded."""
        sharded = {"data_parallel": model} if hasattr(model, "set_requires_gradient_sync") else {}
        return cls(optimizer, registry_of(model), **sharded | options)

    # The window ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for code that calls backward itself (a pipeline's last stage), within `window`.

        Args:
            loss: 0-dim; float32 or float64 in modes with a loss scale, or it is cast: scaled half types overflow. Returned
                as it is in modes without.
        Raises TypeError where it is no tensor.
        """
        check_loss(loss, "scale_loss")
        self._window.calls += 1
        if self.loss_scale is None:
            return loss
        scaled = (loss if loss.dtype == torch.float64 else loss.float()) * self.loss_scale.scale
        self._scaled_loss = weakref.ref(scaled)
        return scaled

    def backward(self, loss: Tensor | None, *, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Scale the loss and call backward, with ``kwargs``: one micro-batch. Gradients add up.

        Args:
            loss: 0-dim; None on a rank that has nothing to compute in this micro-batch. None is a loss of 0: it counts as
                a micro-batch, so without weights the mean is over all data ranks and micro-batches, this one among them.
                For the mean over the other data ranks give weights everywhere, and 0 with None.
            weight: What the window's summed losses are divided by, all together and over all data ranks: give a loss
                that is a sum, and e.g. its number of tokens. A number or a 0-dim tensor (which is not read by the host);
                the same on ranks that share a data coordinate. None: the loss is a mean, see ``accumulation_steps``.
        Every rank of a pipeline stage makes equally many calls before `step`; with weights, only ranks of one data
        coordinate must. A difference skips the step, see `step`.

        Raises:
            TypeError: The loss is no tensor, or the weight no number.
            ValueError: Only some micro-batches of a window have a weight, or it is negative.
            RuntimeError: Other code cleared gradients in the middle of a window or, in managed accumulation, called
                ``loss.backward()`` there; the gradients have been clipped already; an earlier backward of the window raised
                (`zero_grad` then gives the window up); the loss is what `scale_loss` returned; it is within `window`.
        Collectives: those of the model's and data_parallel's backward, of `Sharded` and `Reduce`. Host reads: none.
        """
        if loss is not None:
            check_loss(loss, "backward")
        if loss is not None and self._scaled_loss is not None and self._scaled_loss() is loss:
            raise RuntimeError(
                "the loss is scaled already: give backward(loss) the loss itself, which it multiplies by the loss scale; "
                "scale_loss(loss) is for code that calls backward itself, within `with optimizer.window():`"
            )
        with track_call("backward", self.registry):
            try:
                with self._micro_batch(weight):
                    if loss is not None:
                        loss = loss if self.loss_scale is None else self.scale_loss(loss)
                        loss.backward(**kwargs)
            except Exception as error:
                self._states.explain(error)
                raise

    @contextmanager
    def window(self, *, weight: float | Tensor | None = None) -> Iterator[None]:
        """Around backward calls that others make; all of them are one micro-batch. `Pipeline` is it for a schedule.

            with optimizer.window():
                engine.train_batch(inputs)  # its loss function ends with optimizer.scale_loss(loss)
            optimizer.step()

        Args, raises, collectives, host reads: as `backward`. On every rank, whatever it computes.
        """
        with track_call("window", self.registry), self._micro_batch(weight, several=True):
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is reduced in backward: for all micro-batches but the last, where you decide when to step. Forward and
        backward both belong inside."""
        return nullcontext() if self._switch is None else self._switch.off()

    def window_ends(self) -> None:
        """Say before a forward that its micro-batch is the last of the window, though it is not the K-th. Without it
        ``step(last=True)`` is right too, but for `fully_shard`, which can't reduce its gradients later."""
        if self._switch is not None:
            self._switch.set(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, of the model's parameters too where there are masters. Nothing happens in the middle of a
        window of managed accumulation, unless a backward of it raised, or within ``except``, where an error has come since
        its last micro-batch: that gives it up. RuntimeError where `fully_shard` has some unreduced.
        """
        if self._window.may_clear():
            if self._switch is not None:
                self._switch.check_clearing(self._window.left_out)
            self._states.clear(set_to_none)
            self._window.clear()
            if self._switch is not None:
                self._switch.clear()
                self._switch.expect(self._window)

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, *, last: bool = False) -> Stats_co:  # type: ignore[override]
        """Complete, measure and clip the gradients, and step; or skip on every rank. Then update the loss scale.

        Args:
            last: Step now though fewer than ``accumulation_steps`` micro-batches have come: the tail of an epoch. Its
                gradient is the mean over those that have.
        Returns: GradStats, device tensors; None in the middle of a managed window, where nothing is done.
        Raises:
            FloatingPointError: On every rank: with ``on_nonfinite="raise"``; or too many steps in a row were skipped.
            ReplicaMismatchError: On every rank, with ``Measure(check_replicas=True)``, or `Fingerprints` (16 steps late).
            TypeError: A gradient is complex or sparse; later than in the first step only on the rank that has it.
            ValueError: A closure is given.
            RuntimeError: torch's own GradScaler calls it; `fully_shard` has not reduced the window's gradients (see
                `window_ends`); a backward of the window raised; a parameter was unfrozen that was frozen when the optimizer
                was made. On every rank: there are no gradients in the first step, or they did not come through `backward`
                or `window` (with a loss scale, from the second step on, 16 steps late; those with them were skipped).
                Ranks made different numbers of micro-batches, some gave weights, or they differ in weights, clipping,
                hyper-parameters or frozen parameters: such a step is skipped, and the error follows 16 steps late, in the
                first step and with ``on_nonfinite="raise"`` at once.
        Collectives, host reads: as the class says.
        """
        if closure is not None:
            raise ValueError("step takes no closure: a skipped step can't be evaluated again; call backward, then step")
        with track_call("step", self.registry):
            try:
                return self._stages(last)
            except Exception as error:
                self._states.explain(error)
                raise

    def _stages(self, last: bool) -> Stats_co:
        window = self._window
        window.captured = torch.cuda.is_initialized() and check_captured(self, "step")
        scale = self._scale if not hasattr(self, "found_inf") else self._scale_of_scaler()
        if not window.ends(last):
            if window.is_unused:
                check_window_is_used(window, self._model_params, self.registry)
            return None  # type: ignore[return-value]
        if window.asked is not None and window.verdict is None:
            clip_now(self, window.asked)
        problem = self._completion(window, self._switch)
        verdict = window.verdict or self._clipping(self._clip, self._divisor(scale), captured=window.captured)
        stats = verdict.stats
        facts = None if self._agreement is None else self._agreement.sent
        reason = self._skips.count(verdict, self.on_nonfinite, window.captured, facts)
        if reason is None:
            self._engine.run(UpdateRequest(verdict.skipped, verdict.factor), self._states.around_update)
        if self.loss_scale is not None:
            self.loss_scale.update(stats.found_inf)  # only now: gradients were divided by the scale that backward used
        self.last_stats = stats
        window.close(self._model_params)
        if self._switch is not None:
            self._switch.expect(window)
        if reason is not None:
            raise stopped(
                reason, self._clipping, self._agreement, self._skips
            )  # whoever catches it goes on with a lower loss scale
        if problem := problem or verdict.problem:
            raise problem
        return stats  # type: ignore[return-value]

    def _divisor(self, scale: Tensor | None) -> Divisor:
        """Return what the window's gradients are divided by, with this rank's part of the slot of facts."""
        window, agreement = self._window, self._agreement
        if agreement is None:
            return window.divisor(self.registry, scale, self._device)
        facts = window.number_of_facts(agreement, self._completion.changed)
        return window.divisor(self.registry, scale, self._device, facts, agreement.of_tensors())

    # Explicit clipping -----------------------------------------------------------------------------------------------

    @public_call
    @torch.no_grad()
    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> Stats_co:
        """Complete, measure, unscale and clip the gradients now, in place, by this rule in the place of the constructor's;
        `step` then does none of it again. In the middle of a window of managed accumulation `step` does it at its end.

        Args: as for `ByNorm`. Returns: GradStats with the norm before clipping; None in the middle of a window.
        Raises ValueError, nothing changed, where one is out of range. Collectives: those of a step. Host reads: none.
        """
        return clip_or_ask(self, "clip_grad_by_norm", ByNorm(max_norm, norm_type))  # type: ignore[return-value]

    @public_call
    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> Stats_co:
        """The same with `ByValue`: clamp every element to [-clip_value, clip_value], after measuring."""
        return clip_or_ask(self, "clip_grad_by_value", ByValue(clip_value))  # type: ignore[return-value]
