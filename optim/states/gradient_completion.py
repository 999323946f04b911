"""Reduction of an optimizer's gradients at the end of an accumulation window, with checks in the first windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from weakref import WeakSet

import torch
from torch import Tensor

from ...parallel.interop.local_parameters import local_parameter, settle_sums
from ...parallel.layout.annotation import annotation_of
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ..gradients.buckets import Reducible, gradient_buckets, keep_in_place, reduce_all
from ..gradients.in_place import SeparateGradients, check_kinds, clear_gradients, poison_bad_kinds
from ..gradients.reduce_in_backward import ArrivedGradients
from ..kernels.memory import DTYPE, LAYOUT
from ..norm.param_table import ParamTable
from ..norm.plan import ReductionPlan
from ..step.data_parallel import GradSyncController, find_misplaced_ddp
from ..step.first_window_checks import (
    GradientReport,
    ModelParams,
    UnusedParameters,
    check_gradients_came,
    check_not_overwritten,
    warn_of_written_gradients,
)
from ..step.step_agreement import ParamFacts, StepAgreement, thawed_text
from ..step.window import Window
from .chain import TransformChain

_NO_FACTS = ParamFacts()
_REQUIRES_GRAD = attrgetter("requires_grad")

_CHAINS: WeakSet[TransformChain] = WeakSet()
"""The transform chains of all optimizers. A parameter of a model may belong to any of several optimizers."""


class GradientCompletion:
    """Reduces an optimizer's gradients at the end of each accumulation window, with checks in the first windows.

    A window is the micro-batches of one optimizer step. `ParallelOptimizer` creates a new object when param groups are
    added or refreshed.

    Args:
        buckets: A function that returns the gradient buckets of a reduction plan. Their collectives run after all
            transforms have moved gradients to the stepped tensors.
        early: The buckets that ``overlap=True`` reduces during backward. If backward did not reduce them in a window,
            they are reduced at the end of the window. None: no buckets.
        agreement: The comparison of settings between ranks; None: there is one rank.
        has_fingerprints: True if `Fingerprints` compare replicas; equal on all ranks.
        in_backward: True if gradients may be reduced or moved before a window ends; equal on all ranks.

    Attributes:
        table: The first window adds to the records' specs the axes over which DTensor gradients are partial.
        grads_checked: True after all ranks have checked the gradients of the first window.
        param_facts: The model parameters that were frozen or unfrozen since param groups were last added or refreshed,
            and the replicated parameters without a gradient, which ranks compare. Updated in every window.
    """

    def __init__(
        self,
        chain: TransformChain,
        table: ParamTable,
        buckets: Callable[[ReductionPlan], Sequence[Reducible]],
        early: Sequence[Reducible] | None,
        agreement: StepAgreement | None,
        unused: UnusedParameters,
        model: ModelParams,
        has_fingerprints: bool,
        in_backward: bool,
    ) -> None:
        self.chain, self.table, self.early, self._model = chain, table, early, model
        _CHAINS.add(chain)
        self.params = table.grad_tensors
        self._model_params = chain.params
        self._were_trained = [of.trained for of in chain.given]
        self.separate = SeparateGradients(self._model_params)
        self._make_buckets, self._buckets = buckets, list(buckets(table.plan))
        self.grads_checked, self._agreement, self._has_copies = False, agreement, False
        self._has_fingerprints = has_fingerprints
        self._unused: UnusedParameters | None = unused
        self.param_facts = _NO_FACTS
        self._in_backward = in_backward
        # Set after the first window if there are several ranks and ``in_backward`` is True.
        self._arrived: ArrivedGradients | None = None
        self._next_checked = 0

    def not_captured(self) -> str | None:
        if self.grads_checked:
            return None
        return (
            "no step was made since the optimizer was created or its param groups changed, and the first step checks "
            "gradients on the host: make some steps without a graph"
        )

    def __call__(self, window: Window, switch: GradSyncController | None) -> Exception | None:
        """Reduce the gradients, once per window. Later calls in the same window do nothing. Call it under ``no_grad``.

        ``switch`` is the controller of gradient reduction with ``data_parallel``, ``overlap=True`` or
        ``sum_order="fixed"``. The result is an error that concerns this rank only; raise it after the step's remaining
        collectives.

        Raises:
            RuntimeError, TypeError, ValueError: In the first, second and 16th window, on every rank: an error of the checks
                that only these windows make.
            RuntimeError: In any window, on this rank: a parameter was converted or, with one rank, unfrozen; or the
                gradients of the window can't be reduced, for example because a backward bypassed the optimizer. With
                several ranks, errors of master weights are deferred (`Window.defer`).

        Collectives: the reductions of buckets and transforms, and those of step observers. Object all-gathers: two in
            the first window, one in the 16th, and one in the second if a rank has copies of weights.
        Host synchronization: in these three windows. In other windows only if a transform or an observer needs it.
        """
        # After an explicit clip, ``decision`` is not None, but ``phase`` may be "broken" instead of "clipped".
        if window.phase in ("complete", "clipped") or window.decision is not None:
            return None
        averaged = self._take_over(window, switch)
        frozen_ids, frozen_problem = self._frozen_since()
        without_gradient = self._without_gradient()
        if window.scaled:
            window.unscaled_grads = window.has_bypassed_grads(self._model_params)
        own_report = None if self.grads_checked else self._own_report(window)
        if self._unused is not None and not window.captured:
            self._watch_first_windows(self._unused)
        self._reduce_early(window)
        if own_report is not None:
            already_averaged = averaged and switch is not None and (switch.in_backward or window.reduced)
            self._check_reports(own_report, window, already_averaged)
        if self._agreement is not None and without_gradient:
            missing = tuple(at for at in without_gradient if at in self._agreement.replicated)
            self.param_facts = self.param_facts._replace(without_gradient=missing)
        problem = self._pull(window, averaged) or frozen_problem
        self._reduce_rest(averaged)
        if frozen_ids:
            self._forget(frozen_ids)
        window.complete()
        for observer in self.chain.observers:
            _observe(observer.reduced_grads, window)
        return problem

    def _take_over(self, window: Window, switch: GradSyncController | None) -> bool:
        """Collect the model's gradients from backward and from ``switch``, and call the observers of local gradients.

        Return False if the gradients must still be averaged over the data axes, because torch's data parallelism did
        not reduce the last micro-batch.
        """
        self._check_converted()
        self.separate()
        for observer in self.chain.observers:
            _observe(observer.local_grads, window)
        if window.captured:
            keep_in_place((*self._buckets, *(self.early or ())))
        averaged = switch is None or switch.averages(window)
        if switch is not None:
            switch.hand_over(self._model_params)
        return averaged

    def _reduce_early(self, window: Window) -> None:
        """Issue the collectives of buckets and transforms that backward would have issued, but did not on this rank.

        They come before the collectives of `_pull`: other ranks may have issued them in backward, and all ranks must
        issue their collectives in the same order.
        """
        if self.early is not None and not window.reduced:
            reduce_all(self.early)
        for transform in self.chain.catching_up:
            transform.catch_up(window)

    def _pull(self, window: Window, averaged: bool) -> Exception | None:
        """Run the `pull_grads` of each transform, which may issue collectives, and check the stepped tensors' gradients.

        Return the error for an unusable gradient of this rank, which is replaced by NaN; None: all are usable. In the
        first window, raise the error of a stepped tensor's gradient on every rank instead.
        """
        problem: Exception | None = None
        for transform in self.chain.pulling_grads:
            problem = transform.pull_grads(window, averaged) or problem
        window.has_stale_grads = True
        if not self.grads_checked:
            on_all_ranks(lambda: check_kinds(self.table), self.chain.registry)
            self.grads_checked = window.grads_checked = True
            self.separate.end_first_window()
            window.forget_gradients()
        gradients = [gradient for param in self.params if (gradient := param.grad) is not None]
        are_strided = {*map(LAYOUT, gradients)} <= {torch.strided}
        if not are_strided or any(dtype.is_complex for dtype in {*map(DTYPE, gradients)}):
            problem = poison_bad_kinds(self.table) or problem
        return problem

    def _reduce_rest(self, averaged: bool) -> None:
        """Reduce the stepped tensors' gradients over the axes that are left after `_reduce_early` and `_pull`.

        If ``averaged`` is False, the data axes are among them (`_take_over`).
        """
        buckets = self._buckets if averaged else gradient_buckets(self.params, self.table.plan, self.chain.registry)
        if buckets:
            reduce_all(buckets)

    def _watch_first_windows(self, unused: UnusedParameters) -> None:
        """Check for parameters without gradients and, in the second and 16th window, for weights that other code wrote.

        On every rank, raise RuntimeError if the step would overwrite weights that other code wrote. The next call
        raises again unless `ParallelOptimizer.reload_from_model` was called.
        Collectives: an object all-gather in the 16th window, and in the second window if a rank has copies of weights.
        """
        if self._has_copies and unused.windows == 1:
            found = gather_objects(self.chain.find_overwritten(), self.chain.registry)
            check_not_overwritten(found, self._has_fingerprints)
        overwritten = self.chain.find_overwritten() if self._has_copies and unused.is_last else None
        if not unused.end_window(overwritten, self._has_fingerprints):
            self._unused = None

    def _own_report(self, window: Window) -> GradientReport:
        """Return this rank's report on its gradients and on the model's modules, for `_check_reports`."""
        params = self._model_params
        report = GradientReport.of(window, params, self.chain.optimizer.param_groups, self._facts(window))
        own = (of.param for chain in _CHAINS for of in chain.given)
        report = report._replace(has_copies=self.chain.has_copies(), missing=self._model.missing_from(own))
        found = None
        if report.wrong is None:
            found = find_misplaced_ddp(self.chain.params_by_entry(self.table.model_plan), self.chain.registry)
        if found is None:
            return report
        name, ranks = found
        return report._replace(
            wrong=f"a DistributedDataParallel over the ranks {ranks} wraps {name}, of which these ranks hold different "
            "shards. It has overwritten all shards with the shard of one rank, and averages gradients of different shards. "
            "Build the model again, and don't wrap it: step() averages gradients over the data axes. Or, if no parameter "
            "is sharded over a data axis, wrap the model with DistributedDataParallel(model, "
            "process_group=registry.group(...)), with the names of the data axes in group(...), and pass the wrapped model "
            "as data_parallel="
        )

    def _check_reports(self, own_report: GradientReport, window: Window, averaged: bool) -> None:
        """Check the gradients of the first window on all ranks, and record which DTensors have partial gradients.

        On every rank, raise an error if a rank's report shows an error, or if settings differ between ranks.
        Collectives: an object all-gather.
        """
        params = self._model_params
        reports = gather_objects(own_report, self.chain.registry)
        check_gradients_came(reports, window.scaled)
        self._model.check([report.missing for report in reports])
        self._has_copies = any(report.has_copies for report in reports)
        if self._agreement is not None and sum(report.facts for report in reports) != 0:
            error = self._agreement.error(
                self._agreement.sent, "ranks disagree about the first step, nothing was stepped"
            )
            raise error from window.take_error()
        warn_of_written_gradients(reports, self.chain.registry.topology, window.scaled, averaged)
        if settle_sums(params, [report.sums for report in reports]):
            self.table = self.table.with_specs(lambda row: self._with_sums(row.spec, row.param))
            self._buckets = list(self._make_buckets(self.table.plan))
        if self._agreement is not None:
            topology = self.table.plan.topology
            self._agreement.set_replicas(
                replace(entry, spec=self._with_sums(entry.spec, local_parameter(param, topology)))
                for entry, param in self.chain.params_by_entry(self.table.model_plan)
            )
            if self._in_backward:
                given = self.chain.given
                self._arrived = ArrivedGradients({at: given[at].param for at in self._agreement.replicated})

    def _with_sums(self, spec: P, param: Tensor) -> P:
        """Return ``spec``, plus the partial axes that the annotation of ``param``, a local tensor, now declares."""
        annotation = annotation_of(param)
        if annotation is None:
            return spec
        return spec.with_partial(annotation.spec_on(self.table.plan.topology).partial)

    def _without_gradient(self) -> list[int]:
        """Return the indices of the trained model parameters that got no gradient in the window.

        Except in the first window, only parameters in ``StepAgreement.replicated`` are searched. The list is empty with
        one rank, and in the first window if gradients may be reduced or moved before a window ends.
        """
        if self._agreement is None or (self._in_backward and self._arrived is None):
            return []
        given = self.chain.given
        if self._arrived is None:
            searched = self._agreement.replicated if self.grads_checked else range(len(given))
            found = [at for at in searched if given[at].param.grad is None]
        else:
            found = self._arrived.missing()
            self._arrived.clear()
        return [at for at in found if given[at].param.requires_grad]

    def forget_arrived(self) -> None:
        if self._arrived is not None:
            self._arrived.clear()

    def _check_converted(self) -> None:
        """Raise RuntimeError if the dtype or device of a parameter has changed since the optimizer received it.

        Each call checks only the first parameter, the last parameter, and one more parameter in turn. This is enough,
        because a conversion such as ``model.double()`` converts all parameters.
        """
        given = self.chain.given
        if given:
            self._next_checked = (self._next_checked + 1) % len(given)
            if given[0].is_converted or given[-1].is_converted or given[self._next_checked].is_converted:
                raise RuntimeError(self.chain.converted())

    def _facts(self, window: Window) -> int:
        """Return this rank's number for the comparison of settings between ranks.

        If all ranks have equal settings, their numbers sum to 0. With one rank the number is 0. Host synchronization:
        one if settings are device tensors.
        """
        if self._agreement is None:
            return 0
        device = self.chain.registry.device
        number, of_tensors = window.number_of_facts(self._agreement, self.param_facts, device)
        return number if of_tensors is None else number + int(of_tensors)

    def _frozen_since(self) -> tuple[set[int], RuntimeError | None]:
        """Record in `param_facts` the parameters that were frozen or unfrozen since param groups were last refreshed.

        Return the ids of frozen parameters without a gradient, and the error for an unfrozen parameter, or None. The
        caller must raise the error only after the collectives that other ranks expect; with one rank it is raised here.
        """
        frozen = {id(param) for param in self.chain.frozen if param.grad is None}
        trained = list(map(_REQUIRES_GRAD, self._model_params))
        changed = trained != self._were_trained
        found = [at for at, was in enumerate(self._were_trained) if trained[at] != was] if changed else []
        left_out: list[int] = []
        if self.chain.left_out:
            beyond = enumerate(self.chain.left_out, len(self.chain.given))
            left_out = [at for at, (_, param) in beyond if param.requires_grad]
        if not found and not left_out:
            self.param_facts = _NO_FACTS
            return frozen, None
        given, problem = self.chain.given, None
        thawed = (*(at for at in found if not given[at].trained), *left_out)
        self.param_facts = ParamFacts(tuple(at for at in found if given[at].trained), thawed)
        if thawed:
            names = [*(of.name for of in given), *(name for name, _ in self.chain.left_out)]
            problem = RuntimeError(thawed_text(names[thawed[0]]))
        if problem is not None and self._agreement is None:
            raise problem
        return frozen | {id(given[at].param) for at in self.param_facts.frozen if given[at].param.grad is None}, problem

    def _forget(self, frozen: set[int]) -> None:
        """Clear the gradients of the frozen parameters with these ids. The reduction may have given them gradients."""
        for row in self.table:
            if id(row.leaf) in frozen:
                clear_gradients([row.grad_tensor, *row.path], set_to_none=True)


def _observe(method: Callable[[Window], None], window: Window) -> None:
    """Call a method of a step observer. Its error is deferred to the end of the step, or with one rank raised at once."""
    try:
        method(window)
    except Exception as error:
        window.defer(error)
