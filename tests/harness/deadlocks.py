"""Check whether collectives of ranks can deadlock, under models of backends that are stricter than any real one.
Nothing is executed.

A *rendezvous* is an event that completes only when all members of its group have reached it; each rank reaches its own
rendezvous in program order. If all programs complete in this model, they complete on every less strict backend:
waiting for fewer events or running more of them concurrently only removes reasons to wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from recorded_ranks import Event, Kind, Program

Instance = tuple[str, int]  # the group and the index of the rendezvous in it


def eager(programs: Sequence[Program]) -> str | None:
    """Model a backend that creates a communicator with its group: creation is a rendezvous, and so is each collective."""
    return stuck([of_kind(program, "make", "collective") for program in programs])


def lazy(programs: Sequence[Program]) -> str | None:
    """Model a backend that creates the communicator of a group in its first collective, which then blocks the host."""
    return stuck([list(_first_of_each_group(of_kind(program, "collective"))) for program in programs])


def serial(programs: Sequence[Program]) -> str | None:
    """Model a device that runs one collective at a time over all groups, in the order in which they were started.

    Destroying a group is a rendezvous, but creating a group is not.
    """
    return stuck([of_kind(program, "collective", "destroy") for program in programs])


def of_kind(program: Program, *kinds: Kind) -> Program:
    return [event for event in program if event.kind in kinds]


def _first_of_each_group(program: Program) -> Iterator[Event]:
    seen = set()
    for event in program:
        if event.group not in seen:
            seen.add(event.group)
            yield event


def stuck(programs: Sequence[Program]) -> str | None:
    """Describe which ranks wait for which other ranks when no rank can continue; None if all programs complete.

    ``programs`` consist of rendezvous only. Raises AssertionError if members of a group meet in different collectives.
    """
    counts: list[Counter[str]] = [Counter() for _ in programs]  # rendezvous completed so far, by group
    came: dict[Instance, dict[int, Event]] = defaultdict(dict)
    awake = list(range(len(programs)))
    while awake:
        rank = awake.pop()
        done = counts[rank].total()
        if done == len(programs[rank]):
            continue
        event = programs[rank][done]
        instance = event.group, counts[rank][event.group]
        came[instance][rank] = event
        if len(came[instance]) == len(event.members):
            met = {(other.kind, other.what) for other in came[instance].values()}
            assert len(met) == 1, f"members of {event.group} meet in {met}"
            for member in came.pop(instance):
                counts[member][event.group] += 1
                awake.append(member)
    told = sorted(f"{sorted(waiting)} in {next(iter(waiting.values()))}" for waiting in came.values())
    return "; ".join(told) or None
