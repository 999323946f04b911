"""Whether programs of ranks can deadlock, on backends that are stricter than any: nothing runs, nobody waits.

A *rendezvous* is an event that ends for nobody before all members of its group have come to it, and each rank comes to its
own in order. If all come to the end here, they do on any looser backend: to wait for less, or to let more run at a
time, only takes away reasons to wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from recorded_ranks import Event, Kind, Program

Instance = tuple[str, int]  # which rendezvous of its group


def eager(programs: Sequence[Program]) -> str | None:
    """On a backend that makes a communicator with its group: to make one is a rendezvous, and so is each collective.

    Returns: Who waits for whom in the end; None: nobody.
    """
    return stuck([of_kind(program, "make", "collective") for program in programs])


def lazy(programs: Sequence[Program]) -> str | None:
    """The same of one that makes a communicator in the first collective, for which its host waits; later ones run."""
    return stuck([list(_first_of_each_group(of_kind(program, "collective"))) for program in programs])


def serial(programs: Sequence[Program]) -> str | None:
    """The same of a device that runs one collective at a time, of whatever group, in the order in which they were started;
    and to destroy a group is a rendezvous too."""
    return stuck([of_kind(program, "collective", "destroy") for program in programs])


def of_kind(program: Program, *kinds: Kind) -> Program:
    """What is of these kinds."""
    return [event for event in program if event.kind in kinds]


def _first_of_each_group(program: Program) -> Iterator[Event]:
    seen = set()
    for event in program:
        if event.group not in seen:
            seen.add(event.group)
            yield event


def stuck(programs: Sequence[Program]) -> str | None:
    """Who waits for whom when nobody can go on; None: all have come to the end.

    Args:
        programs: Of rendezvous only.
    Raises:
        AssertionError: Members of a group meet in different collectives.
    """
    counts: list[Counter[str]] = [Counter() for _ in programs]  # of rendezvous, by group
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
