"""What all ranks said besides tensors, as one record, and what of it is a rank's on another mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ...parallel.mesh.plain_values import anything, check_text, dict_of, fields, items, list_of, wrong
from ...parallel.mesh.topology import Topology
from .contents import RankRecord
from .piece_states import PieceStates, check_piece_state, check_place, merged, same

T = TypeVar("T")
Variants = list[tuple[T, list[int]]]
"""Different values, and the ranks that had each."""


def check_content(content: object, world_size: int) -> None:
    """Raise ValueError, and name the field, where what `SHARED_FILE` holds is not what `save_checkpoint` writes.

    Args:
        world_size: The number of ranks that saved.
    """
    ranks = list_of(partial(_check_rank, world_size=world_size))
    fields(
        {
            "record": fields(
                {
                    "groups": list_of(items(list_of(check_text), list_of(items(dict_of(anything), ranks), least=1))),
                    "buffers": dict_of(list_of(items(check_text, ranks), least=1)),
                    "pieces": dict_of(list_of(items(check_piece_state, dict_of(ranks, key=check_place)))),
                }
            ),
            "rest": fields({"precision": check_text, "loss_scale": anything, "weights": dict_of(anything)}),
            "optimizer": check_text,
            "schedule": anything,
            "schedule_kind": check_text,
            "extra": anything,
        }
    )(content, "content")


def _check_rank(value: object, field: str, world_size: int) -> None:
    if type(value) is not int or not 0 <= value < world_size:
        raise wrong(field, value, f"a rank from 0 to {world_size - 1}")


class SharedRecord:
    """All ranks' records as one, and what of it is this rank's on a mesh that may be another one.

    What ranks said differently (batch norm's running statistics on data ranks, a learning rate on pipeline stages) goes to
    the rank at the same coordinates. On another mesh it comes from the saved ranks whose coordinates are the same along
    every axis that has the same size in both, and 0 along other data axes; if these differ among themselves it is an error.

    Attributes:
        groups: The names of each param group's parameters, and the variants of its hyper-parameters.
        buffers: The variants of the undeclared buffers' digests.
        pieces: What the optimizer had for the pieces of parameters.
    """

    def __init__(self, content: Mapping[str, Any], saved: Topology, now: Topology, rank: int) -> None:
        self.groups: list[tuple[list[str], Variants[dict[str, Any]]]] = content["groups"]
        self.buffers: dict[str, Variants[str]] = content["buffers"]
        self._saved, self._now, self._ranks = saved, now, _similar_ranks(saved, now, rank)
        self.pieces = PieceStates(content["pieces"], self._ranks)

    @staticmethod
    def merge(records: Sequence[RankRecord]) -> dict[str, Any]:
        """The content of a shared record, in plain containers, from all ranks' records."""
        groups = []
        for index in range(max(len(record.groups) for record in records)):
            found = {rank: record.groups[index] for rank, record in enumerate(records) if index < len(record.groups)}
            names = sorted({name for own, _ in found.values() for name in own})
            # A rank without parameters has a group only because torch wants one.
            groups.append((names, _variants({rank: hyper for rank, (own, hyper) in found.items() if own or not names})))
        return {
            "groups": groups,
            "buffers": _by_name([record.buffers for record in records]),
            "pieces": merged([record.pieces for record in records]),
        }

    def hyper(self, index: int) -> dict[str, Any]:
        """The hyper-parameters of a param group for this rank."""
        return self._choose(self.groups[index][1], f"the hyper-parameters of param group {index}")

    def buffer(self, name: str) -> str:
        """The digest of an undeclared buffer for this rank."""
        return self._choose(self.buffers[name], f"the buffer {name}")

    def _choose(self, variants: Variants[T], what: str) -> T:
        alike = [value for value, ranks in variants if not self._ranks.isdisjoint(ranks)]
        chosen = alike or [value for value, _ in variants]
        if len(chosen) > 1:
            raise ValueError(
                f"{what} differed between ranks of {self._saved!r}, and nothing says which belongs to a rank of "
                f"{self._now!r}; continue on the mesh of the checkpoint, or say how a buffer is laid out with "
                "annotate(buffer, P(...)) before saving"
            )
        return chosen[0]


def _similar_ranks(saved: Topology, now: Topology, rank: int) -> set[int]:
    coordinate = now.coordinate(rank)
    wanted = dict.fromkeys(saved.data_axes, 0)
    wanted |= {axis: coordinate[axis] for axis in saved.axes if axis in now.axes and saved.size(axis) == now.size(axis)}
    return set(saved.filter(**wanted))


def _by_name(by_rank: Sequence[Mapping[str, T]]) -> dict[str, Variants[T]]:
    """The variants of each name, from what each rank says of those it knows."""
    names = sorted({name for own in by_rank for name in own})
    return {name: _variants({rank: own[name] for rank, own in enumerate(by_rank) if name in own}) for name in names}


def _variants(values: Mapping[int, T]) -> Variants[T]:
    found: Variants[T] = []
    for rank, value in values.items():
        for known, ranks in found:
            if same(known, value):
                ranks.append(rank)
                break
        else:
            found.append((value, [rank]))
    return found
