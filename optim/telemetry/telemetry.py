"""Measure weights, gradients and updates every few steps, as the dense model would have them.

    telemetry = Telemetry(optimizer, every=50)
    monitor = Monitor(registry, JsonLines("run.jsonl"), telemetry=telemetry)

It looks on at the optimizer's own steps (`meshstep.optim.states.chain`): when gradients are whole and not clipped yet,
and around the update. What each rank finds of its pieces, divided by their number of holders, is summed by logical
parameter in one packed all-reduce:

    [ |w|^2  |g|^2  |dw|^2  zeros  small ] of each parameter | window's weight | |g_local|^2 of each data rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...parallel.mesh.agreement import check_same, gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import in_call
from ...parallel.mesh.value_checks import check_count
from ..clip.clipper import inverse_weight
from ..kernels.device_constants import Constants
from ..norm.measure import check_every
from ..norm.param_table import ParamTable
from ..norm.plan import ReductionPlan
from ..norm.plan_agreement import with_names
from ..norm.powers import accumulation_dtype
from ..parallel_optimizer import ParallelOptimizer
from ..states.chain import StepObserver
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window, place_of, window_fields
from .gradient_noise import (
    LocalGradients,
    NoiseScale,
    RunningScale,
    changes_,
    check_are_local,
    counts,
    estimates,
    is_local,
    kept,
    squares,
)
from .labels import TOTAL, By, Slots, checked_by, chosen, labelled, world_sum
from .spectral import PowerIteration, SpectralNorms

# What one plan's measurements sum into which slots; made by all ranks together, anew when parameters are added --------

KINDS = ("param_norm", "grad_norm", "update_norm", "grad_zeros", "grad_underflow")


class Planned:
    """Of an optimizer as it is now.

    Args:
        by, spectral, noise: As `Telemetry` has them.
    Raises:
        ValueError: On every rank: globs that fit to nothing; pieces of unequal sizes among the matrices; no gradient that
            is a data rank's own.
    Collectives: object all-gathers, and one all-reduce. Host reads: yes.

    Attributes:
        plan: Of what is stepped, with the names of all logical parameters.
        measured: What has the gradients of what is stepped, in the order of its entries; ``values()`` gives the latter.
        numels: Of each the elements that have a gradient: all, or none where it is frozen.
        labels: What figures are given of, the whole model last.
        local: What measures each data rank's own gradient; None where nobody asks.
        left_out: The names of the parameters that the noise scale does not see.
    """

    def __init__(
        self, optimizer: ParallelOptimizer[Any], by: By, spectral: SpectralNorms | None, noise: NoiseScale | None
    ) -> None:
        registry, chain, device = optimizer.registry, optimizer.transforms, optimizer.device
        self.registry, self.device, self.constants = registry, device, Constants()
        model = optimizer.model_plan
        model = model if model.parameter_names else with_names(model, registry)
        table = chain.table(model)
        self.plan, self.values, self.measured = table.plan, chain.values, table.grad_tensors
        names, slots = self.plan.parameter_names, self.plan.parameter_slots
        self._to_parameters = Slots(slots, len(names), device)
        dtype = accumulation_dtype(device)
        self._weights = torch.tensor(self.plan.replica_weights, dtype=dtype).to(device)

        own = [is_local(entry, registry.topology) for entry in model.entries]
        told = {slot: (e.group, o) for slot, e, o in zip(model.parameter_slots, model.entries, own, strict=True)}
        everywhere = {slot: said for of_rank in gather_objects(told, registry) for slot, said in of_rank.items()}
        groups = [everywhere[slot][0] for slot in range(len(names))]
        labels, where = on_all_ranks(lambda: labelled(names, groups, by), registry)
        self.labels = (*labels, TOTAL)
        self._to_labels = Slots(where, len(labels), device)

        # Frozen parameters have no gradients of which zeros could be counted.
        self.numels = [row.grad_tensor.numel() if row.trained else 0 for row in table]
        elements = self.to_parameters(torch.tensor(self.numels, dtype=dtype).to(device))
        self._elements = self.to_labels(self.summed(elements))

        fits = chosen(names, spectral.globs if spectral else ())
        # Of unknown shape are those with pieces of unequal sizes, which are an error there.
        matrix = [shape is None or len(shape) > 1 for shape in self.plan.parameter_shapes]
        self.matrices = [index for index, slot in enumerate(slots) if fits[slot] and matrix[slot]]
        self.spectral = None if spectral is None else self._power_iteration(table, spectral)
        self.local: LocalGradients | None = None
        self.left_out, self._own = tuple[str, ...](), torch.zeros(0)
        if noise is not None:
            self._see_local(optimizer, model, [everywhere[slot][1] for slot in range(len(names))])

    def _power_iteration(self, table: ParamTable, spectral: SpectralNorms) -> PowerIteration:
        rows = [table.rows[index] for index in self.matrices]
        named = [(table.name_of(row), row.tensor, row.region) for row in rows]
        return PowerIteration(named, self.registry, spectral.iterations, self.device)

    def _see_local(self, optimizer: ParallelOptimizer[Any], model: ReductionPlan, own: list[bool]) -> None:
        if not any(own):
            raise ValueError(
                "NoiseScale: the data axes split every parameter, so that no data rank has gradients of its own samples "
                "alone: leave noise= out"
            )
        params = optimizer.transforms.params
        self.local = LocalGradients(params, model, self.registry, self.device, self.constants)
        self.left_out = tuple(name for name, is_own in zip(self.plan.parameter_names, own, strict=True) if not is_own)
        self._own = torch.tensor(own, dtype=accumulation_dtype(self.device)).to(self.device)

    def to_parameters(self, values: Tensor) -> Tensor:
        """[..., entries] -> [..., logical parameters]: what this rank adds, each piece divided by its number of holders."""
        return self._to_parameters(values * self._weights)

    def to_labels(self, values: Tensor) -> Tensor:
        """[..., logical parameters] -> [..., labels]: sums, the whole model's last."""
        return torch.cat([self._to_labels(values), values.sum(-1, keepdim=True)], -1)

    def of_local(self, squares: Tensor) -> Tensor:
        """0-dim: of the squared norms of logical parameters the sum of those that `local` measures too."""
        return torch.where(self._own > 0, squares, 0.0).sum()

    def fractions(self, counts: Tensor) -> Tensor:
        """[..., labels] counts of elements as fractions of all trained ones; NaN where there are none."""
        return counts / self._elements

    def summed(self, packed: Tensor) -> Tensor:
        """Over the world. Collectives: one all-reduce, none on one rank."""
        return world_sum(packed, self.registry)


