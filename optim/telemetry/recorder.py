"""`Recorder`, which writes norms, hashes and sketches of every full parameter to a file, to compare two runs.

    with Recorder(optimizer, "run.jsonl", every=100):
        train()

The first line of the file describes the run: its topology, and the layout of every parameter. This line is written again
after `Recorder.load_state_dict` and after a change of the parameters, such as `add_param_group`. Each other line is one
recorded step. ``python -m meshstep.optim compare`` compares two files, which may come from different layouts.

A recorded step sums these numbers over all ranks, in one all-reduce:

    per parameter: |w|^2  |g|^2  |dw|^2, three sketches, three hashes, number of shards whose region is not known
    also: comparisons of replicas, hash of the batch, weights of the accumulation window
"""

from __future__ import annotations

import base64
import json
from array import array
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ...parallel.mesh.agreement import check_same, gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.value_checks import check_count
from ..build import check_is_parallel
from ..clip.clipper import WindowMean
from ..norm.measure import check_every
from ..norm.powers import accumulation_dtype
from ..norm.replicas import ReplicaCheck
from ..parallel_optimizer import ParallelOptimizer
from ..states.chain import StepObserver
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window
from ..step.wrapped_optimizer import parts_of
from .gradient_noise import changes_, kept, squares
from .telemetry import MeasurementPlan, WindowDivisor, world_sum
from .tensor_digest import BUCKETS, HASH_WORDS, digest, hash_words, joined_hash, row_hashes
from .writers import ClosedAtExit, ReportFile, step_of_json

VERSION = 1
QUANTITIES = ("weight", "gradient", "update")
# Numbers per parameter: squares, sketches, hashes, and the number of shards whose region is not known.
_ROWS = 3 + 3 * BUCKETS + 3 * HASH_WORDS + 1
_BATCH = HASH_WORDS + 1


class RecordFile(ReportFile):
    """The file of a `Recorder`. `ReportFile` describes how lines of an existing file are moved."""

    def _step(self, line: str) -> int | None:
        return step_of_json(line)

    def write(self, line: Mapping[str, object]) -> None:
        """Write ``line`` as JSON, with NaN and infinity as ``json`` writes them."""
        self._write(json.dumps(line, allow_nan=True) + "\n")


class _RecordPlan(MeasurementPlan):
    """The measurement plan of a recorder.

    ``unknown`` has, per parameter, how many of this rank's shards have an unknown region: [1, parameters].

    Collectives: object all-gathers; none with one rank.
    """

    def __init__(self, optimizer: ParallelOptimizer[Any]) -> None:
        super().__init__(optimizer)
        registry = self.registry
        self.names = self.plan.parameter_names
        self.regions = [
            row.region if row.region is not None and row.region.numel == row.grad_tensor.numel() else None
            for row in self.table
        ]
        self.check = ReplicaCheck(self.plan, self.table.grad_tensors, self.device, exact=True, what="weight")
        # Only the first replica of a shard adds its hash.
        self._first = torch.tensor(self.plan.are_first_replicas, dtype=torch.float64).to(self.device)
        unknown = torch.tensor([[region is None for region in self.regions]], dtype=torch.float64)
        self.unknown = self.slots(unknown.to(self.device))
        self.counts_batch = all(
            at == 0 or axis in registry.topology.data_axes
            for axis, at in registry.topology.coordinate(registry.global_rank).items()
        )
        self.parameters = self._describe()

    def _describe(self) -> dict[str, dict[str, Any]]:
        """Return the description of every full parameter by name."""
        topology = self.registry.topology
        own: dict[str, dict[str, Any]] = {}
        for row in self.table:
            spec = row.model_entry.spec.resolve(topology)
            shape = row.region.full_shape if row.region is not None else row.model_entry.full_shape
            own[self.table.name_of(row)] = {
                "shape": None if shape is None else list(shape),
                "dtype": str(row.model_entry.dtype).removeprefix("torch."),
                "stepped": str(row.tensor.dtype).removeprefix("torch."),
                "group": row.group,
                "trained": row.trained,
                "sharded": list(spec.sharded_axes),
                "partial": list(spec.partial),
                "distinct": list(spec.distinct_axes(topology)),
                "owned": [axis for axis, _ in spec.owned],
                "tied": [axis for axis, _ in spec.tied],
            }
        found = ChainMap(*gather_objects(own, self.registry))
        return {name: found[name] for name in self.names}

    def words(self, hashes: Tensor) -> Tensor:
        """Return this rank's summands of the hashes per parameter, [HASH_WORDS, parameters]."""
        return self.slots(hash_words(hashes).mT * self._first)

    def sketches(self, sketches: Tensor) -> Tensor:
        """Return this rank's summands of the sketches per parameter, [BUCKETS, parameters].

        Each replica counts equally, so the result is the sketch of the mean of the replicas, if they differ.
        """
        return self.to_parameters(sketches.mT)


