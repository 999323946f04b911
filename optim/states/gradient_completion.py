"""The end of a window: gradients made whole, on their way from where backward left them to what is stepped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...parallel.interop.local_parameters import settle_sums
from ...parallel.layout.annotation import annotation_of
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ..gradients.buckets import Reducible, gradient_buckets, keep_in_place, reduce_all
from ..gradients.in_place import check_kinds, clear_gradients, poison_bad_kinds
from ..norm.param_table import ParamTable, SteppedTensor
from ..norm.plan import ReductionPlan
from ..step.data_parallel import GradSyncController, find_misplaced_ddp
from ..step.first_window_checks import (
    GradientReport,
    UnusedParameters,
    check_gradients_came,
    check_not_overwritten,
    warn_of_written_gradients,
)
from ..step.step_agreement import StepAgreement, thawed_text
from ..step.window import Window
from .chain import TransformChain


class GradientCompletion:
    """Completes the gradients of what one chain steps; made anew when parameters are added.

    Args:
        chain: What stands in for the model's parameters.
        table: The stepped tensors.
        buckets: From a plan what completes the gradients that have come to the end of the chain.
        early: They complete first those of the model's parameters that can be reduced while backward runs, if that is
            wanted.
        agreement: What ranks must agree on is compared in the first window; None: on one rank.
        unused: Watches for parameters without gradients.
        has_fingerprints: `Fingerprints` compare replicas; the same on all ranks.

    Attributes:
        table: As given, with the sums over model axes that the first window settled.
        looked: The first window has been looked at, by all ranks together.
        changed: Indices of parameters frozen since they came, and of those unfrozen since, in the last window.
    """

    def __init__(
        self,
        chain: TransformChain,
        table: ParamTable,
        buckets: Callable[[ReductionPlan], Sequence[Reducible]],
        early: Sequence[Reducible] | None,
        agreement: StepAgreement | None,
        unused: UnusedParameters,
        has_fingerprints: bool = False,
    ) -> None:
        self.chain, self.table, self.early = chain, table, early
        self.params = table.grad_tensors
        self._make_buckets, self._buckets = buckets, list(buckets(table.plan))
        self.looked, self._agreement, self._has_copies = False, agreement, False
        self._has_fingerprints = has_fingerprints
        self._unused: UnusedParameters | None = unused
        self.changed: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._looked_at = 0

    def not_captured(self) -> str | None:
        """Return why a step can't be captured in a CUDA graph now; None: it can be."""
        if self.looked:
            return None
        return "no step was made before, and the first one looks at what came, on the host: make some steps without a graph"

    @torch.no_grad()
    def __call__(self, window: Window, switch: GradSyncController | None) -> Exception | None:
        """Reduce the gradients, once a window.

        Args:
            switch: What reduces gradients in backward, if anything does.
        Returns:
            What is wrong with the gradients of this rank alone, after all ranks have been served.
        Raises:
            RuntimeError: A parameter was converted to another dtype or device; torch's data parallelism has not reduced
                what only it can reduce; on every rank, the first time: there are no gradients, or they have not come
                through `backward` or `window`, or ranks disagree; on every rank, in the second and 16th window: the
                step would undo weights that were written through ``.data``.
            TypeError, ValueError: On every rank, the first time, where on any a gradient is sparse or complex, or one of a
                DTensor is laid out in a way of which nothing can be made.
        Collectives: those of the buckets and links; the first time, and in the 16th window, an object all-gather; in the
        second window another one, if a rank has copies of weights (masters, `Offloaded`). Host reads: only then.
        """
        if window.phase in ("complete", "clipped"):
            return None
        self._check_converted()
        for observer in self.chain.observers:
            observer.local_grads(window)
        if window.captured:
            keep_in_place((*self._buckets, *(self.early or ())))
        averaged = switch is None or switch.averages(window)
        if switch is not None:
            switch.hand_over(self.chain.params)
        problem: Exception | None
        frozen, problem = self._frozen_since()
        if window.scaled and not window.calls:
            window.strays = window.has_strays(self.chain.params)
        seen = None if self.looked else self._seen(window)
        if self._unused is not None and not window.captured:
            self._watch_first_windows(self._unused)
        # Before anybody else takes, or looks at, the gradients of the model's parameters: a rank has the same order of
        # collectives whether it ran a backward or not.
        if self.early is not None and not window.reduced:
            reduce_all(self.early)
        for link in self.chain.catching_up:
            link.catch_up(window)
        if seen is not None:
            self._look(seen, window, averaged and switch is not None and (switch.in_backward or window.reduced))
        for link in self.chain.bringing:
            problem = link.bring(window, averaged) or problem
        window.holds_old = True
        if seen is not None:
            on_all_ranks(lambda: check_kinds(self.table), self.chain.registry)
            self.looked = window.looked = True
            window.forget_gradients()
        for param in self.params:
            gradient = param.grad
            if gradient is not None and (gradient.layout is not torch.strided or gradient.dtype.is_complex):
                problem = poison_bad_kinds(self.table) or problem
        # `averaged` is False where torch's data parallelism left the last micro-batch out: these buckets then average too.
        buckets = self._buckets if averaged else gradient_buckets(self.params, self.table.plan, self.chain.registry)
        if buckets:
            reduce_all(buckets)
        if frozen:
            self._forget(frozen)
        window.complete()
        for observer in self.chain.observers:
            observer.reduced_grads(window)
        return problem

    def _watch_first_windows(self, unused: UnusedParameters) -> None:
        """Look for parameters without gradients and, in the second and last watched window, for weights that the step would
        undo. Raises RuntimeError on every rank, and again in the next call unless they were reloaded.

        Collectives: an object all-gather in the last window; in the second one too, if a rank has copies of weights.
        """
        if self._has_copies and unused.windows == 1:
            found = gather_objects(self.chain.find_overwritten(), self.chain.registry)
            check_not_overwritten(found, self._has_fingerprints)
        overwritten = self.chain.find_overwritten() if self._has_copies and unused.is_last else None
        if not unused.end_window(overwritten, self._has_fingerprints):
            self._unused = None

    def _seen(self, window: Window) -> GradientReport:
        """What this rank sees of the gradients that backward left, and of what is around the model."""
        params = self.chain.params
        seen = GradientReport.of(window, params, self.chain.optimizer.param_groups, self._facts(window))
        seen = seen._replace(has_copies=self.chain.has_copies())
        leaves = [row.leaf for row in self.table]
        found = None
        if seen.wrong is None:
            found = find_misplaced_ddp(leaves, self.table.plan.entries, self.chain.registry)
        if found is None:
            return seen
        name, ranks = found
        return seen._replace(
            wrong=f"a DistributedDataParallel over the ranks {ranks} is around {name}, of which they hold other shards. "
            "It has given all of them the shard of one rank, and averages gradients of different shards. Make the model "
            "anew; wrap it by DistributedDataParallel(model, process_group=registry.group(...)) with the data axes, and "
            "give that as data_parallel=; or don't wrap it"
        )

    def _look(self, mine: GradientReport, window: Window, averaged: bool) -> None:
        """What all ranks see of the gradients that backward left: whether they came as they should, and what sums are to
        be made that nobody declared. Collectives: an object all-gather.

        Args:
            averaged: They were averaged over the data axes in backward.
        """
        params = self.chain.params
        seen = gather_objects(mine, self.chain.registry)
        check_gradients_came(seen, window.scaled)
        self._has_copies = any(of_rank.has_copies for of_rank in seen)
        if self._agreement is not None and sum(of_rank.facts for of_rank in seen) != 0:
            raise self._agreement.error(
                self._agreement.sent, "ranks disagree about the first step, nothing was stepped"
            )
        warn_of_written_gradients(seen, self.chain.registry.topology, window.scaled, averaged)
        if settle_sums(params, [of_rank.sums for of_rank in seen]):
            self.table = self.table.with_specs(self._spec_with_sums)
            self._buckets = list(self._make_buckets(self.table.plan))

    def _spec_with_sums(self, row: SteppedTensor) -> P:
        """Return the row's spec with the partial gradients that the model parameter's spec has by now."""
        annotation = annotation_of(row.param)
        if annotation is None:
            return row.spec
        return row.spec.with_partial(annotation.spec_on(self.table.plan.topology).partial)

    def _check_converted(self) -> None:
        """Raise RuntimeError if parameters have other dtypes or devices than when they were given to the optimizer.

        Looks at the first and the last parameter and, in turn, one other: ``model.double()`` converts all of them.
        """
        given = self.chain.given
        if given:
            self._looked_at = (self._looked_at + 1) % len(given)
            if any(given[index].is_converted for index in (0, -1, self._looked_at)):
                raise RuntimeError(self.chain.converted())

    def _facts(self, window: Window) -> int:
        """Return what this rank adds to the slot of facts. Host reads: of settings that are tensors on a device."""
        if self._agreement is None:
            return 0
        number = window.number_of_facts(self._agreement, self.changed)
        of_tensors = self._agreement.of_tensors()
        return number if of_tensors is None else number + int(of_tensors)

    def _frozen_since(self) -> tuple[set[int], RuntimeError | None]:
        """Find parameters whose ``requires_grad`` has changed since they came, and note them in `changed`.

        Returns:
            The ids of those that were frozen and have no gradient; the error where one was unfrozen, to be raised when this
            rank has done its part in the collectives.
        """
        frozen = {id(param) for param in self.chain.frozen if param.grad is None}
        found = [at for at, of in enumerate(self.chain.given) if of.param.requires_grad != of.trained]
        if not found:
            self.changed = (), ()
            return frozen, None
        given = self.chain.given
        thawed = tuple(at for at in found if not given[at].trained)
        self.changed = tuple(at for at in found if given[at].trained), thawed
        problem = RuntimeError(thawed_text(given[thawed[0]].name)) if thawed else None
        if problem is not None and self._agreement is None:
            raise problem
        return frozen | {id(given[at].param) for at in self.changed[0] if given[at].param.grad is None}, problem

    def _forget(self, frozen: set[int]) -> None:
        """Clear what other ranks gave for parameters that are frozen here: zeros, which are no gradients."""
        for row in self.table:
            if id(row.leaf) in frozen:
                clear_gradients([row.grad_tensor, *row.path], set_to_none=True)
