"""`Telemetry`, which measures the norms of full weights, gradients and updates every few steps.

    telemetry = Telemetry(optimizer, every=50)
    monitor = Monitor(registry, JsonLines("run.jsonl"), telemetry=telemetry)

A figure is one measured number, such as ``update_norm/total``. `Telemetry` is a `StepObserver`:
`ParallelOptimizer.step` calls it before the gradient reduction, between reduction and clipping, and around the update.
Each rank measures its shards. It divides the results by the replication factor of each shard, the number of ranks that
hold it. One packed all-reduce then gives the sums over all shards of each logical parameter:

    [ |w|^2  |g|^2  |dw|^2  zeros  small ] of each parameter | weights of the accumulation window
    with `NoiseScale` also: weights of the accumulation window per data rank | |g_local|^2 of each data rank
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.layout.shard import Box, Region, narrowed
from ...parallel.mesh.agreement import check_same, gather_objects, on_all_ranks
from ...parallel.mesh.call_tracker import track_call
from ...parallel.mesh.deprecation import renamed_members
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.value_checks import check_count, check_finite, dict_of, is_whole
from ..build import check_is_parallel
from ..clip.clipper import WindowMean
from ..kernels.device_constants import Constants
from ..norm.global_norm import check_glob, matches
from ..norm.measure import check_every
from ..norm.plan_agreement import with_names
from ..norm.powers import accumulation_dtype
from ..parallel_optimizer import ParallelOptimizer
from ..states.chain import StepObserver
from ..step.data_parallel import FixedOrderSync
from ..step.update_request import Update, UpdateRequest
from ..step.window import Window, window_fields
from ..whole.tensors import LogicalTensor, WholeTensors
from .gradient_noise import (
    LocalGradients,
    NoiseScale,
    RunningScale,
    changes_,
    check_are_local,
    counts,
    is_local,
    kept,
    squares,
)

# Labels of figures: one per parameter, per layer, per param group, or per glob ----------------------------------------


By = Literal["parameter", "layer", "group"] | Mapping[str, str]
"""Assignment of labels to parameters. `Telemetry` measures norms and counts per label.

``"parameter"``: each parameter has its own label. ``"layer"``: the direct parameters of a module share a label; each
direct parameter of the model itself has its own label. ``"group"``: the parameters of a param group share a label. A
mapping from labels to globs over parameter names: a parameter gets the first label whose glob matches its name. If no
glob matches, it has no label, and is only in the total.
"""

TOTAL = "total"


def labelled(params: Sequence[tuple[str, int]], by: By) -> tuple[list[str], list[int | None]]:
    """Return the labels, and per logical parameter the index of its label; None for a parameter without a label.

    ``params`` has a pair (name, index of the param group) per logical parameter. Raise ValueError if a glob matches no
    parameter, or a label is ``"total"``.
    """
    names = [name for name, _ in params]
    if isinstance(by, Mapping):
        found = [next((label for label, glob in by.items() if matches(glob, name)), None) for name in names]
        for label, glob in by.items():
            _check_matches(glob, names, f"by={{{label!r}: {glob!r}}}")
        labels = list(by)
    else:
        found = [_label(name, group, by) for name, group in params]
        labels = list(dict.fromkeys(label for label in found if label is not None))
    if TOTAL in labels:
        advice = "give another label" if isinstance(by, Mapping) else "give labels with globs, {'mlp': '*.mlp.*'}"
        raise ValueError(f"by={by!r:.80} has the label {TOTAL!r}, which is reserved for the full model; {advice}")
    where = {label: index for index, label in enumerate(labels)}
    return labels, [None if label is None else where[label] for label in found]


def checked_by(by: object) -> None:
    """Raise ValueError unless ``by`` is "parameter", "layer", "group" or a mapping that is not empty.

    Raise TypeError for a mapping with a label or a glob that is not a string.
    """
    if by not in ("parameter", "layer", "group") and not (isinstance(by, Mapping) and by):
        raise ValueError(f"by={by!r}: give 'parameter', 'layer', 'group', or labels with globs, {{'mlp': '*.mlp.*'}}")
    for label, glob in by.items() if isinstance(by, Mapping) else ():
        if not isinstance(label, str):
            raise TypeError(
                f"by= has the label {label!r} of type {type(label).__name__}, expected a string; write {{'mlp': '*.mlp.*'}}"
            )
        check_glob(glob, f"by= at label {label!r}", f"write one label per glob, such as {{{label!r}: '*.mlp.*'}}")


def _check_matches(glob: str, names: Sequence[str], argument: str) -> None:
    """Raise ValueError if ``glob`` matches none of the parameter ``names``. The error begins with ``argument``."""
    if not any(matches(glob, name) for name in names):
        raise ValueError(f"{argument} matches no parameter; give a glob for one of {', '.join(names[:8])}, ...")


def matches_any(globs: Sequence[str], name: str) -> bool:
    return any(matches(glob, name) for glob in globs)


def _label(name: str, group: int, by: object) -> str:
    if by == "group":
        return f"group_{group}"
    plain, at, stage = name.partition("@")
    return (plain.rpartition(".")[0] or plain) + at + stage if by == "layer" else name


# Sums of groups of values, and sums over all ranks --------------------------------------------------------------------


class Slots:
    """Sums groups of values in a fixed order. Each group has a slot: the index of its sum in the result.

    Equal values give bitwise identical sums on every rank. (``index_add_`` on a GPU would add in an arbitrary order.)

    ``slots`` has the slot of each value's group; None: the value is in no sum. ``count`` is the number of slots.
    """

    def __init__(self, slots: Sequence[int | None], count: int, device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in range(count)]
        for index, slot in enumerate(slots):
            if slot is not None:
                members[slot].append(index)
        longest = max(map(len, members), default=0)
        nothing = len(slots)  # index of the zero that `__call__` appends
        rows = [[*of_slot, *[nothing] * (longest - len(of_slot))] for of_slot in members]
        self._members = torch.tensor(rows, dtype=torch.int64).reshape(count, longest).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sum of each group, [..., slots], of ``values``, [..., number of values]."""
        padded = torch.cat([values, values.new_zeros(*values.shape[:-1], 1)], -1)
        return padded[..., self._members].sum(-1)