@dataclass
class _Pending:
    """A recorded step whose numbers are still on the device."""

    step: int
    totals: Tensor
    divisor: WindowDivisor
    micro_batches: int
    groups: list[dict[str, Any]]


class Recorder(StepObserver, ClosedAtExit):
    """Writes norms, hashes and sketches of all weights, gradients and updates every ``every`` steps, to compare runs.

        with Recorder(optimizer, "run.jsonl", every=100, seed=0) as recorder:
            recorder.batch(batch)
            optimizer.backward(loss)
            optimizer.step()

    ``python -m meshstep.optim compare A.jsonl B.jsonl``, or `compare_runs`, finds the first difference of two recordings.
    Names and numbers describe full parameters, so recordings of different layouts can be compared. Every rank creates a
    recorder; global rank 0 writes the file.

    A recorded step describes three tensors of each parameter: the weight before the step (the master weight if there is
    one), the reduced and unscaled gradient before clipping, and the update. For each of these tensors, it has the L2
    norm, a hash of all bits and a sketch: `BUCKETS` signed sums of elements, from which `compare_runs` estimates
    distances. A recorded step also has the loss scale, the numbers among the options of all param groups, the gradient
    norm and the clip coefficient, and the axes along which replicas differ.

    The norm and the sketch of a gradient describe the gradient that is applied, before clipping. The hash describes the
    gradient without the loss scale, averaged over data ranks, and with ``accumulation_steps`` over micro-batches. The
    hashed gradient is not divided by the total weight of ``backward(weight=...)``.

    Args:
        optimizer: The optimizer, with any layout, precision and state placement. Its device must support float64.
        path: The file. If it exists, its lines of later steps are moved to ``<path>.dropped``, as by `JsonLines`.
        every: One step in ``every`` is recorded, and also the first step; an integer >= 1. Default: 1.
        seed: The random seed of the run. It is only written to the file. None (default): not recorded.

    Raises:
        ValueError: On every rank: ``every`` is no integer >= 1, ``every`` or ``seed`` differs between ranks, or the device
            has no float64.
        TypeError: On every rank: ``path`` is neither a str nor an os.PathLike. On this rank: the optimizer is not a
            `ParallelOptimizer`.

    Collectives: object all-gathers in the constructor, and in the first recorded step after
        `ParallelOptimizer.model_plan` has changed, for example by `add_param_group` or `refresh`. One all-reduce over the
        world in a recorded step; none in other steps, and none with one rank.
    Host synchronization: in the constructor, and after a change of the `model_plan`. On global rank 0, one per recorded
        step, in the next step or in `flush`, and one more per param group option that is a tensor on the device.
    Memory: in a recorded step, a copy of the tensors that this rank steps, about 60 MB, and 0.5 kB per parameter.

    Attributes:
        step: Number of steps so far, including skipped steps.
    """

    def __init__(
        self,
        optimizer: ParallelOptimizer[Any],
        path: str | PathLike[str],
        *,
        every: int = 1,
        seed: int | None = None,
    ) -> None:
        self.optimizer, self.every, self.seed = optimizer, every, seed
        check_is_parallel(optimizer)
        registry = optimizer.registry
        with track_call("Recorder", registry):
            self._file = on_all_ranks(lambda: self._checked_file(path), registry)
            check_same({"every= of Recorder": every, "seed= of Recorder": seed}, registry)
            self._plan = _RecordPlan(optimizer)
        self.step = 0
        self._begun, self._due = False, False
        self._pending: _Pending | None = None
        self._gradients, self._hashes = Tensor(), Tensor()
        self._divisor, self._micro_batches = WindowDivisor(Tensor(), WindowMean()), 1
        self._batch: Tensor | None = None
        optimizer.add_observer(self)

    def _checked_file(self, path: str | PathLike[str]) -> RecordFile:
        """Check the arguments, and return the file, which is not created yet."""
        check_every(self.every, f"every={self.every!r}")
        if accumulation_dtype(self.optimizer.device) != torch.float64:
            raise ValueError(
                f"Recorder needs float64, which {self.optimizer.device.type!r} does not support; move the model to a "
                "CPU or a CUDA device"
            )
        try:
            return RecordFile(path)
        except TypeError:
            raise TypeError(f"path is {path!r}; give the path of the file, a str or an os.PathLike") from None

    def _is_recorded(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def batch(self, *tensors: Tensor) -> None:
        """Add this rank's samples to the hash of the batch of the next step. Call it once per micro-batch, if at all.

        The hash does not depend on the order of the samples, nor on their distribution over data ranks and micro-batches.
        Along axes that are not data axes, only ranks with coordinate 0 add their samples.

        Host synchronization: none. It does nothing if the next step is not recorded.

        Args:
            *tensors: The inputs, and also the targets if you like. The first dim counts the samples.

        Raises:
            ValueError: This rank adds its samples, the next step is recorded, and no tensor is given.
        """
        if self._is_recorded(self.step + 1) and self._plan.counts_batch:
            found = row_hashes(tensors)
            self._batch = found if self._batch is None else self._batch + found

    # Events of a step -------------------------------------------------------------------------------------------------

    def not_captured(self) -> str | None:
        return "Recorder counts and records steps in Python: close() it before the capture"

    def local_grads(self, window: Window) -> None:
        self.flush()
        self._due = self._is_recorded(self.step + 1)
        if self._due and self.optimizer.model_plan is not self._plan.source:
            self._plan, self._begun = _RecordPlan(self.optimizer), False

    def reduced_grads(self, window: Window) -> None:
        if not self._due:
            return
        plan, divisor = self._plan, WindowDivisor.of(window, self.optimizer)
        gradients = plan.gradients()
        factor = torch.full((), 1 / divisor.mean.mean_of, device=plan.device)
        powers = squares(gradients, plan.device, plan.constants)
        if divisor.scale is not None:
            scale = divisor.scale.clone()  # the step changes it before `flush` reads it
            divisor = replace(divisor, scale=scale)
            factor = factor / scale.to(factor)
            powers = powers / scale.to(powers).square()
        found = digest(gradients, plan.regions, plan.device, factor)
        self._gradients = torch.cat(
            [plan.to_parameters(powers).unsqueeze(0), plan.sketches(found.sketches), plan.words(found.hashes)]
        )
        self._hashes = found.hashes
        self._divisor, self._micro_batches = divisor, window.micro_batches

    def update(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update(request)``. In a recorded step, also digest the weights before the call, and their change.

        Collectives: those of ``update``, and in a recorded step one all-reduce over the world if there are several ranks.
        """
        self.step += 1
        if not self._due:
            update(request)
            return
        self._due, plan = False, self._plan
        device, constants = plan.device, plan.constants
        groups = [_options(group) for group in self.optimizer.param_groups]
        before = kept(plan.values())
        weights = digest(before, plan.regions, device)
        squared = [squares(before, device, constants)]
        update(request)
        changes = changes_(before, plan.values())
        updates = digest(changes, plan.regions, device)
        squared.append(squares(changes, device, constants))
        del before, changes
        weight, change = plan.to_parameters(torch.stack(squared)).unbind()
        gradient, sketch, words = self._gradients.split([1, BUCKETS, HASH_WORDS])
        rows = torch.cat(
            [
                torch.stack([weight, gradient[0], change]),
                plan.sketches(weights.sketches),
                sketch,
                -plan.sketches(updates.sketches),  # `changes_` gives before - after
                plan.words(weights.hashes),
                words,
                plan.words(updates.hashes),
                plan.unknown,
            ]
        )
        replicas = torch.zeros(0, dtype=torch.float64, device=device)
        if plan.check.numel:  # 0 on a mesh without axes
            replicas = plan.check.weighted(torch.stack([weights.hashes, self._hashes], 1))
        batch = torch.zeros(_BATCH, dtype=torch.float64, device=device)
        if self._batch is not None:
            batch = torch.cat([hash_words(self._batch.to(device)), batch.new_ones(1)])
        with track_call("Recorder", plan.registry):
            packed = torch.cat([rows.view(-1), replicas.to(rows), batch, self._divisor.weights.to(rows)])
            totals = world_sum(packed, plan.registry)
        self._batch = None
        if plan.registry.global_rank == 0:
            self._pending = _Pending(self.step, totals, self._divisor, self._micro_batches, groups)

    # The file ---------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the last recorded step to the file, if it was not written yet.

        Host synchronization: on global rank 0, if a step is written: one, and one per option that is a device tensor.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not self._begun:
            self._file.begin(pending.step - 1)
            self._file.write(self._header(pending.step))
            self._begun = True
        self._file.write(self._record(pending))

    def _header(self, step: int) -> dict[str, Any]:
        optimizer, topology = self.optimizer, self.optimizer.registry.topology
        return {
            "recording": VERSION,
            "step": step,
            "axes": {axis: [topology.size(axis), topology.role(axis)] for axis in topology.axes},
            "precision": optimizer.precision.name,
            "optimizer": [type(part).__name__ for part in parts_of(optimizer.optimizer)],
            "max_norm": str(optimizer.max_norm),
            "every": self.every,
            "seed": self.seed,
            "parameters": self._plan.parameters,
        }

    def _record(self, pending: _Pending) -> dict[str, Any]:
        plan, stats = self._plan, self.optimizer.last_stats
        totals, divisor = pending.totals, pending.divisor
        tensors = {"inverse": divisor.mean.inverse(totals[-len(divisor.weights) :])}
        if stats is not None:
            tensors |= {"grad_norm": stats.total_norm, "clip_coef": stats.clip_coef, "skipped": stats.skipped}
            if divisor.scale is not None:
                tensors["loss_scale"] = divisor.scale
        flat = torch.cat([totals, torch.stack([value.to(totals) for value in tensors.values()])])
        numbers = array("d", flat.tolist())  # the only synchronization, except for options that are tensors
        scalars = dict(zip(tensors, numbers[len(totals) :], strict=True))
        names = len(plan.names)
        columns = [numbers[row * names : (row + 1) * names] for row in range(_ROWS)]
        at = _ROWS * names
        replicas = torch.tensor(numbers[at : at + plan.check.numel], dtype=torch.float64)
        differing: dict[str, dict[str, list[str]]] = {}
        for slot, axis, kind in plan.check.differing(replicas):
            differing.setdefault(plan.names[slot], {}).setdefault(kind, []).append(axis)
        batch = numbers[at + plan.check.numel : at + plan.check.numel + _BATCH]
        parameters = {}
        for slot, name in enumerate(plan.names):
            own = [column[slot] for column in columns]
            is_double = plan.parameters[name]["stepped"] == "float64"
            parameters[name] = _entry(own, scalars["inverse"], divisor.mean.mean_of, is_double)
        return {
            "step": pending.step,
            "loss_scale": scalars.get("loss_scale"),
            "grad_norm": scalars.get("grad_norm"),
            "clip_coef": scalars.get("clip_coef"),
            "skipped": bool(scalars["skipped"]) if stats is not None else None,
            "micro_batches": pending.micro_batches,
            "groups": [{name: _plain(value) for name, value in group.items()} for group in pending.groups],
            "batch": joined_hash(batch[:HASH_WORDS]) if batch[HASH_WORDS] else None,
            "replicas": differing,
            "parameters": parameters,
        }

    def close(self) -> None:
        """Write the last recorded step, close the file and stop recording. A second call does nothing."""
        self.flush()
        self._file.close()
        self.optimizer.remove_observer(self)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, so that step numbers continue after a checkpoint was loaded."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, which may come from another layout.

        A recorded step that is not in the file yet is discarded; call `flush` first to keep it.

        Raises:
            ValueError: ``state`` has no valid step; nothing is changed.
        """
        if "step" not in state:
            raise ValueError(f"state has the keys {[*state]}, but no 'step'; give the result of Recorder.state_dict()")
        check_count(state["step"], "step")
        self.step, self._begun, self._pending = state["step"], False, None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among a param group's options. Tensors are copied, because schedulers change them in place."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach().clone()
        elif name != "params" and (isinstance(value, (bool, int, float)) or _is_numbers(value)):
            found[name] = value
    return found


def _is_numbers(value: object) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(item, (int, float)) for item in value)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value


def _entry(numbers: Sequence[float], divisor: float, mean_of: int, double: bool) -> list[Any]:
    """Return a parameter's list in the file: three norms, three hashes, and the sketches in base64.

    The hashes and the sketches are None if a shard's region is not known.

    ``divisor`` turns the reduced gradient, without the loss scale, into the mean over the accumulation window: the
    number of data ranks over which the gradient is averaged, divided by the total weight of the accumulation window.
    Without weights, it is 1 / ``mean_of``. The sketch of the gradient is divided by ``mean_of`` already.
    """
    norms = [max(square, 0.0) ** 0.5 if square == square else square for square in numbers[:3]]
    norms[1] *= divisor
    if numbers[-1]:  # the region of a shard is not known
        return [*norms, None, None, None, None]
    sketches = array("d" if double else "f", numbers[3 : 3 + 3 * BUCKETS])
    for at in range(BUCKETS, 2 * BUCKETS):
        sketches[at] *= divisor * mean_of
    words = numbers[3 + 3 * BUCKETS : -1]
    hashes = [joined_hash(words[at : at + HASH_WORDS]) for at in range(0, len(words), HASH_WORDS)]
    return [*norms, *hashes, base64.b64encode(sketches.tobytes()).decode()]
