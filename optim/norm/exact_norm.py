"""Global gradient norms that are bitwise equal for any number of data ranks, because the sums of |g|^p are exact.

A sum of float64 numbers depends on the order of the additions, because each addition rounds. If all summands are multiples
of one quantum and the sum has at most 53 bits, then no addition rounds, and every order gives the same sum. So:

1. Each rank computes one power, the sum of |g|^p, per chunk of `CHUNK` elements. If data ranks shard a parameter, their
   shards begin at multiples of `CHUNK` elements. So each chunk is on one rank, and its power is the same for any number
   of data ranks.
2. The ranks agree on ``top``, the largest chunk power. Let e be the integer with 2**(e-1) <= top < 2**e.
3. Each chunk power is split into three summands, multiples of 2**(e-18), 2**(e-36) and 2**(e-54). The first, second and
   third summands of all chunks have separate sums, which do not round for up to 2**34 chunks. Only the remainder of each
   chunk power, less than 2**(e-54), is lost.
4. If several ranks hold a replica of a shard, each block of the shard is summed by only one of them, because a division
   by the number of replicas could round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ...parallel.mesh.registry import ProcessGroupRegistry
from ..kernels.choice import chosen
from ..kernels.native import MEAN_OF
from .global_norm import GlobalNorm
from .measure import Norms
from .plan import ReductionPlan
from .powers import means_by_loops, mixed_powers

CHUNK = MEAN_OF
"""Number of elements per chunk, a power of 2. Equal to the alignment of shards, ``gradients.buckets.ALIGNMENT``."""

LEVELS, BITS = 3, 18
"""Number of summands per chunk power, and the number of bits of each summand."""

BLOCK = 2**17
"""Number of elements per block. Replicas of a shard divide the blocks of a large gradient among themselves."""


def chunk_powers(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the mean of |g|^p per chunk of the gradients, [chunks] float64, for p = 1 or 2.

    The additions have a fixed order. The division by `CHUNK`, a power of 2, does not round. `ExactNorm` multiplies the
    sums of these means by `CHUNK`.

    ``gradients`` are contiguous 1-dim tensors of one dtype and device. The last chunk of each is filled up with zeros.
    """
    if chosen.native is not None and gradients[0].is_cpu:
        found = means_by_loops(chosen.native, gradients, norm_type)
        if found is not None:
            return found
    padding = gradients[0].new_zeros(CHUNK)
    parts = [part for flat in gradients for part in (flat, padding[: -len(flat) % CHUNK])]
    values = torch.cat(parts).double() if len(gradients) > 1 or len(parts[-1]) else gradients[0].double()
    values = values.abs() if norm_type == 1 else values.square()
    return avg_pool1d(values.view(1, 1, -1), CHUNK).view(-1)  # not `Tensor.sum`: its order may vary


def exact_summands(powers: Tensor, top: Tensor) -> Tensor:
    """Return the three summands of each chunk power, [3, chunks]. The sum of a row is exact in every order of additions.

    ``powers`` are >= 0 and finite, [chunks] float64. ``top`` is the largest chunk power of all ranks, 0-dim.
    """
    exponent = torch.frexp(top).exponent
    found, rest = powers.new_empty(LEVELS, len(powers)), powers
    for level, summands in enumerate(found.unbind(), start=1):
        # Adding and subtracting 1.5 * 2**52 quanta rounds to a multiple of the quantum 2**(e - 18 * level).
        shift = torch.ldexp(top.new_full((), 1.5), exponent + (52 - BITS * level))
        torch.add(rest, shift, out=summands).sub_(shift)
        if level < LEVELS:
            rest = rest - summands
    return found


