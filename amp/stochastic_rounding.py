"""Optimizer steps for bfloat16 parameters without master weights: computed in float32, then rounded stochastically.

Rounding to nearest loses every update below half a unit in the last place, and training stalls. Stochastic rounding
rounds a value up or down to a neighbouring bfloat16. The probability of the upper neighbour is the value's distance from
the lower neighbour, divided by the distance between the neighbours. The mean of the result is therefore the exact value,
and a small update takes effect in some of the steps.

Reference: Gupta et al. 2015, "Deep learning with limited numerical precision", arXiv:1502.02551.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..parallel.interop.local_parameters import has_dtensors, missing_spec, spec_of
from ..parallel.layout.annotation import annotation_of, copy_annotation
from ..parallel.layout.spec import P
from ..parallel.mesh.registry import ProcessGroupRegistry
from ..parallel.mesh.value_checks import check_count, fields, wrong
from .by_bucket import Bucket, split_groups, split_runs, step_by_bucket
from .casting import copy_each_, flat_offsets, float32_of
from .master_weights import is_half_kept, load_shared_numbers_exactly

# Stochastic rounding of tensors ---------------------------------------------------------------------------------------

# Maximum total of the elements of several tensors that a CPU rounds together, so that temporaries fit into its cache. A
# larger tensor is rounded alone.
CACHED = 2**16


@torch.no_grad()
def stochastic_round_(target: Tensor, source: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Write ``source`` into ``target``, each value rounded at random to the bfloat16 above or below it.

    The probabilities are such that the mean of the result is the value. Values that bfloat16 represents exactly, and
    infinities, are copied unchanged. A quiet NaN, which arithmetic returns, stays NaN: on a CPU it is cut to its upper 16
    bits, on a GPU it becomes torch's default NaN. A value above the largest finite bfloat16 may be rounded to infinity.

        stochastic_round_(weight, weight_float32, torch.Generator("cuda").manual_seed(0))

    Args:
        target: bfloat16 tensor of any shape; written in place.
        source: float32 tensor of the same shape and device.
        generator: Random generator of the same device. The call draws 64 bits from it per four elements. Default None:
            torch's default generator.
    Returns:
        ``target``.
    Raises:
        ValueError: ``target`` is not bfloat16, ``source`` is not float32, or the shapes differ.
    Collectives: none. Host synchronization: none. Temporary memory if ``source`` is contiguous: up to 10 bytes per element.
    """
    if (target.dtype, source.dtype) != (torch.bfloat16, torch.float32) or target.shape != source.shape:
        raise ValueError(
            f"the source is {source.dtype} of shape {tuple(source.shape)}, the target {target.dtype} of shape "
            f"{tuple(target.shape)}; give a float32 source and a bfloat16 target of equal shape"
        )
    _round_each_([(target, source)], _draw_noise([source], 1, [generator])[0])
    return target