# The figures of one measured step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What `Telemetry` found in one step; on the device, the same bits on every rank.

    Args:
        step: Which step, counted from 1.
        names: Of the figures, with slashes, as dashboards want them: ``"update_norm/total"``.
        values: [figures] float64.
    """

    step: int
    names: tuple[str, ...]
    values: Tensor

    def to_dict(self) -> dict[str, float]:
        """By name, NaN and inf as they are. Host reads: one."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


# Telemetry ------------------------------------------------------------------------------------------------------------


class Telemetry(StepObserver):
    """Measures every few steps of an optimizer, from now on. Every rank makes one, at the same point.

    Figures, each of the whole model (``.../total``) and of every label:

    ``param_norm``, ``grad_norm``, ``update_norm``: L2 norms of the logical tensors: the weights before the step, the
    masters where there are; the unscaled, averaged gradient before clipping; what the step then changed, 0 where it was
    skipped. ``update_ratio``: the update's by the weights'. ``grad_zeros``: the fraction of trained elements whose gradient
    is 0, or did not come. ``grad_underflow``: the fraction of them that is smaller than 2^-14, the smallest normal number
    of float16, zeros among them; of the gradients as they lie: with the loss scale, averaged over data, summed over the
    window. So in fp16 it is what the loss scale does not save, and in other modes what fp16 would lose without one.
    ``spectral_norm/<name>``: with `SpectralNorms`, of the weights before the step. ``noise_scale``, ``noise_signal``
    (|G|^2) and ``noise_trace`` (S): with `NoiseScale`; of all parameters but `left_out`.

    Args:
        optimizer: Of any precision, with states anywhere.
        every: Steps between measured ones, >= 1; those that are skipped count.
        by: What labels are; see `By`.
        spectral: Largest singular values, of which matrices.
        noise: The gradient noise scale.
    Raises:
        ValueError: On every rank: an argument is out of range, or not the same on all; globs fit to nothing; noise= where
            gradients are averaged during backward, or there are no two data ranks.
    Collectives: here, and after `add_param_group`, object all-gathers. In a measured step one all-reduce over the world;
    and, with noise=, one for each kind of pending sums; with spectral=, two an iteration. None in other steps.
    Host reads: none, but with `Offloaded` those that it has anyway.
    Memory: in a measured step a copy of what this rank steps, float32 of what is half; 40 bytes a logical parameter.

    Attributes:
        step: Steps so far.
        last: What was measured last, on the device; None before the first time.
    """

    def __init__(
        self,
        optimizer: ParallelOptimizer[Any],
        *,
        every: int = 50,
        by: By = "layer",
        spectral: SpectralNorms | None = None,
        noise: NoiseScale | None = None,
    ) -> None:
        self.optimizer, self.every, self.by, self.spectral, self.noise = optimizer, every, by, spectral, noise
        registry = optimizer.registry
        with in_call(registry, "Telemetry"):
            on_all_ranks(self._check, registry)
            said = {"every": every, "by": by, "spectral": spectral, "noise": noise}
            check_same({f"{key}= of Telemetry": value for key, value in said.items()}, registry)
            self._plan_anew()
        self.step = 0
        self.last: Measurement | None = None
        self._running = None if noise is None else RunningScale(noise.decay, optimizer.device)
        self._due = False
        self._gradients, self._window, self._local = Tensor(), Tensor(), Tensor()
        self._count = 1  # of micro-batches, in the mean that the gradient is
        self._scale: Tensor | None = None
        optimizer.add_observer(self)

    def _check(self) -> None:
        check_every(self.every, f"every={self.every!r}")
        if any(isinstance(observer, Telemetry) for observer in self.optimizer.observers):
            raise ValueError("the optimizer has a Telemetry already: call its close() before you make another")
        checked_by(self.by)
        if self.spectral is not None:
            self.spectral.check()
        if self.noise is not None:
            self.noise.check()
            check_are_local(self.optimizer)

    def _plan_anew(self) -> None:
        self._of_plan = self.optimizer.model_plan
        self._planned = Planned(self.optimizer, self.by, self.spectral, self.noise)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parameters that the noise scale does not see: frozen ones, and those that a data axis splits or owns, such as
        experts, of which no rank has a gradient of its own samples alone."""
        return self._planned.left_out

    def close(self) -> None:
        """Measure no more. A second call does nothing."""
        self.optimizer.remove_observer(self)

    # What it is told of a step ---------------------------------------------------------------------------------------

    def not_captured(self) -> str | None:
        return "Telemetry counts steps and measures some of them, in Python: close() it before the capture"

    def local_grads(self, window: Window) -> None:
        self._due = (self.step + 1) % self.every == 0
        if not self._due:
            return
        if self.optimizer.model_plan is not self._of_plan:
            before = self._planned
            self._plan_anew()
            if before.spectral is not None and self._planned.spectral is not None:
                self._planned.spectral.load_state_dict(before.spectral.state_dict())
        if self._planned.local is not None:
            self._local = self._planned.local.powers()

    def reduced_grads(self, window: Window) -> None:
        if not self._due:
            return
        planned = self._planned
        gradients = [tensor.grad for tensor in planned.measured]
        found = torch.cat(
            [
                squares(gradients, planned.device, planned.constants).view(1, -1),
                counts(gradients, planned.numels, planned.device, planned.constants),
            ]
        )
        self._gradients = planned.to_parameters(found)
        self._window = window_fields(window.weight, planned.registry, planned.device).values.clone()
        self._count = window.count
        self._scale = window.scale
        if planned.local is not None:
            weights = self._window.new_zeros(len(self._window), planned.local.data_ranks)
            weights[:, planned.local.data_rank] = self._window
            self._window = torch.cat([self._window, weights.view(-1), self._local])

    def update(self, request: UpdateRequest, update: Update) -> None:
        """Around the update. Collectives: as the class says."""
        self.step += 1
        if not self._due:
            update(request)
            return
        self._due, planned = False, self._planned
        values = planned.values()
        before = kept(values)
        weights = squares(before, planned.device, planned.constants)
        sigmas = None
        with in_call(planned.registry, "Telemetry"):
            if planned.spectral is not None:
                sigmas = planned.spectral([values[index] for index in planned.matrices])
        del values
        update(request)
        changes = squares(changes_(before, planned.values()), planned.device, planned.constants)
        del before
        weights, changes = planned.to_parameters(torch.stack([weights, changes])).unbind()
        rows = torch.stack([weights, self._gradients[0], changes, *self._gradients[1:]])
        with in_call(planned.registry, "Telemetry"):
            totals = planned.summed(torch.cat([rows.view(-1), self._window.to(rows)]))
        self.last = self._figures(totals[: rows.numel()].view(rows.shape), totals[rows.numel() :], sigmas)

    # The figures -----------------------------------------------------------------------------------------------------

    def _figures(self, rows: Tensor, window: Tensor, sigmas: Tensor | None) -> Measurement:
        """From the sums over all ranks."""
        planned = self._planned
        place = place_of(planned.registry)
        inverse = inverse_weight(window[: place.stages], place.data_ranks, self._count)
        if self._scale is not None:
            inverse = inverse / self._scale.to(inverse)
        rows = torch.cat([rows[:1], rows[1:2] * inverse.square(), rows[2:]])
        by_label = planned.to_labels(rows)
        norms, fractions = by_label[:3].sqrt(), planned.fractions(by_label[3:])
        values = [norms, norms[2:] / norms[:1], fractions]
        kinds = (*KINDS[:3], "update_ratio", *KINDS[3:])
        names = [f"{kind}/{label}" for kind in kinds for label in planned.labels]
        flat = [torch.cat(values).view(-1)]
        if sigmas is not None and planned.spectral is not None:
            names += [f"spectral_norm/{name}" for name in planned.spectral.names]
            flat.append(sigmas.to(flat[0]))
        if self._running is not None:
            names += ["noise_scale", "noise_signal", "noise_trace"]
            flat.append(self._noise(planned.of_local(rows[1]), window[place.stages :], place.stages, self._running))
        return Measurement(self.step, tuple(names), torch.cat(flat))

    def _noise(self, big: Tensor, local: Tensor, stages: int, running: RunningScale) -> Tensor:
        assert self.noise is not None
        assert self._planned.local is not None
        ranks = self._planned.local.data_ranks
        # Of each data rank: only the stage that computes the loss knows its weight.
        samples, powers = local[: stages * ranks].view(stages, ranks).amax(0), local[stages * ranks :]
        scale = 1.0 if self._scale is None else self._scale.to(powers)
        weighted = samples.sum() != 0
        counted = torch.where(weighted, samples, torch.full_like(samples, self._count))
        divisor = counted * scale
        if self.noise.samples is not None:
            counted = torch.full_like(samples, self.noise.samples)
        small = (powers / divisor.square()).mean()
        return running.add(estimates(small, big, counted.reciprocal().mean(), counted.sum().reciprocal()))

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Count of steps, means of the noise scale, vectors of the power iteration: the same on all ranks and in every
        layout; for a checkpoint's ``extra=``. Host reads: none."""
        spectral = self._planned.spectral
        return {
            "step": self.step,
            "noise": None if self._running is None else self._running.state_dict(),
            "spectral": None if spectral is None else spectral.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, on any layout.

        Raises:
            ValueError: It is something else; nothing is changed.
        """
        if not {"step", "noise", "spectral"} <= state.keys():
            raise ValueError(f"a state with {[*state]} is none of a Telemetry; give what its state_dict() returned")
        check_count(state["step"], "step")
        if self._running is not None and state["noise"] is not None:
            self._running.check_state(state["noise"])
        if self._planned.spectral is not None and state["spectral"] is not None:
            self._planned.spectral.check_state(state["spectral"])
        self.step = state["step"]
        if self._running is not None and state["noise"] is not None:
            self._running.load_state_dict(state["noise"])
        if self._planned.spectral is not None and state["spectral"] is not None:
            self._planned.spectral.load_state_dict(state["spectral"])
