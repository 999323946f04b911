"""Time a step that does not wait for the global norm.

It updates with clip coefficient 1 during the all-reduce. If the decision is to clip, it repeats the update from saved
inputs; if it is to skip, it restores them.

    python tests/benchmarks/post_validated.py [--numel 4 30] [--seconds 20]      # times
    python tests/benchmarks/post_validated.py --check                            # bitwise comparison with synchronous steps

AdamW runs in the compiled loops of the library (`meshstep.optim.kernels`): float32 masters and moments, bfloat16 weights,
float32 gradients. There are two gloo ranks with one thread each. Rank 0 steps `--numel` million elements and rank 1 a few,
so that rank 0 has a core for itself. The all-reduce is delayed by 0, 5 or 50 ms. Rounds of all forms and delays are
interleaved. A time is the wall time of rank 0 from complete gradients until a forward may begin, including the local norm:
the first quartile of the rounds, because other load slows down the rest. The last column is the CPU time of a step at 5 ms.
All forms issue the same collectives.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
import torch.distributed as dist
from meshstep.optim.kernels.native import Kind, Native, PointerColumns, built
from meshstep.optim.norm.powers import powers_by_loops
from meshstep.optim.step.c_engine import update_by_loops
from torch import Tensor
from world import World, printed_by

PIECE = 1 << 16  # elements between two checks of the all-reduce
BETAS, RATE, EPS, DECAY = (0.9, 0.999), 1e-4, 1e-8, 0.01
HYPER = [RATE, *BETAS, EPS, DECAY, 1.0, 0.0]
NO_INF = torch.zeros(())
DELAYS = (0.0, 5e-3, 50e-3)
OTHER = 5e-3  # seconds of user code between a step and the next forward
MIB = 2**20


class Verdict(NamedTuple):
    """The step decision."""

    factor: float
    skips: bool

    @property
    def as_guessed(self) -> bool:
        return self.factor == 1.0 and not self.skips


class Coming:
    """The all-reduced sum of powers, which is available at least ``delay`` seconds after the launch of the all-reduce."""

    def __init__(self, power: Tensor, max_norm: float, delay: float) -> None:
        self._vector, self._max_norm, self._until = power, max_norm, time.perf_counter() + delay
        self._work = dist.all_reduce(self._vector, async_op=True)

    def has_come(self) -> bool:
        return time.perf_counter() >= self._until and bool(self._work.is_completed())

    def verdict(self) -> Verdict:
        """Wait for the sum without CPU work, and return the decision."""
        if (left := self._until - time.perf_counter()) > 0:
            time.sleep(left)
        self._work.wait()
        norm = float(self._vector) ** 0.5
        return Verdict(min(self._max_norm / norm, 1.0), False) if isfinite(norm) else Verdict(1.0, True)


class State:
    """Everything of one model that a step reads and writes."""

    def __init__(self, loops: Native, numel: int, seed: int, piece: int = PIECE) -> None:
        random = torch.Generator().manual_seed(seed)
        self.loops, self.numel, self.piece, self.steps = loops, numel, piece, 0
        self.master = torch.randn(numel, generator=random).mul_(0.02)
        self.mean, self.square, self.grad = (torch.zeros(numel) for _ in range(3))
        self.half = self.master.bfloat16()
        self._count = torch.zeros(())  # the loops increment it per piece

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors to restore after an update. Half-precision weights are the rounded masters."""
        return self.master, self.mean, self.square

    def pieces(self) -> Iterator[tuple[int, int]]:
        return ((at, min(at + self.piece, self.numel)) for at in range(0, self.numel, self.piece))

    def power(self) -> Tensor:
        found = powers_by_loops(self.loops, [self.grad], 2.0)
        assert found is not None
        return found

    def update(
        self, begin: int, end: int, factor: float, at: tuple[Tensor, ...] | None = None, halves: bool = True
    ) -> None:
        """Step the elements from ``begin`` to ``end``; with ``at``, in copies of their masters and moments."""
        offset, numel = begin * 4, end - begin
        if numel <= 0:
            return
        self._count.fill_(self.steps)
        where = [t.data_ptr() + offset for t in self.kept] if at is None else [t.data_ptr() for t in at]
        half = array("Q", [self.half.data_ptr() + begin * 2]) if halves else None
        fixed, grads = array("Q", [*where, 0, self._count.data_ptr()]), array("Q", [self.grad.data_ptr() + offset])
        columns = PointerColumns(fixed, grads, array("q", [numel]), half)
        update_by_loops(self.loops, Kind.ADAM, columns, HYPER, factor, NO_INF, torch.float32)

    def apply(self, begin: int, end: int, verdict: Verdict) -> None:
        """Step these elements by the decision; a skip restores half-precision weights from the masters."""
        if verdict.skips:
            self.half[begin:end].copy_(self.master[begin:end])
        else:
            self.update(begin, end, verdict.factor)

    def bits(self) -> list[Tensor]:
        return [tensor.view(torch.int32) for tensor in self.kept] + [self.half.view(torch.int16)]