class Noise(NamedTuple):
    """The identity of the rounding noise of one parameter in one step. Equal values mean equal noise on every rank.

    ``steps`` is the number of steps before this step. ``name`` identifies the parameter and this rank's shard of it.
    """

    seed: int
    steps: int
    name: str

    @property
    def generator_seed(self) -> int:
        """Return the seed of the random generator that draws the noise of this step."""
        digest = blake2b(f"{self.seed} {self.steps} {self.name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    @property
    def key(self) -> int:
        """Return a 64-bit number that identifies the parameter in all steps, for kernels that get ``steps`` separately."""
        return int.from_bytes(blake2b(f"{self.seed} {self.name}".encode(), digest_size=8).digest(), "big")


class Drawn(NamedTuple):
    """Tensors to round stochastically, all with the noise of one parameter: the parameter itself and its optimizer states.

    ``pairs`` are (bfloat16 target, floating-point source) pairs. The noise is drawn in this order.
    """

    noise: Noise
    pairs: Sequence[tuple[Tensor, Tensor]]


RoundingKernel = Callable[[Sequence[Drawn]], Sequence[Drawn]]
"""A function that rounds the `Drawn` objects that it supports, and returns all other `Drawn` objects."""


@torch.no_grad()
def round_all_(everything: Iterable[Drawn], numel_at_once: int, kernel: RoundingKernel | None) -> None:
    """Round the source of each pair into its target, with few kernels for many tensors.

    On a CPU, the results are bitwise those of calling `stochastic_round_` for one pair after the other, with one generator
    per `Drawn` object, except for tensors that ``kernel`` rounds. `Drawn` objects on the same device with equal numbers of
    pairs are rounded together. An object whose pairs have different shapes is rounded pair by pair.

    At most ``numel_at_once`` elements are rounded together, on a CPU at most `CACHED`. A larger tensor is rounded alone.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def seeded(drawn: Drawn) -> torch.Generator:
        device = drawn.pairs[0][0].device
        if device not in generators:
            generators[device] = torch.Generator(device)
        return generators[device].manual_seed(drawn.noise.generator_seed)

    groups: dict[tuple[torch.device, int], list[Drawn]] = {}
    for drawn in everything if kernel is None else kernel(list(everything)):
        if len({source.shape for _, source in drawn.pairs}) == 1:
            groups.setdefault((drawn.pairs[0][0].device, len(drawn.pairs)), []).append(drawn)
            continue
        generator = seeded(drawn)
        for target, source in drawn.pairs:
            stochastic_round_(target, source.float(), generator)
    for (device, rounds), group in groups.items():
        most = min(numel_at_once, CACHED) if device.type == "cpu" else numel_at_once
        for run in split_runs(group, lambda drawn: drawn.pairs[0][0].numel(), most):
            noise = _draw_noise([drawn.pairs[0][1] for drawn in run], rounds, map(seeded, run))
            for index, round_noise in enumerate(noise):
                _round_each_([drawn.pairs[index] for drawn in run], round_noise)


def _draw_noise(tensors: Sequence[Tensor], rounds: int, generators: Iterable[torch.Generator | None]) -> Tensor:
    """Return int16 noise [rounds, elements of the flat buffer], uniform in [-2^15, 2^15).

    `flat_offsets` defines where the noise of each tensor is in the flat buffer. A tensor's generator yields the noise of
    all its rounds, in order. The next of the ``generators`` is taken right before it is used, so an iterator may seed and
    yield the same generator again and again.
    """
    *starts, length = flat_offsets(tensors)
    noise = torch.empty(rounds, length // 4, dtype=torch.int64, device=tensors[0].device)
    for start, tensor, generator in zip(starts, tensors, generators, strict=True):
        tensor_noise = noise[:, start // 4 : start // 4 + -(-tensor.numel() // 4)]
        # One int64 serves four elements, because the draws dominate the cost on a CPU.
        tensor_noise.random_(-(2**63), None, generator=generator)
    return noise.view(torch.int16)


def _round_each_(pairs: Sequence[tuple[Tensor, Tensor]], noise: Tensor) -> None:
    """Round the source of each pair into its bfloat16 target. ``noise`` is one row of the result of `_draw_noise`."""
    sources = [source.float() for _, source in pairs]
    if len(sources) == 1:
        flat, noise = sources[0].reshape(-1), noise[: sources[0].numel()]
    else:
        flat = torch.empty(noise.numel(), dtype=torch.float32, device=noise.device)
        copy_each_(_parts_of(flat, sources), sources)
    bits = (_add_noise_by_mask if flat.is_cpu else _add_noise_to_default_nans)(flat, noise)
    copy_each_([target.view(torch.int16) for target, _ in pairs], _parts_of(bits, sources))


def _parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of a flat buffer that belongs to each tensor (see `flat_offsets`), with the shape of the tensor."""
    starts = flat_offsets(tensors)[:-1]
    return [flat[start : start + t.numel()].view(t.shape) for start, t in zip(starts, tensors, strict=True)]


# A bfloat16 is the upper half of the bits of a float32. The lower half, divided by 2^16, is a fraction of a unit in the
# last place. Adding a uniform number below 2^16 to the bits carries into the upper half with a probability equal to this
# fraction, for either sign. A carry would overflow the bits of some NaNs.


def _add_noise_by_mask(flat: Tensor, noise: Tensor) -> Tensor:
    """Return the bits of the rounded values, int32. NaNs get no noise, so they are cut to their upper 16 bits."""
    # The mask is int32, because bool masks are slow on a CPU.
    is_number = torch.eq(flat, flat, out=torch.empty(flat.shape, dtype=torch.int32, device=flat.device))
    return noise.to(torch.int32).add_(2**15).mul_(is_number).add_(flat.view(torch.int32)).bitwise_right_shift_(16)


def _add_noise_to_default_nans(flat: Tensor, noise: Tensor) -> Tensor:
    """Return the same as `_add_noise_by_mask` in fewer passes over memory, except for the bits of NaNs.

    Every NaN becomes torch's default NaN first, which noise does not overflow.
    """
    bits = torch.nan_to_num(flat, nan=nan, posinf=inf, neginf=-inf).view(torch.int32)
    return bits.add_(noise).add_(2**15).bitwise_right_shift_(16)


# Stochastic rounding --------------------------------------------------------------------------------------------------

BUCKET_NUMEL = 2**22
BUCKET_NUMEL_ON_GPU = 2**24  # larger, because the host takes 1 to 2 ms per bucket


class StochasticRounding:
    """Optimizer steps in float32 for bfloat16 parameters, with stochastic rounding to bfloat16.

        rounding = StochasticRounding(optimizer)
        loss.backward()
        rounding.step(optimizer.step)
        rounding.zero_grad()

    Memory of AdamW between steps, in bytes per parameter element:

    ```text
                           weight   master   grad   two moments   sum
    masters                2        4        4      8             18
    split masters          2        2        4      8             16
    stochastic rounding    2        -        2      4             8
    ```

    A step makes float32 copies of one bucket at a time: at most ``bucket_numel`` elements, or a single larger parameter.
    With AdamW the copies of weight, gradient and moments take 16 bytes per element of the bucket.

    Training is less accurate than with master weights. Gradients accumulate in bfloat16, so sums over many micro-batches
    lose small gradients. Every step adds noise of up to a unit in the last place to the weights and moments that it
    changes. Prefer `MasterWeights` if they fit into memory.

    Replicas draw identical noise, because the seed depends on the step and the parameter's name, not on the rank. The
    shards of a parameter draw different noise if a registry is given, else identical noise. The noise of a shard depends
    on the topology, so the same training rounds differently on another topology. meshstep's C loops on a CPU and Triton
    kernels on a GPU draw equal noise. Without these kernels torch draws other noise, which may differ between GPU models.

    The optimizer steps once per bucket, on param groups that contain only the bucket. This is correct for optimizers
    whose states belong to single parameters or are counters in a param group: all of torch's optimizers except L-BFGS.
    Parameters of other dtypes than bfloat16 are stepped once, without rounding. CUDA graphs are not supported, because a
    replay would repeat the captured noise.

    Args:
        optimizer: Any torch optimizer except L-BFGS. Its floating-point states of bfloat16 parameters are stored in
            bfloat16, as torch's ``load_state_dict`` stores them. Numbers that all elements share (NAdam's
            ``"mu_product"``) keep their dtype. Add param groups with `StochasticRounding.add_param_group`. Its bfloat16
            parameters must not be DTensors; for DTensors, use ``ParallelOptimizer(..., precision=)``.
        registry: The process groups, on the mesh whose axes the parameters' specs name. On a mesh without model axes,
            parameters without a spec are replicated. Default None: parameters need no spec.
        seed: Integer of at most 64 bits, equal on all ranks. Default: 0.
        bucket_numel: Maximum number of elements per bucket of several parameters, >= 1. Default None: 2^22 if the first
            parameter is on a CPU, 2^24 if it is on a GPU.

    Attributes:
        steps: Number of completed calls of `step`, including skipped steps.
        copies: While `step` calls its argument ``update``, a dict from each bfloat16 parameter of the bucket to its
            float32 copy; otherwise empty.
        kernel: Rounds tensors with noise of its own, equal on replicas. None: torch's operators round all tensors.
    Raises:
        ValueError: ``bucket_numel`` is smaller than 1. Or, with a registry of more than one rank, a bfloat16 parameter
            has no name and is not tied. Or, with model axes larger than 1, a bfloat16 parameter has no spec.
    Collectives: none, and no host synchronization, except in the ``update`` that `step` calls.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        registry: ProcessGroupRegistry | None = None,
        *,
        seed: int = 0,
        bucket_numel: int | None = None,
    ) -> None:
        if bucket_numel is None:
            first = next((param for group in optimizer.param_groups for param in group["params"]), None)
            bucket_numel = BUCKET_NUMEL if first is None or first.is_cpu else BUCKET_NUMEL_ON_GPU
        if bucket_numel < 1:
            raise ValueError(f"bucket_numel={bucket_numel}: give a number of elements >= 1")
        self.optimizer, self.registry = optimizer, registry
        self.seed, self.bucket_numel = seed, bucket_numel
        self.steps = 0
        self.copies: Mapping[Tensor, Tensor] = {}
        self.kernel: RoundingKernel | None = None
        self._keys: dict[Tensor, str] = {}  # the `Noise.name` of each bfloat16 parameter
        self.refresh()
        load_shared_numbers_exactly(optimizer)

    def refresh(self) -> None:
        """Include bfloat16 parameters that were added to the optimizer without `StochasticRounding.add_param_group`.

        Raises:
            ValueError: As in the constructor, for a bfloat16 parameter without a name or without a spec.
        """
        keys: dict[Tensor, str] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if param.dtype == torch.bfloat16:
                    given = group["param_names"][position] if "param_names" in group else None
                    keys[param] = self._key(param, given, f"{index}.{position}")
        self._keys = keys

    def _key(self, param: Tensor, given: str | None, place: str) -> str:
        registry, annotation = self.registry, annotation_of(param)
        name = given or (annotation.name if annotation else None)
        if registry is None or registry.topology.world_size == 1:
            return name or place
        topology = registry.topology
        if annotation is not None or has_dtensors((param,)):
            spec = spec_of(param, topology)
        elif topology.size(*topology.model_axes) == 1:
            spec = P()  # without model axes, undeclared parameters are replicated
        else:
            raise missing_spec(param, name)
        if spec.tied:  # a tied parameter may have different names on its stages
            name = f"{spec} {tuple(param.shape)}"
        if name is None:
            raise _unnamed(param)
        shard = [registry.coordinate[axis] for axis in spec.distinct_axes(topology)]
        return f"{name} {shard}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer, and include its bfloat16 parameters.

        Args:
            param_group: As in ``torch.optim.Optimizer.add_param_group``.
        Raises:
            ValueError: As in the constructor, for a bfloat16 parameter without a name or without a spec. The optimizer is
                unchanged.
            ValueError, TypeError: As in ``torch.optim.Optimizer.add_param_group``.
        """
        self.optimizer.add_param_group(param_group)
        try:
            self.refresh()
        except ValueError:
            del self.optimizer.param_groups[-1]
            raise

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, update: Callable[[], object]) -> None:
        """Call ``update`` once per bucket. After each call, round the bucket's parameters and states to bfloat16.

        If ``update`` skips the step, parameters and states do not change, because float32 copies of bfloat16 values round
        to the same values. The attribute ``steps`` counts skipped steps too.

        Args:
            update: Steps the optimizer or skips the step; takes no arguments. During a call the param groups contain
                float32 copies of the bucket's parameters, with float32 gradients and states. In the first call, they also
                contain the parameters of other dtypes. ``update`` is called at least once.
        """
        # bfloat16 parameters without a gradient are in no bucket.
        stepped = (
            [param for param in group["params"] if param not in self._keys or param.grad is not None]
            for group in self.optimizer.param_groups
        )
        buckets = split_groups(stepped, self._keys.__contains__, self.bucket_numel)
        step_by_bucket(self.optimizer, buckets, lambda bucket: self._step_bucket(bucket, update))
        self.steps += 1

    def _step_bucket(self, bucket: Bucket, update: Callable[[], object]) -> None:
        halves = [param for params in bucket for param in params if param in self._keys]
        copies = self._make_float32_copies(halves)
        for group in self.optimizer.param_groups:
            group["params"] = [copies.get(param, param) for param in group["params"]]
        self.copies = copies
        try:
            update()
            for copy in copies.values():
                copy.grad = None
            self._round_back(copies)
        finally:
            self.copies = {}
            for copy in copies.values():
                self.optimizer.state.pop(copy, None)

    def _make_float32_copies(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return a float32 copy of each parameter, with a float32 gradient, and add the copies' states to the optimizer.

        The states of a copy are float32 copies of the parameter's states. Numbers that all elements share are not cast.
        """
        copies: dict[Tensor, Tensor] = {
            param: nn.Parameter(copy) for param, copy in float32_of({param: param for param in params}).items()
        }
        # The condition holds for all parameters of a bucket; it is for the type checker.
        gradients = float32_of({param: param.grad for param in params if param.grad is not None})
        for param, copy in copies.items():
            copy_annotation(param, copy)
            copy.grad = gradients[param]
        states = {(param, key): value for param in params for key, value in self.optimizer.state.get(param, {}).items()}
        cast = float32_of({(p, key): value for (p, key), value in states.items() if is_half_kept(key, value, p)})
        for (param, key), value in (states | cast).items():
            self.optimizer.state.setdefault(copies[param], {})[key] = value
        return copies

    def _round_back(self, copies: Mapping[Tensor, Tensor]) -> None:
        noise = {param: Noise(self.seed, self.steps, self._keys[param]) for param in copies}
        drawn = [Drawn(noise[param], self._move_states(param, copy)) for param, copy in copies.items()]
        round_all_(drawn, self.bucket_numel // 4, self.kernel)

    def _move_states(self, param: Tensor, copy: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the (bfloat16 target, float32 source) pairs to round after a step of ``copy``.

        The first pair is (``param``, ``copy``). Each other pair is a state of ``param`` that is stored in bfloat16, and the
        float32 state of ``copy``. States of ``copy`` that are not rounded are assigned to ``param``.
        """
        pairs, state = [(param, copy)], self.optimizer.state.get(copy, {})
        for key in sorted(state):  # replicas must draw noise in the same order, but their dicts may differ in order
            value = state[key]
            if is_half_kept(key, value, param):
                kept = self.optimizer.state[param].get(key)
                if kept is None or kept.dtype != torch.bfloat16 or kept.stride() != value.stride():
                    kept = torch.empty_like(value, dtype=torch.bfloat16)
                pairs.append((kept, value))
                value = kept
            self.optimizer.state[param][key] = value
        return pairs

    def collect(self) -> None:
        """Do nothing. The method exists so that this class can be used like `MasterWeights`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters in the optimizer.

        Args:
            set_to_none: If True, set the gradients to None; if False, fill them with zeros. Default: True.
        """
        self.optimizer.zero_grad(set_to_none)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"stochastic_rounding": {"seed": ..., "steps": ...}}``.

        A run that loads this state on the same topology continues with bitwise identical noise.
        """
        return {"stochastic_rounding": {"seed": self.seed, "steps": self.steps}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the seed and the number of steps from a saved state, so that the noise continues as in the saved run.

        Args:
            state: A dict with the entry that `state_dict` returns; other entries are ignored.
        Raises:
            ValueError: The state has no entry ``"stochastic_rounding"``, because another precision mode saved it; or the
                seed or the number of steps is not a valid integer. Nothing is changed.
        """
        saved = state.get("stochastic_rounding")
        if saved is None:
            raise ValueError(
                "the state has no entry 'stochastic_rounding', so another precision mode saved it; load it in that "
                "mode, or load only the model's weights and start with a new optimizer"
            )
        self.check_state(state)
        self.seed, self.steps = saved["seed"], saved["steps"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if ``state`` has an entry ``"stochastic_rounding"`` that `load_state_dict` would not accept."""
        if "stochastic_rounding" in state:
            fields({"seed": _check_seed, "steps": check_count})(state["stochastic_rounding"], "stochastic_rounding")


def _check_seed(value: object, field: str) -> None:
    if type(value) is not int or abs(value) >= 2**64:
        raise wrong(field, value, "an integer of at most 64 bits")


def check_named(params: Iterable[tuple[str | None, Tensor]]) -> None:
    """Raise ValueError if a bfloat16 parameter has no name and is not tied. The name determines the seed of its noise."""
    for name, param in params:
        annotation = annotation_of(param)
        tied = annotation is not None and bool(annotation.spec.tied)
        if param.dtype == torch.bfloat16 and name is None and not tied:
            raise _unnamed(param)


def _unnamed(param: Tensor) -> ValueError:
    return ValueError(
        f"a bfloat16 parameter of shape {tuple(param.shape)} has no name, but the seed of its rounding noise is "
        "computed from its name; give the optimizer model.named_parameters(), or call declare(model, {'*': P()})"
    )
