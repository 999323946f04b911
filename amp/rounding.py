"""Float32 rounded to bfloat16 at random, one tensor or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .copies import copy_each_

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