class Log:
    """Saved masters and moments of the first elements, up to ``nbytes``."""

    def __init__(self, nbytes: int) -> None:
        self.room = nbytes // 12
        self._rows = torch.zeros(3, self.room + 80)  # rows begin at different offsets within a memory page

    def keep(self, state: State, begin: int, end: int) -> None:
        for row, tensor in zip(self._rows, state.kept, strict=True):
            ctypes.memmove(row.data_ptr() + 4 * begin, tensor.data_ptr() + 4 * begin, 4 * (end - begin))

    def restore(self, state: State, begin: int, end: int) -> None:
        for row, tensor in zip(self._rows, state.kept, strict=True):
            ctypes.memmove(tensor.data_ptr() + 4 * begin, row.data_ptr() + 4 * begin, 4 * (end - begin))


# The forms: each makes one step, and returns the work that is left after the forward has begun --------------------------

Form = Callable[[State, Coming], Callable[[], object] | None]


def synchronous(state: State, coming: Coming) -> None:
    """Wait, then step."""
    verdict = coming.verdict()
    if not verdict.skips:
        state.update(0, state.numel, verdict.factor)
        state.steps += 1


def by_log(log: Log, restores: bool = True) -> Form:
    """Save and step piece after piece until the log is full or the decision is available."""

    def step(state: State, coming: Coming) -> None:
        done = 0
        for begin, end in state.pieces():
            if end > log.room or coming.has_come():
                break
            log.keep(state, begin, end)
            state.update(begin, end, 1.0)
            done = end
        verdict = coming.verdict()
        for begin, end in state.pieces() if restores and not verdict.as_guessed else ():
            if end <= done:  # in pieces, which are in the cache when they are stepped again
                log.restore(state, begin, end)
                state.apply(begin, end, verdict)
        state.apply(done, state.numel, verdict)
        state.steps += not verdict.skips

    return step


def in_two_phases(waits: bool) -> Form:
    """First write only half-precision weights, from copies of pieces in the cache; then update all by the decision.

    Without waiting, a forward begins with provisional weights. It must be repeated, with its random numbers and buffers,
    if the decision is to clip or to skip. The gradients must be kept until then.
    """
    copies = tuple(torch.zeros(PIECE) for _ in range(3))

    def step(state: State, coming: Coming) -> Callable[[], object] | None:
        done = 0
        for begin, end in state.pieces():
            if waits and coming.has_come():
                break
            for copy, tensor in zip(copies, state.kept, strict=True):
                ctypes.memmove(copy.data_ptr(), tensor.data_ptr() + 4 * begin, 4 * (end - begin))
            state.update(begin, end, 1.0, at=copies)
            done = end

        def commit() -> None:
            verdict = coming.verdict()
            if verdict.as_guessed:
                state.update(0, done, 1.0, halves=False)
            else:
                state.apply(0, done, verdict)
            state.apply(done, state.numel, verdict)
            state.steps += not verdict.skips

        if not waits:
            return commit
        commit()
        return None

    return step


def with_other_things(first_use: bool) -> Form:
    """Step, then 5 ms of user code before the forward; ``first_use``: wait and step only at the forward."""

    def step(state: State, coming: Coming) -> None:
        if first_use:
            time.sleep(OTHER)
            synchronous(state, coming)
        else:
            synchronous(state, coming)
            time.sleep(OTHER)

    return step


def forms_of(numel: int, room: int) -> dict[str, Form]:
    return {
        "synchronous": synchronous,
        f"log of at most {room / MIB:.2g} MiB": by_log(Log(min(room, 12 * numel))),
        "log of everything: a copy of the state": by_log(Log(12 * numel)),
        "two phases": in_two_phases(waits=True),
        "two phases, the forward not waiting": in_two_phases(waits=False),
        "synchronous, then 5 ms of other things": with_other_things(first_use=False),
        "the same, stepping at the first use": with_other_things(first_use=True),
    }


# Measuring times -------------------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Seconds until a forward may begin, and CPU seconds in total."""

    ready: float
    processor: float


def time_rounds(
    forms: dict[str, Form], state: State, seconds: float, max_norm: float
) -> dict[tuple[str, float], list[Spent]]:
    cases = [(name, delay) for name in forms for delay in DELAYS]
    spent: dict[tuple[str, float], list[Spent]] = {case: [] for case in cases}
    end, rounds = time.perf_counter() + seconds, 0
    while True:
        go_on = torch.tensor(float(rounds < 3 or time.perf_counter() < end))
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        if not go_on:
            return spent
        first = rounds % len(cases)
        for name, delay in cases[first:] + cases[:first]:
            dist.barrier()
            start, processor = time.perf_counter(), time.process_time()
            left = forms[name](state, Coming(state.power(), max_norm, delay))
            ready = time.perf_counter() - start
            if left is not None:
                left()
            if rounds:
                spent[name, delay].append(Spent(ready, time.process_time() - processor))
        rounds += 1


def quick(values: Iterable[float]) -> float:
    return quantiles(values, n=4)[0]