class ExactNorm(GlobalNorm):
    """A `GlobalNorm` whose result does not depend on the number of data ranks, or on how they shard optimizer states.

    For p = inf it computes the same as `GlobalNorm`, because a maximum never rounds. For p = 1 and 2 a non-finite
    gradient gives NaN for all norms. ``Norms.extra`` does not depend on the number of ranks if its summands are whole
    numbers.

    Collectives: two all-reduces over all ranks: a maximum and a sum. For p = inf one all-gather. None on a single rank.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        registry: ProcessGroupRegistry,
        norm_type: float = 2.0,
        per_parameter: bool = False,
    ) -> None:
        super().__init__(plan, registry, norm_type, "packed", per_parameter)
        check_exact(norm_type)

    def __call__(
        self,
        gradients: Sequence[Tensor | None],
        extra: Tensor | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Norms:
        """Return the norms of the gradients. Arguments as in `GlobalNorm.__call__`; ``weights`` is ignored."""
        if self._by_norms:
            return super().__call__(gradients, extra, weights)
        present = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        device = present[0][1].device if present else self._collective_device if extra is None else extra.device
        # All gradients are checked, including replicas that another rank measures, because a NaN in any replica must make
        # the norm NaN.
        found = mixed_powers([gradient for _, gradient in present], self.norm_type, device, self._constants)
        is_finite = found.isfinite().all()
        top = torch.where(is_finite.to(device), 0.0, inf).double()
        batches = [(members, chunk_powers(parts, self.norm_type)) for members, parts in self._batches(present)]
        for _, powers in batches:
            top = torch.maximum(top, powers.amax().to(device))
        top = self._largest(top.nan_to_num(nan=inf, posinf=inf))
        finite = top.isfinite()
        scale = torch.where(finite, top, 1.0)
        sums = torch.zeros(self._length, LEVELS, dtype=torch.float64, device=device)
        for members, powers in batches:
            self._add(sums, members, exact_summands(powers, scale.to(powers.device)).T.to(device))
        sums *= CHUNK
        extra = sums.new_zeros(0) if extra is None else extra.to(sums)
        vector = torch.cat([torch.where(finite, sums, 0.0).view(-1), extra])
        if self._world is not None:
            vector = self._all_reduce(vector, self._world)
        levels, extra = vector[: sums.numel()].view(-1, LEVELS), vector[sums.numel() :]
        of_total = levels[: self.plan.num_groups].sum(0, keepdim=True)
        norms = self._norms(torch.cat([levels, of_total]), finite)
        groups, parameters, units, weight_norms = norms[:-1].split(self._sizes)
        total = groups[0] if self.plan.num_groups == 1 else norms[-1]
        return Norms(total, groups, parameters, extra, units, weight_norms, norms[:0], self.norm_type)

    def _batches(self, present: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[list[tuple[int, int]], list[Tensor]]]:
        """Yield the blocks that this rank measures, in batches. All blocks of a batch have one dtype and device.

        A block has at most `BLOCK` elements, a batch less than 2 * `BLOCK` elements. A batch is a pair of lists: (index
        of the plan entry, number of chunks) per block, and the blocks as 1-dim tensors.
        """
        open_batches: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[int, int]], list[Tensor], int]] = {}
        for i, gradient in present:
            number, count = self.plan.replica_places[i]
            for block, flat in enumerate(gradient.reshape(-1).contiguous().split(BLOCK)):
                if not len(flat) or block % count != number:
                    continue
                members, parts, size = open_batches.pop((flat.dtype, flat.device), ([], [], 0))
                members.append((i, -(-len(flat) // CHUNK)))
                parts.append(flat)
                if size + len(flat) < BLOCK:
                    open_batches[flat.dtype, flat.device] = members, parts, size + len(flat)
                else:
                    yield members, parts
        yield from ((members, parts) for members, parts, _ in open_batches.values())

    def _add(self, sums: Tensor, members: Sequence[tuple[int, int]], summands: Tensor) -> None:
        """Add the summands of one batch, [chunks, 3], to the rows of their param groups and logical parameters."""
        entries = self.plan.entries
        targets = [[(entries[i].group, count) for i, count in members]]
        if self.per_parameter:
            first, slot_of = self.plan.num_groups, self.plan.parameter_slots
            targets.append([(first + slot_of[i], count) for i, count in members])
        for chunks in targets:
            if len({slot for slot, _ in chunks}) == 1:
                sums[chunks[0][0]] += summands.sum(0)
                continue
            places = self._constants(("chunks", *chunks), partial(_repeated, chunks), torch.int64, sums.device)
            sums.index_add_(0, places, summands)  # exact, so the order in which a GPU adds does not matter

    def _norms(self, levels: Tensor, finite: Tensor) -> Tensor:
        powers = (levels[:, 0] + levels[:, 1]) + levels[:, 2]
        return torch.where(finite, powers if self.norm_type == 1 else powers.sqrt(), torch.nan)

    def _largest(self, value: Tensor) -> Tensor:
        if self._world is None:
            return value
        wire = value.to(self._collective_device).view(1)
        dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=self._world)
        return wire.to(value.device)[0]


def _repeated(counts: Sequence[tuple[int, int]]) -> list[int]:
    return [value for value, count in counts for _ in range(count)]


def check_exact(norm_type: float) -> None:
    if norm_type not in (1, 2, inf):
        raise ValueError(
            f"norm_type={norm_type} with sum_order='fixed': give 1, 2 or inf; other powers can't be summed exactly"
        )