def world_sum(packed: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    """Return the sum of ``packed`` over all ranks, on the same device. With one rank, return ``packed`` itself.

    Collectives: an all-reduce over the world if there are several ranks.
    Host synchronization: none if ``packed`` is on the device of the process groups.
    """
    if registry.topology.world_size == 1:
        return packed
    wire = packed.to(registry.device, copy=True)
    dist.all_reduce(wire, group=registry.group(*registry.topology.axes))
    return wire.to(packed.device)


# Largest singular values of sharded matrices, by power iteration ------------------------------------------------------

#     u = W v,    w = W^T u,    sigma = |w| / |u|,    v <- w / |w|
#
# Each element of a matrix is assigned to one of the ranks that hold it, so that replicated elements count once. A rank
# multiplies the rectangles that are assigned to it. One all-reduce sums the products of all matrices. The next
# measurement starts from the last v, so that few iterations per measurement are enough. Except for rounding, sigma is
# never larger than the largest singular value. A tensor with more than two dims is used as the matrix [first dim, all
# other dims].
#
# Reference: Miyato et al. 2018, "Spectral normalization for generative adversarial networks", arXiv:1802.05957, which
# keeps u between updates.


@dataclass(frozen=True)
class SpectralNorms:
    """Option of `Telemetry` to measure the largest singular values of matrices.

        Telemetry(optimizer, spectral=SpectralNorms(("*.weight",)))

    Args:
        globs: Tuple of globs over parameter names. Parameters with fewer than two dims are left out. Default: all
            parameters with two or more dims. A parameter with more than two dims counts as the matrix [first dim, all
            other dims].
        iterations: Number of power iterations per measurement, an integer >= 1. Default: 2.
    """

    globs: tuple[str, ...] = ("*",)
    iterations: int = 2

    def check(self) -> None:
        """Raise ValueError if an option is out of range, and TypeError for a glob that is not a string."""
        if not is_whole(self.iterations, 1):
            raise ValueError(f"SpectralNorms(iterations={self.iterations!r}): give a whole number >= 1")
        globs: object = self.globs
        if not isinstance(globs, tuple) or not globs:
            raise ValueError(f"SpectralNorms(globs={self.globs!r}): give a tuple of globs, such as ('*.weight',)")
        for index, glob in enumerate(globs):
            check_glob(glob, f"SpectralNorms(globs=...) at index {index}", "write a tuple, such as ('*.weight',)")


class PowerIteration:
    """Estimates the largest singular values of sharded matrices by power iteration.

    ``named`` has, per stepped tensor: the name of the full matrix (unique in the model), the tensor, and the region of
    the full matrix that it holds. None: the region is unknown, and the constructor raises ValueError on every rank.

    Collectives: an object all-gather in the constructor; none with one rank.
    Memory: on every rank, one row per matrix in float64. During a call, also a few rows and columns per matrix, and a
        float64 copy of one shard at a time.

    Attributes:
        names: Names of the matrices, in the same order on all ranks.
        vectors: {name of a matrix: current estimate of its first right singular vector}. Float64, with the shape of all
            dims except the first, bitwise identical on every rank.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor, Region | None]],
        registry: ProcessGroupRegistry,
        iterations: int,
        device: torch.device,
    ) -> None:
        self.registry, self.iterations, self.device = registry, iterations, device
        self._tensors = WholeTensors.of(named, registry)
        self._matrices = [self._tensors.everything[name] for name in sorted(self._tensors.everything)]
        self._canonical_boxes = [
            (matrix.name, position, boxes)
            for matrix in self._matrices
            if (boxes := matrix.sources().get(self._tensors.rank))
            for position in self._tensors.positions(matrix)
        ]
        self.names = tuple(matrix.name for matrix in self._matrices)
        self.vectors = {matrix.name: _start(matrix).to(device) for matrix in self._matrices}

    def __call__(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the estimated largest singular value of each matrix, [matrices] float64, and update `vectors`.

        ``pieces`` are the current stepped tensors, in the order of the constructor's ``named``. The values are in the
        order of `names`. A value is 0 for a matrix of zeros, and NaN for a matrix that contains NaN or inf.

        Collectives: two all-reduces over the world per iteration, for all matrices together; none with one rank.
        Host synchronization: none if the stepped tensors, the results and the process groups are on one device.
        """
        pieces = [piece.detach().contiguous() for piece in pieces]
        found: dict[str, Tensor] = {}
        for _ in range(self.iterations):
            left = self._products(pieces, self.vectors, transposed=False)
            for name, w in self._products(pieces, left, transposed=True).items():
                length, u_length = _length(w), _length(left[name])
                # a matrix of zeros, or with non-finite elements, leaves its vector unchanged
                found[name] = torch.where(u_length == 0, torch.zeros_like(u_length), length / u_length)
                self.vectors[name] = torch.where((length > 0) & length.isfinite(), w / length, self.vectors[name])
        return torch.stack([*found.values()]) if found else torch.zeros(0, dtype=torch.float64, device=self.device)

    def _products(self, pieces: Sequence[Tensor], vectors: Mapping[str, Tensor], transposed: bool) -> dict[str, Tensor]:
        """Return {name of a matrix W: W v}, or {name of a matrix W: W^T u} if ``transposed``.

        Collectives: an all-reduce over the world; none with one rank, or if there are no matrices.
        """
        results: dict[str, Tensor] = {}
        for matrix in self._matrices:
            shape = matrix.shape[1:] if transposed else matrix.shape[:1]
            results[matrix.name] = torch.zeros(shape, dtype=torch.float64, device=self.device)
        if not results:
            return {}
        for name, position, boxes in self._canonical_boxes:
            for box, part in self._tensors.views(position, pieces[position], boxes):
                row = Box(box.offsets[:1], box.sizes[:1])
                column = Box(box.offsets[1:], box.sizes[1:])
                given, made = (row, column) if transposed else (column, row)
                rows = part.to(self.device, torch.float64).flatten(1)
                product = (rows.mT if transposed else rows) @ narrowed(vectors[name], given).reshape(-1)
                narrowed(results[name], made).add_(product.view(made.sizes))
        packed = world_sum(torch.cat([product.reshape(-1) for product in results.values()]), self.registry)
        parts = iter(packed.split([product.numel() for product in results.values()]))
        return {name: next(parts).view(product.shape) for name, product in results.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of `vectors`. They are equal on every rank, and can be loaded on another mesh."""
        return {name: vector.clone() for name, vector in self.vectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load each vector for which ``state``, the result of `state_dict`, has one of the same name and shape.

        Other vectors keep their values. Raise ValueError, without a change, unless each value in ``state`` is a finite
        floating-point tensor.
        """
        self.check_state(state)
        for name, vector in self.vectors.items():
            if name in state and state[name].shape == vector.shape:
                self.vectors[name] = state[name].to(vector)

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``state`` maps names to finite floating-point tensors."""
        dict_of(check_finite)(state, "spectral")


def _start(matrix: LogicalTensor) -> Tensor:
    """Return a random unit vector of all dims except the first. Its seed, a hash of the name, is equal on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(matrix.name.encode()))
    vector = torch.randn(matrix.shape[1:], generator=generator, dtype=torch.float64)
    return vector.div_(torch.linalg.vector_norm(vector).clamp_min(1e-300))


def _length(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector)
    return length


# Measurement plan: built by all ranks together, and rebuilt when parameters are added to the optimizer ----------------


@dataclass(frozen=True)
class WindowDivisor:
    """The numbers by which the reduced gradients of an accumulation window must be divided to get the mean gradient.

    Args:
        weights: This rank's summands of the window's weight, [pipeline stages] float64.
        mean: The mean that the gradients must become.
        scale: The loss scale that the gradients contain. None: no loss scale.
    """

    weights: Tensor
    mean: WindowMean
    scale: Tensor | None = None

    @classmethod
    def of(cls, window: Window, optimizer: ParallelOptimizer[Any]) -> WindowDivisor:
        """Return the divisor of the gradients that ``optimizer`` has reduced."""
        registry = optimizer.registry
        weights = window_fields(window.weight, registry, optimizer.device).values.clone()
        ranks = registry.topology.size(*registry.topology.data_axes)
        return cls(weights, window.mean(ranks, isinstance(optimizer.grad_sync, FixedOrderSync)), window.scale)


class MeasurementPlan:
    """The tensors that `Telemetry` or `Recorder` measures, and the sums of the results per logical parameter.

    Collectives: an object all-gather if ranks have not exchanged parameter names yet; none with one rank.
    Host synchronization: the same.

    Attributes:
        source: The optimizer's `model_plan`. After the optimizer has replaced it, make a new measurement plan.
        model: The plan of the model parameters, with names.
        table: The stepped tensors. Their ``grad_tensor`` has the measured gradient.
        plan: The plan of the stepped tensors, with one entry per row of `table`.
        values: Function that returns the values of the stepped tensors, in the order of `table`. With `SplitMasters`, it
            returns the float32 weights.
        slots: Sums values of stepped tensors per logical parameter.
    """

    def __init__(self, optimizer: ParallelOptimizer[Any]) -> None:
        self.registry, self.device, self.constants = optimizer.registry, optimizer.device, Constants()
        self.source, chain = optimizer.model_plan, optimizer.transforms
        self.model = self.source if self.source.parameter_names else with_names(self.source, self.registry)
        self.table, self.values = chain.table(self.model), chain.values
        self.plan = self.table.plan
        self.slots = Slots(self.plan.parameter_slots, len(self.plan.parameter_names), self.device)
        weights = torch.tensor(self.plan.replica_weights, dtype=accumulation_dtype(self.device))
        self._weights = weights.to(self.device)

    def gradients(self) -> list[Tensor | None]:
        """Return the measured gradient of each stepped tensor."""
        return [tensor.grad for tensor in self.table.grad_tensors]

    def to_parameters(self, values: Tensor) -> Tensor:
        """Sum the values of this rank's shards per logical parameter, and return [..., logical parameters].

        Each value (of [..., stepped tensors]) is divided by the number of ranks that hold the same shard, so that the
        sum of the results over all ranks counts every shard once.
        """
        return self.slots(values * self._weights)


class TelemetryPlan(MeasurementPlan):
    """The measurement plan of `Telemetry`, with the sums of the results per label.

    Collectives: object all-gathers and one all-reduce; none with one rank.
    Host synchronization: yes, except with one rank.

    Attributes:
        numels: Number of elements of each gradient; 0 for a frozen parameter.
        labels: Labels of the figures. The last one is ``"total"``, for the full model.
        elements: Number of trainable elements of each label.
        matrices: Indices of the stepped tensors that belong to matrices whose singular values are measured.
        spectral: The power iteration for these matrices. None: singular values are not measured.
        local: Measures each data rank's gradient norm before averaging. None: the noise scale is not measured.
        left_out: Names of the parameters that the noise scale does not include.
    """

    def __init__(
        self, optimizer: ParallelOptimizer[Any], by: By, spectral: SpectralNorms | None, noise: NoiseScale | None
    ) -> None:
        super().__init__(optimizer)
        registry, names = self.registry, self.plan.parameter_names
        pairs = self.model.pair_entries(self.model.parameter_slots)
        own_slots = {slot: (entry.group, is_local(entry, registry.topology)) for entry, slot in pairs}
        everywhere = {slot: info for of_rank in gather_objects(own_slots, registry) for slot, info in of_rank.items()}
        params = [(name, everywhere[slot][0]) for slot, name in enumerate(names)]
        labels, where = on_all_ranks(lambda: labelled(params, by), registry)
        self.labels = (*labels, TOTAL)
        self._to_labels = Slots(where, len(labels), self.device)

        # 0 for a frozen parameter: its missing gradient must not count as zeros
        self.numels = [row.grad_tensor.numel() if row.trained else 0 for row in self.table]
        elements = self.to_parameters(torch.tensor(self.numels, dtype=self._weights.dtype).to(self.device))
        self.elements = self.to_labels(world_sum(elements, registry))

        globs = spectral.globs if spectral else ()
        for glob in globs:
            _check_matches(glob, names, f"SpectralNorms(globs=...): {glob!r}")
        fits = [matches_any(globs, name) for name in names]
        # The shape is None if shards have unequal sizes and no full shape is declared. `PowerIteration` then raises.
        matrix = [shape is None or len(shape) > 1 for shape in self.plan.parameter_shapes]
        slots = self.plan.parameter_slots
        self.matrices = [index for index, slot in enumerate(slots) if fits[slot] and matrix[slot]]
        self.spectral = None if spectral is None else self._power_iteration(spectral)
        self.local: LocalGradients | None = None
        self.left_out, self._own = tuple[str, ...](), torch.zeros(0)
        if noise is not None:
            self._see_local(optimizer, [everywhere[slot][1] for slot in range(len(names))])

    def _power_iteration(self, spectral: SpectralNorms) -> PowerIteration:
        rows = [self.table.rows[index] for index in self.matrices]
        named = [(self.table.name_of(row), row.tensor, row.region) for row in rows]
        return PowerIteration(named, self.registry, spectral.iterations, self.device)

    def _see_local(self, optimizer: ParallelOptimizer[Any], own: list[bool]) -> None:
        if not any(own):
            raise ValueError(
                "NoiseScale: no trained parameter has a gradient that comes from one data rank's samples only (parameters "
                "are frozen, sharded over a data axis, or owned by one data rank); leave noise= out"
            )
        params = optimizer.transforms.params
        self.local = LocalGradients(params, self.model, self.registry, self.device, self.constants)
        self.left_out = tuple(name for slot, name in enumerate(self.plan.parameter_names) if not own[slot])
        self._own = torch.tensor(own).to(self.device)

    def to_labels(self, values: Tensor) -> Tensor:
        """Sum ``values``, [..., logical parameters], per label, and return [..., labels]. The last sum is the total."""
        return torch.cat([self._to_labels(values), values.sum(-1, keepdim=True)], -1)

    def of_local(self, squares: Tensor) -> Tensor:
        """Return the sum of ``squares``, [logical parameters], over the parameters that the noise scale includes, 0-dim."""
        return torch.where(self._own, squares, 0.0).sum()


# Measurement ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Figures of one measured step, on the device, bitwise identical on every rank.

        telemetry = Telemetry(optimizer, every=1)
        optimizer.step()
        print(dict(zip(telemetry.last.names, telemetry.last.values.tolist())))

    Args:
        step: Number of the step, counted from 1, including skipped steps.
        names: Names of the measured numbers, such as ``"update_norm/total"``. Dashboards group names by the part before
            the slash.
        values: The numbers, in the order of ``names``, [number of names] float64 (float32 on a device without float64).
    """

    step: int
    names: tuple[str, ...]
    values: Tensor

    def to_dict(self) -> dict[str, float]:
        """Return {name: number}; the numbers may be NaN or inf.

        Host synchronization: one if the numbers are on a GPU.
        """
        return dict(zip(self.names, self.values.tolist(), strict=True))


# Telemetry ------------------------------------------------------------------------------------------------------------


@renamed_members(left_out="excluded_params")
class Telemetry(StepObserver):
    """Measures weights, gradients and updates in every ``every``-th step of an optimizer.

        telemetry = Telemetry(optimizer, every=50)

    Every rank creates a `Telemetry` at the same point of the program. A figure is one measured number. These figures
    are given for the full model (label ``total``) and for every label, with names such as ``param_norm/total``:

    * ``param_norm``, ``grad_norm``, ``update_norm``: L2 norms of the full tensors. The weights are the ones before the
      step (master weights if there are any). The gradient is unscaled, averaged, and not clipped yet. The update is the
      difference of the weights after and before the step, 0 in a skipped step.
    * ``update_ratio``: ``update_norm`` divided by ``param_norm``.
    * ``grad_zeros``: Fraction of the trainable elements whose gradient is 0 or missing.
    * ``grad_underflow``: Fraction of the trainable elements whose stored gradient is smaller in absolute value than
      2^-14, the smallest normal number of float16. Zeros are included. The stored gradient is multiplied by the loss
      scale, averaged over data ranks (with ``sum_order="fixed"`` summed), and summed over the accumulation window. In
      fp16, the fraction shows how many elements are too small despite the loss scale. In other modes, it shows how
      many elements would be too small in fp16 without a loss scale.

    These figures have no labels:

    * ``spectral_norm/<name>``: With `SpectralNorms`, an estimate of the largest singular value of each matrix before
      the step.
    * ``noise_scale``, ``noise_signal`` (|G|^2), ``noise_trace`` (S): With `NoiseScale`, the gradient noise scale S / |G|^2
      and the two estimates |G|^2 and S, over all parameters except `excluded_params`.

    Args:
        optimizer: The optimizer, with any precision and state placement.
        every: One step in ``every`` is measured; an integer >= 1. Skipped steps are counted. Default: 50.
        by: One label per "parameter", "layer" (module) or "group" (param group), or a mapping from labels to globs over
            parameter names. Default: "layer".
        spectral: Options to measure the largest singular values of matrices. None (default): not measured.
        noise: Options to measure the gradient noise scale. None (default): not measured.

    Raises:
        ValueError: On every rank: an argument is out of range or differs between ranks, a glob of ``by`` or
            ``spectral`` matches no parameter, a label is ``"total"``, a matrix for ``spectral=`` has shards of
            unequal sizes and no declared full shape (`annotate`), or the optimizer already has a Telemetry. With
            ``noise=`` also: gradients are reduced over data ranks before `step`, parameters are DTensors,
            ``sum_order="fixed"`` is used, there is only one data rank, or no trainable parameter's gradient comes from a
            single data rank's samples.
        TypeError: On every rank: ``spectral`` is not a `SpectralNorms`, ``noise`` is not a `NoiseScale`, or a label or
            glob is not a string. On this rank: the optimizer is not a `ParallelOptimizer`.

    Collectives: object all-gathers and an all-reduce in the constructor, and in the first measured step after
        `ParallelOptimizer.model_plan` has changed, for example by `add_param_group` or `refresh`. In a measured step, one
        all-reduce over the world. With ``noise=``, in addition at least one all-reduce per set of ranks that sum
        partial gradients or gradients of tied parameters. With ``spectral=``, in addition two all-reduces per
        iteration. None in other steps, and none with one rank.
    Host synchronization: in the constructor, and in the first measured step after a change of `model_plan`. In other
        steps none, except to copy tensors between the CPU and the GPU, as with `Offloaded`.
    Memory: in a measured step, a copy of the tensors that this rank steps (float32 for half precision), and 40 bytes
        per logical parameter. With ``noise=``, also copies of partial gradients. With ``spectral=``, also the memory of
        `PowerIteration`.

    Attributes:
        step: Number of steps so far, including skipped steps.
        last: The `Measurement` of the last measured step. None before the first one.
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
        check_is_parallel(optimizer)
        registry = optimizer.registry
        with track_call("Telemetry", registry):
            on_all_ranks(self._check, registry)
            options = {"every": every, "by": by, "spectral": spectral, "noise": noise}
            check_same({f"{key}= of Telemetry": value for key, value in options.items()}, registry)
            self._planned = TelemetryPlan(optimizer, by, spectral, noise)
        self.step = 0
        self.last: Measurement | None = None
        self._running = None if noise is None else RunningScale(noise.decay, optimizer.device)
        self._due = False
        self._gradients, self._window, self._local = Tensor(), Tensor(), Tensor()
        self._divisor = WindowDivisor(Tensor(), WindowMean())
        optimizer.add_observer(self)

    def _check(self) -> None:
        check_every(self.every, f"every={self.every!r}")
        if any(isinstance(observer, Telemetry) for observer in self.optimizer.observers):
            raise ValueError("the optimizer already has a Telemetry; call telemetry.close() before you create another")
        checked_by(self.by)
        for name, value, kind in (("spectral", self.spectral, SpectralNorms), ("noise", self.noise, NoiseScale)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name}={value!r}: give {kind.__name__}(), or None to leave it out")
        if self.spectral is not None:
            self.spectral.check()
        if self.noise is not None:
            self.noise.check()
            check_are_local(self.optimizer)

    @property
    def excluded_params(self) -> tuple[str, ...]:
        """Return the names of the parameters that the noise scale does not include; empty without ``noise=``.

        These are frozen parameters, and parameters whose gradients come from the samples of several data ranks. The
        latter are sharded over a data axis (experts), or exist on one rank of a data axis only (``owned`` in `P`).
        """
        return self._planned.left_out

    def close(self) -> None:
        """Stop measuring the optimizer's steps. A second call does nothing."""
        self.optimizer.remove_observer(self)

    # Events of a step ------------------------------------------------------------------------------------------------

    def not_captured(self) -> str | None:
        return "Telemetry counts and measures steps in Python: close() it before the capture"

    def local_grads(self, window: Window) -> None:
        self._due = (self.step + 1) % self.every == 0
        if not self._due:
            return
        before = self._planned
        if self.optimizer.model_plan is not before.source:
            self._planned = TelemetryPlan(self.optimizer, self.by, self.spectral, self.noise)
            if before.spectral is not None and self._planned.spectral is not None:
                self._planned.spectral.load_state_dict(before.spectral.state_dict())
        if self._planned.local is not None:
            self._local = self._planned.local.powers()

    def reduced_grads(self, window: Window) -> None:
        if not self._due:
            return
        planned = self._planned
        gradients = planned.gradients()
        found = torch.cat(
            [
                squares(gradients, planned.device, planned.constants).view(1, -1),
                counts(gradients, planned.numels, planned.device, planned.constants),
            ]
        )
        self._gradients = planned.to_parameters(found)
        self._divisor = WindowDivisor.of(window, self.optimizer)
        self._window = self._divisor.weights
        if planned.local is not None:
            weights = self._window.new_zeros(len(self._window), planned.local.data_ranks)
            weights[:, planned.local.data_rank] = self._window
            self._window = torch.cat([self._window, weights.view(-1), self._local])

    def update(self, request: UpdateRequest, update: Update) -> None:
        """Call ``update(request)``. In a measured step, also measure the weights before and after it, and set `last`.

        Collectives: those of ``update``. If there are several ranks, in a measured step also one all-reduce over the
            world, and with ``spectral=`` two more per iteration.
        """
        self.step += 1
        if not self._due:
            update(request)
            return
        self._due, planned = False, self._planned
        values = planned.values()
        before = kept(values)
        weights = squares(before, planned.device, planned.constants)
        sigmas = None
        with track_call("Telemetry", planned.registry):
            if planned.spectral is not None:
                sigmas = planned.spectral([values[index] for index in planned.matrices])
        del values
        update(request)
        changes = squares(changes_(before, planned.values()), planned.device, planned.constants)
        del before
        weights, changes = planned.to_parameters(torch.stack([weights, changes])).unbind()
        rows = torch.stack([weights, self._gradients[0], changes, *self._gradients[1:]])
        with track_call("Telemetry", planned.registry):
            totals = world_sum(torch.cat([rows.view(-1), self._window.to(rows)]), planned.registry)
        self.last = self._figures(totals[: rows.numel()].view(rows.shape), totals[rows.numel() :], sigmas)

    # Figures ---------------------------------------------------------------------------------------------------------

    def _figures(self, rows: Tensor, window: Tensor, sigmas: Tensor | None) -> Measurement:
        """Return the `Measurement` of this step.

        ``rows``, [5, logical parameters], are sums over all ranks: |w|^2, |g|^2, |dw|^2, number of zeros, number of
        small elements. The gradient g is still multiplied by the loss scale and the weight of the accumulation window.

        ``window`` has the other sums over all ranks: weights of the accumulation window per pipeline stage. With
        ``noise=`` also the weights per data rank, and |g_local|^2 per data rank.
        """
        planned, scale = self._planned, self._divisor.scale
        stages = len(self._divisor.weights)
        inverse = self._divisor.mean.inverse(window[:stages])
        if scale is not None:
            inverse = inverse / scale.to(inverse)
        rows = torch.cat([rows[:1], rows[1:2] * inverse.square(), rows[2:]])
        by_label = planned.to_labels(rows)
        norms, fractions = by_label[:3].sqrt(), by_label[3:] / planned.elements
        values = [norms, norms[2:] / norms[:1], fractions]
        kinds = ("param_norm", "grad_norm", "update_norm", "update_ratio", "grad_zeros", "grad_underflow")
        names = [f"{kind}/{label}" for kind in kinds for label in planned.labels]
        flat = [torch.cat(values).view(-1)]
        if sigmas is not None and planned.spectral is not None:
            names += [f"spectral_norm/{name}" for name in planned.spectral.names]
            flat.append(sigmas.to(flat[0]))
        if self._running is not None:
            names += ["noise_scale", "noise_signal", "noise_trace"]
            flat.append(self._noise(planned.of_local(rows[1]), window[stages:], self._running))
        return Measurement(self.step, tuple(names), torch.cat(flat))

    def _noise(self, big: Tensor, local: Tensor, running: RunningScale) -> Tensor:
        assert self.noise is not None
        assert self._planned.local is not None
        ranks, stages, divisor = self._planned.local.data_ranks, len(self._divisor.weights), self._divisor
        # only the pipeline stage that computes the loss has the weight of ``backward(weight=...)``; other stages have 0
        samples, powers = local[: stages * ranks].view(stages, ranks).amax(0), local[stages * ranks :]
        scale = 1.0 if divisor.scale is None else divisor.scale.to(powers)
        weighted = samples.sum() != 0
        counted = torch.where(weighted, samples, torch.full_like(samples, divisor.mean.mean_of))
        scaled = counted * scale
        if self.noise.samples is not None:
            counted = torch.full_like(samples, self.noise.samples)
        small = (powers / scaled.square()).mean()
        return running.add(small, big, counted.reciprocal().mean(), counted.sum().reciprocal())

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the means for the noise scale and the vectors of the power iteration.

        The state is equal on all ranks, and can be loaded on another mesh. Save it in a checkpoint's ``extra=``.

        Host synchronization: none.
        """
        spectral = self._planned.spectral
        return {
            "step": self.step,
            "noise": None if self._running is None else self._running.state_dict(),
            "spectral": None if spectral is None else spectral.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, which may come from a run on another mesh.

        Raises:
            ValueError: ``state`` is not a state of a Telemetry; nothing is changed.
        """
        if not {"step", "noise", "spectral"} <= state.keys():
            raise ValueError(
                f"state has the keys {[*state]}; 'step', 'noise' and 'spectral' are needed: give the result of "
                "Telemetry.state_dict()"
            )
        check_count(state["step"], "step")
        pairs = [(self._running, state["noise"]), (self._planned.spectral, state["spectral"])]
        given = [(part, saved) for part, saved in pairs if part is not None and saved is not None]
        for part, saved in given:
            part.check_state(saved)
        self.step = state["step"]
        for part, saved in given:
            part.load_state_dict(saved)