def report(title: str, forms: dict[str, Form], spent: dict[tuple[str, float], list[Spent]]) -> None:
    rounds = len(next(iter(spent.values())))
    print(f"\n{title} ({rounds} rounds)\n  {'all-reduce later by':42s}", end="")
    print("".join(f"{delay * 1e3:7.0f} ms" for delay in DELAYS) + f"{'processor':>12s}")
    for name in forms:
        ready = [quick(found.ready for found in spent[name, delay]) * 1e3 for delay in DELAYS]
        processor = quick(found.processor for found in spent[name, DELAYS[1]]) * 1e3
        print(f"  {name:42s}" + "".join(f"{value:7.1f} ms" for value in ready) + f"{processor:9.1f} ms", flush=True)


def show_times(rank: int, loops: Native, arguments: argparse.Namespace, millions: float) -> None:
    state = State(loops, int(millions * 1e6) if rank == 0 else 1000, rank)
    state.grad.normal_(generator=torch.Generator().manual_seed(rank))
    forms = forms_of(state.numel, arguments.log * MIB)
    for what, max_norm in (("nothing clips", 1e9), ("all clip", 1.0)):
        spent = time_rounds(forms, state, arguments.seconds, max_norm)
        if rank == 0:
            report(f"{millions:g}M elements, {what}", forms, spent)


# Comparing results bitwise ---------------------------------------------------------------------------------------------


def show_bits(rank: int, loops: Native, arguments: argparse.Namespace) -> None:
    """Compare steps of each form without user code with synchronous steps. Some steps clip, and a non-finite
    gradient of one rank causes a skip in some."""
    piece = 4096
    numel = 3 * piece + 17 + rank
    forms = {**forms_of(numel, 24 * piece), "without the log: must differ": by_log(Log(12 * numel), restores=False)}
    names = [name for name in forms if "other things" not in name and "first use" not in name]
    states = {name: State(loops, numel, rank, piece) for name in names}
    differ, clipped, skipped = dict.fromkeys(names, 0), 0, 0
    random = torch.Generator().manual_seed(rank)
    for step in range(arguments.steps):
        grad = torch.randn(numel, generator=random)
        grad *= 3.0 if step % 13 == 5 else 0.3
        if step % 97 == 60 + rank:
            grad[step] = float("nan") if step % 2 else float("inf")
        # Ranks have different delays, so they are at different positions when the sum arrives.
        delay = float(torch.rand((), generator=random)) * 2e-4
        for name, state in states.items():
            state.grad.copy_(grad)
            coming = Coming(state.power(), 100.0, delay)
            left = forms[name](state, coming)
            if left is not None:
                left()
            verdict = coming.verdict()
            same = all(map(torch.equal, state.bits(), states["synchronous"].bits()))
            differ[name] += not same
        clipped, skipped = clipped + (verdict.factor < 1), skipped + verdict.skips
    if rank == 0:
        print(f"\n{arguments.steps} steps, {clipped} clipped and {skipped} skipped; steps after which any bit differs:")
        for name, count in differ.items():
            print(f"  {name:42s}{count:6d}")
        show_what_is_lost(states["synchronous"])


def show_what_is_lost(state: State) -> None:
    """Show whether arithmetic alone can undo an update, from its results and the gradient."""
    old = [tensor.clone() for tensor in state.kept]
    state.grad.normal_(generator=torch.Generator().manual_seed(7)).mul_(0.3)
    state.update(0, state.numel, 1.0)
    g, (master, mean, square) = state.grad, state.kept
    rests = [1 - beta for beta in BETAS]
    steps = state.steps + 1
    size, root = RATE / (1 - BETAS[0] ** steps), (1 - BETAS[1] ** steps) ** 0.5
    undone = [
        (master + size * mean / (square.sqrt() / root + EPS)) / (1 - RATE * DECAY),
        (mean - rests[0] * g) / BETAS[0],
        (square - rests[1] * g * g) / BETAS[1],
    ]
    print(
        "\nold values that arithmetic gives back from new ones and gradients; those within 127 units in the last place"
    )
    for name, before, found in zip(("master", "first moment", "second moment"), old, undone, strict=True):
        away = (before.view(torch.int32).long() - found.view(torch.int32).long()).abs()
        print(f"  {name:42s}{(away == 0).double().mean():8.1%}{(away <= 127).double().mean():10.3%}")


def run(arguments: argparse.Namespace, millions: float) -> None:
    torch.set_num_threads(1)
    loops = built()
    if loops is None:
        raise SystemExit("the loops are not compiled: install the package where there is a C compiler")
    if arguments.check:
        show_bits(dist.get_rank(), loops, arguments)
    else:
        show_times(dist.get_rank(), loops, arguments, millions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare bits, and time nothing")
    parser.add_argument("--steps", type=int, default=1000, help="of --check")
    parser.add_argument("--numel", type=float, nargs="+", default=[4, 30], help="millions of elements")
    parser.add_argument("--log", type=int, default=64, help="MiB")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each table")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()} CPU, 2 gloo ranks of one thread")
    world, timeout = World(), 1200.0 + 3 * arguments.seconds
    for millions in arguments.numel[:1] if arguments.check else arguments.numel:
        print(world.ranks.run(printed_by, 2, run, arguments, millions, timeout=timeout)[0], end="", flush=True)
    world.close()


if __name__ == "__main__":
    main()
