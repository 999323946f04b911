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


def two_at_a_time(programs: Sequence[Program]) -> str | None:
    """The same of a device that runs two: one in the program's own course, and one of those that the program has started
    and waits for later; each in order."""
    return stuck([of_kind(program, "collective", "wait", "destroy") for program in programs], beside=True)


def of_kind(program: Program, *kinds: Kind) -> Program:
    """What is of these kinds."""
    return [event for event in program if event.kind in kinds]


def _first_of_each_group(program: Program) -> Iterator[Event]:
    seen = set()
    for event in program:
        if event.group not in seen:
            seen.add(event.group)
            yield event


def stuck(programs: Sequence[Program], beside: bool = False) -> str | None:
    """Who waits for whom when nobody can go on; None: all have come to the end.

    Args:
        programs: "wait" is for a collective to be over; all else is a rendezvous.
        beside: A collective that a rank does not wait for at once is one beside the program's course.
    Raises:
        AssertionError: Members of a group meet in different collectives.
    """
    ranks = [_Rank(program, beside) for program in programs]
    come: dict[Instance, dict[int, Event]] = defaultdict(dict)
    awake = list(range(len(ranks)))
    while awake:
        rank = awake.pop()
        for instance, event in ranks[rank].goes_on():
            come[instance][rank] = event
            if len(come[instance]) == len(event.members):
                met = {(other.kind, other.what) for other in come[instance].values()}
                assert len(met) == 1, f"members of {event.group} meet in {met}"
                for member in come.pop(instance):
                    ranks[member].ends(instance)
                    awake.append(member)
    told = sorted(f"{sorted(waiting)} in {next(iter(waiting.values()))}" for waiting in come.values())
    return "; ".join(told) or None


class _Rank:
    """Where a rank is in its program."""

    def __init__(self, program: Program, beside: bool) -> None:
        self.program, self.beside, self.at = program, beside, 0
        self.counts: Counter[str] = Counter()  # of rendezvous, by group
        self.under_way: dict[Instance, int] = {}  # the collective's number
        self.queue: list[tuple[Instance, Event]] = []  # beside the course; the first one is under way
        self.over: set[int] = set()
        self.blocked_by: Instance | None = None

    def goes_on(self) -> Iterator[tuple[Instance, Event]]:
        """To the next thing to wait for; the rendezvous that it comes to on the way."""
        if self.queue and self.queue[0][0] not in self.under_way:
            self.under_way[self.queue[0][0]] = self.queue[0][1].number
            yield self.queue[0]
        while self.blocked_by is None and self.at < len(self.program):
            event = self.program[self.at]
            if event.kind == "wait":
                if event.number not in self.over:
                    return
                self.at += 1
                continue
            self.counts[event.group] += 1
            instance = event.group, self.counts[event.group]
            self.at += 1
            if self.beside and event.kind == "collective" and not self._waits_at_once(event):
                self.queue.append((instance, event))
                if len(self.queue) > 1:
                    continue
            else:
                self.blocked_by = instance
            self.under_way[instance] = event.number
            yield instance, event

    def _waits_at_once(self, event: Event) -> bool:
        following = self.program[self.at : self.at + 1]
        return bool(following) and (following[0].kind, following[0].number) == ("wait", event.number)

    def ends(self, instance: Instance) -> None:
        """A rendezvous is over."""
        self.over.add(self.under_way.pop(instance))
        if self.blocked_by == instance:
            self.blocked_by = None
        else:
            del self.queue[0]
