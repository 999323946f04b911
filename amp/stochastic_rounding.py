"""Step bfloat16 parameters without masters: in float32 for the moment of the step, then rounded stochastically.

To round to nearest loses every update below half a unit in the last place, and training stalls. To round up with a
probability equal to the remainder is right on average: such updates happen, only now and then.

Reference: Gupta et al. 2015, "Deep learning with limited numerical precision", arXiv:1502.02551.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..parallel.interop.local_parameters import spec_of
from ..parallel.layout.annotation import annotation_of, copy_annotation
from ..parallel.mesh.registry import ProcessGroupRegistry
from ..parallel.mesh.value_checks import check_count, fields, wrong
from .by_bucket import Bucket, step_by_bucket
from .casting import copy_each_, float32_of
from .master_weights import is_half_kept, load_shared_numbers_exactly

# Float32 rounded to bfloat16 at random, one tensor or many at once ----------------------------------------------------

CACHED = 2**16  # elements that a CPU rounds at a time: what it works on stays in its cache


@torch.no_grad()
def stochastic_round_(target: Tensor, source: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Write ``source`` into ``target``, each value rounded up or down at random so that the mean is the value.

    Values that bfloat16 holds exactly, infinities and NaN among them, stay what they are. Above bfloat16's largest
    finite value the upper neighbour is infinity.

    Args:
        target: bfloat16, of any shape; written in place.
        source: float32, of the same shape and device.
        generator: Of that device; torch's default one if None. It gives 16 bits an element.
    Returns:
        ``target``.
    Raises:
        ValueError: Dtypes or shapes are others.
    Collectives: none. Host reads: none. Temporary memory: 10 bytes an element.
    """
    if (target.dtype, source.dtype) != (torch.bfloat16, torch.float32) or target.shape != source.shape:
        raise ValueError(
            f"rounding {tuple(source.shape)} {source.dtype} into {tuple(target.shape)} {target.dtype}; give a float32 "
            "source and a bfloat16 target of one shape"
        )
    noise = _draws([source], 1, iter([generator]))[0]
    _round_each_([target], [source], noise)
    return target


def seed_of(seed: int, steps: int, key: str) -> int:
    """What seeds a parameter's generator in a step: the same wherever these are."""
    digest = blake2b(f"{seed} {steps} {key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Drawn(NamedTuple):
    """Tensors that draw from one generator, one after another.

    Args:
        generator: Seeds it; called when its turn has come.
        pairs: (bfloat16 target, source) each, of one device.
    """

    generator: Callable[[], torch.Generator]
    pairs: Sequence[tuple[Tensor, Tensor]]


@torch.no_grad()
def round_all_(everything: Iterable[Drawn], numel_at_once: int) -> None:
    """`stochastic_round_` for all pairs: the same bits, and on a GPU one draw for each generator and a few kernels for all.

    Args:
        numel_at_once: Elements that are rounded together, at most, or one tensor. Temporary memory: 12 bytes of each, and 2
            more for every pair of a generator.
    """
    together: dict[tuple[torch.device, int], list[Drawn]] = {}
    for drawn in everything:
        if len({source.shape for _, source in drawn.pairs}) == 1:
            together.setdefault((drawn.pairs[0][0].device, len(drawn.pairs)), []).append(drawn)
            continue
        generator = drawn.generator()
        for target, source in drawn.pairs:
            stochastic_round_(target, source.float(), generator)
    for (device, rounds), alike in together.items():
        for run in _runs(alike, min(numel_at_once, CACHED) if device.type == "cpu" else numel_at_once):
            noise = _draws([drawn.pairs[0][1] for drawn in run], rounds, (drawn.generator() for drawn in run))
            for index, of_round in enumerate(noise):
                targets, sources = zip(*(drawn.pairs[index] for drawn in run), strict=True)
                _round_each_(targets, [source.float() for source in sources], of_round)


def _runs(everything: Sequence[Drawn], numel_at_once: int) -> Iterator[list[Drawn]]:
    run: list[Drawn] = []
    numel = 0
    for drawn in everything:
        more = drawn.pairs[0][0].numel()
        if run and numel + more > numel_at_once:
            yield run
            run, numel = [], 0
        run.append(drawn)
        numel += more
    if run:
        yield run


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Where each lies in a flat buffer, and how long that is: at multiples of 64 elements, as kernels like it."""
    return list(accumulate((-(-tensor.numel() // 64) * 64 for tensor in tensors), initial=0))


def _draws(tensors: Sequence[Tensor], rounds: int, generators: Iterator[torch.Generator | None]) -> Tensor:
    """[rounds, elements of the flat buffer] int16, uniform in [-2^15, 2^15): noise for so many lists of such tensors.

    Each tensor's generator, asked for when its turn has come, gives the noise of all rounds, one after another.
    """
    starts = _starts(tensors)
    drawn = torch.empty(rounds, starts[-1] // 4, dtype=torch.int64, device=tensors[0].device)
    for start, tensor in zip(starts, tensors, strict=False):
        of_tensor = drawn[:, start // 4 : start // 4 + -(-tensor.numel() // 4)]
        # Four elements a draw: on a CPU it is what all of this costs.
        of_tensor.random_(-(2**63), None, generator=next(generators))
    return drawn.view(torch.int16)


def _round_each_(targets: Sequence[Tensor], sources: Sequence[Tensor], noise: Tensor) -> None:
    """Round float32 sources into bfloat16 targets, a few kernels for all.

    Args:
        noise: [elements of the flat buffer] int16.
    """
    spans = [(start, source.numel(), source.shape) for start, source in zip(_starts(sources), sources, strict=False)]
    if len(sources) == 1:
        flat, noise = sources[0].reshape(-1), noise[: sources[0].numel()]
    else:
        flat = torch.empty(noise.numel(), dtype=torch.float32, device=noise.device)
        copy_each_([flat[start : start + numel].view(shape) for start, numel, shape in spans], sources)
    # A bfloat16 is the upper half of a float32. The lower half is the remainder in units of 2^-16: adding a uniform
    # number below 1 carries into the upper half with just that probability, for either sign.
    # A carry would run out of a NaN's bits. (An int32 mask: masks of bools are three times as slow on a CPU.)
    is_number = torch.eq(flat, flat, out=torch.empty(flat.shape, dtype=torch.int32, device=flat.device))
    bits = noise.to(torch.int32).add_(2**15).mul_(is_number).add_(flat.view(torch.int32)).bitwise_right_shift_(16)
    copy_each_(
        [target.view(torch.int16) for target in targets],
        [bits[start : start + numel].view(shape) for start, numel, shape in spans],
    )


# Stochastic rounding --------------------------------------------------------------------------------------------------

BUCKET_NUMEL = 2**22


class StochasticRounding:
    """Steps the bfloat16 parameters of an optimizer in float32 and rounds them, and its state, stochastically back.

        rounding = StochasticRounding(optimizer)
        loss.backward()
        rounding.step(optimizer.step)
        rounding.zero_grad()

    The memory of AdamW, in bytes for each parameter element, between steps:

                               weight   master   grad   two moments   sum
        masters                2        4        4      8             18
        split masters          2        2        4      8             16
        stochastic rounding    2        -        2      4             8

    During a step there are float32 copies of ``bucket_numel`` elements (or of one parameter that is larger), 16 bytes
    each. What it costs: gradients add up in bfloat16, so a long accumulation window stalls; weights and moments get
    noise of up to a unit in the last place at every step that changes them. `MasterWeights` are the better choice
    wherever they fit.

    Replicas draw the same bits: the generator is seeded by the step and the parameter's name, never by the rank. With a
    registry, pieces of a sharded parameter draw different ones; without, the same. So which bits a piece gets depends
    on the topology, and the same training on another one rounds differently. GPUs of different models may draw
    differently.

    The optimizer is stepped once for each bucket, on param groups that hold only the bucket: right for every optimizer
    whose state belongs to single parameters, as all of torch's but L-BFGS, or counts in a param group. Parameters of other
    dtypes are stepped as they are, once. Not for a CUDA graph: a replay would repeat the captured step's bits.

    Args:
        optimizer: Its floating-point state for bfloat16 parameters is kept in bfloat16, which is also what torch's
            ``load_state_dict`` makes of it; numbers that all elements share (NAdam's ``"mu_product"``) stay as they are.
            Add param groups through `add_param_group` here.
        registry: The groups of the mesh that the parameters' specs name.
        seed: The same on all ranks.
        bucket_numel: Elements of a bucket, >= 1.
    Raises:
        ValueError: bucket_numel is smaller; or, on more than one rank, a bfloat16 parameter has no spec or no name.
    Collectives: none, in any method. Host reads: none but those of the optimizer's step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        registry: ProcessGroupRegistry | None = None,
        *,
        seed: int = 0,
        bucket_numel: int = BUCKET_NUMEL,
    ) -> None:
        if bucket_numel < 1:
            raise ValueError(f"bucket_numel={bucket_numel}: give a number of elements >= 1")
        self.optimizer, self.registry = optimizer, registry
        self.seed, self.bucket_numel = seed, bucket_numel
        self.steps = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._keys = self._make_keys()
        load_shared_numbers_exactly(optimizer)

    def _make_keys(self) -> dict[Tensor, str]:
        """For each bfloat16 parameter what its generator is seeded by, besides the seed and the step."""
        keys: dict[Tensor, str] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if param.dtype == torch.bfloat16:
                    given = group["param_names"][position] if "param_names" in group else None
                    keys[param] = self._key(param, given, f"{index}.{position}")
        return keys

    def refresh(self) -> None:
        """See the parameters that somebody else has added to the optimizer. Raises: as the constructor."""
        self._keys = self._make_keys()

    def _key(self, param: Tensor, given: str | None, place: str) -> str:
        registry, annotation = self.registry, annotation_of(param)
        name = given or (annotation.name if annotation else None)
        if registry is None or registry.topology.world_size == 1:
            return name or place
        topology = registry.topology
        spec = spec_of(param, topology)
        if spec.tied:  # the copies may have different names
            name = f"{spec} {tuple(param.shape)}"
        if name is None:
            raise _unnamed(param)
        piece = [registry.coordinate[axis] for axis in spec.distinct_axes(topology)]
        return f"{name} {piece}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the optimizer. Raises: as the constructor; nothing is changed then."""
        self.optimizer.add_param_group(param_group)
        try:
            self.refresh()
        except ValueError:
            del self.optimizer.param_groups[-1]
            raise

    # The step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, update: Callable[[], object]) -> None:
        """Call ``update``, which steps the optimizer or skips, once for each bucket.

        Where it skips nothing changes: float32 copies of bfloat16 values round to themselves.

        Args:
            update: Sees param groups that hold the bucket's float32 copies, with float32 gradients and state. It is
                called at least once, the first time also with the parameters of other dtypes.
        """
        buckets = self._buckets([group["params"] for group in self.optimizer.param_groups])
        step_by_bucket(self.optimizer, buckets, lambda bucket: self._step_bucket(bucket, update))
        self.steps += 1

    def _buckets(self, whole: list[list[Tensor]]) -> list[list[list[Tensor]]]:
        """The parameters of each group by bucket; bfloat16 ones without gradient are in none."""
        buckets = [[[param for param in params if param not in self._keys] for params in whole]]
        numel = 0
        for index, params in enumerate(whole):
            for param in params:
                if param in self._keys and param.grad is not None:
                    if numel and numel + param.numel() > self.bucket_numel:
                        buckets.append([[] for _ in whole])
                        numel = 0
                    buckets[-1][index].append(param)
                    numel += param.numel()
        return buckets

    def _step_bucket(self, bucket: Bucket, update: Callable[[], object]) -> None:
        halves = [param for params in bucket for param in params if param in self._keys]
        copies = dict(zip(halves, self._copies(halves), strict=True))
        for group, params in zip(self.optimizer.param_groups, bucket, strict=True):
            group["params"] = [copies.get(param, param) for param in params]
        try:
            update()
            for copy in copies.values():
                copy.grad = None
            self._round_back(copies)
        finally:
            for copy in copies.values():
                self.optimizer.state.pop(copy, None)

    def _copies(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Float32 parameters with float32 gradients and state."""
        copies: list[Tensor] = [nn.Parameter(copy) for copy in float32_of(params)]
        gradients = float32_of([param.grad for param in params if param.grad is not None])  # all in a bucket have one
        for param, copy, gradient in zip(params, copies, gradients, strict=True):
            copy_annotation(param, copy)
            copy.grad = gradient
        states = [
            (param, copy, key, value)
            for param, copy in zip(params, copies, strict=True)
            for key, value in self.optimizer.state.get(param, {}).items()
        ]
        halves = iter(float32_of([value for param, _, key, value in states if is_half_kept(key, value, param)]))
        for param, copy, key, value in states:
            lent = next(halves) if is_half_kept(key, value, param) else value
            self.optimizer.state.setdefault(copy, {})[key] = lent
        return copies

    def _round_back(self, copies: Mapping[Tensor, Tensor]) -> None:
        everything = [Drawn(partial(self._seeded_generator, p), self._pairs(p, copy)) for p, copy in copies.items()]
        round_all_(everything, self.bucket_numel // 4)

    def _pairs(self, param: Tensor, copy: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What is to be rounded: the parameter and its states, which ``param`` gets from its copy here."""
        pairs, state = [(param, copy)], self.optimizer.state.get(copy, {})
        for key in sorted(state):  # replicas may have made theirs in different orders
            value = state[key]
            if is_half_kept(key, value, param):
                kept = self.optimizer.state[param].get(key)
                if kept is None or kept.dtype != torch.bfloat16 or kept.stride() != value.stride():
                    kept = torch.empty_like(value, dtype=torch.bfloat16)
                pairs.append((kept, value))
                value = kept
            self.optimizer.state[param][key] = value
        return pairs

    def _seeded_generator(self, param: Tensor) -> torch.Generator:
        if param.device not in self._generators:
            self._generators[param.device] = torch.Generator(param.device)
        return self._generators[param.device].manual_seed(seed_of(self.seed, self.steps, self._keys[param]))

    def collect(self) -> None:
        """Nothing to do, unlike for `MasterWeights`: the optimizer holds the parameters whose gradients there are."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    # Saving ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``{"stochastic_rounding": {"seed": ..., "steps": ...}}``: with it training continues bit for bit."""
        return {"stochastic_rounding": {"seed": self.seed, "steps": self.steps}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on drawing where `state_dict` was called.

        Raises:
            ValueError: The state was saved in another mode; nothing is changed.
        """
        saved = state.get("stochastic_rounding")
        if saved is None:
            raise ValueError(
                "the state is not of stochastic rounding but of another mode; load it there, or load only the model's "
                "weights and the optimizer's own state"
            )
        self.check_state(state)
        self.seed, self.steps = saved["seed"], saved["steps"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where the state of stochastic rounding in ``state`` is none."""
        if "stochastic_rounding" in state:
            fields({"seed": _check_seed, "steps": check_count})(state["stochastic_rounding"], "stochastic_rounding")


def _check_seed(value: object, field: str) -> None:
    if type(value) is not int or abs(value) >= 2**64:
        raise wrong(field, value, "an integer of at most 64 bits")


def check_named(params: Iterable[tuple[str | None, Tensor]]) -> None:
    """Raise ValueError for a bfloat16 parameter, of (name, parameter) pairs, that several ranks can't know as one."""
    for name, param in params:
        annotation = annotation_of(param)
        tied = annotation is not None and bool(annotation.spec.tied)
        if param.dtype == torch.bfloat16 and name is None and not tied:
            raise _unnamed(param)


def _unnamed(param: Tensor) -> ValueError:
    return ValueError(
        f"a bfloat16 parameter of shape {tuple(param.shape)} has no name, by which its replicas could round "
        "alike: call declare(model), or give the optimizer model.named_parameters()"
    )
