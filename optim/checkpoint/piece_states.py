"""What an optimizer keeps for a piece of a parameter, and whose it is where pieces are put together anew.

Step counts, and whatever else is one number, belong to the piece: experts on different ranks have made different numbers of
steps, and one without tokens has no state at all. In the layout of the checkpoint each piece has its own again. In another
one a piece may come from several; where these differ, its numbers are all those of the one with the fewest steps, and
elements that had no state yet have that of a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...parallel.layout.blocks import Span
from ...parallel.layout.pieces import Region
from ...parallel.mesh.plain_values import (
    anything,
    check_count,
    check_number,
    check_text,
    dict_of,
    fields,
    items,
    list_of,
    wrong,
)
from ..states.pieces import SCALAR_STATE
from ..states.state_checks import check_state_value

Place = tuple[tuple[tuple[Span, ...], ...], int, int]
"""A region of a parameter whose full shape is known: spans, start, stop."""


@dataclass(frozen=True)
class PieceState:
    """The state of one piece; of tensors only which there are.

    Args:
        tensors: The dtypes of those of the piece's shape, by key.
        odd: The keys of those of other shapes.
        scalars: dtype and value of those that are one number.
        values: What is no tensor.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    scalars: dict[str, tuple[str, float]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], piece: Tensor, region: Region) -> PieceState:
        """From an optimizer's state. Host reads: one for each 0-dim tensor."""
        found = cls()
        for key, value in state.items():
            if not isinstance(value, Tensor):
                found.values[key] = value
            elif is_scalar(key, value, region):
                found.scalars[key] = (_name(value), value.item())
            elif value.shape == piece.shape:
                found.tensors[key] = _name(value)
            else:
                found.odd.append(key)
        return found

    def plain(self) -> dict[str, Any]:
        """``values``, and ``scalars`` as the tensors that they were, on the CPU."""
        scalars = {
            key: torch.tensor(number, dtype=getattr(torch, name)) for key, (name, number) in self.scalars.items()
        }
        return {**self.values, **scalars}

    @property
    def steps(self) -> Any:
        """The count of steps; None where it has none."""
        return self.scalars["step"][1] if "step" in self.scalars else self.values.get("step")

    @property
    def is_begun(self) -> bool:
        """Whether it has been stepped: fused optimizers make a state of zeros, after 0 steps, in one that is skipped."""
        return not same(self, PieceState()) and self.steps != 0


def _check_dtype(value: object, field: str) -> None:
    if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
        raise wrong(field, value, "the name of a dtype")


def _check_scalar(value: object, field: str) -> None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[1], (bool, complex)):
        _check_dtype(value[0], field)
        return
    items(_check_dtype, check_number)(value, field)


def check_piece_state(value: object, field: str) -> None:
    """Raise ValueError where ``value`` is not a `PieceState` in plain containers, or its numbers are out of range."""
    checks = {
        "tensors": dict_of(_check_dtype),
        "odd": list_of(check_text),
        "scalars": dict_of(_check_scalar),
        "values": dict_of(anything),
    }
    fields(checks)(value, field)
    assert isinstance(value, Mapping)
    if unknown := value.keys() - checks.keys():
        raise ValueError(f"{field} has {', '.join(map(repr, unknown))}, which is no part of a state")
    numbers = {**value["values"], **{key: number for key, (_, number) in value["scalars"].items()}}
    for key, number in numbers.items():
        check_state_value(key, number, field)


def check_place(value: object, field: str) -> None:
    """Raise ValueError where ``value`` is no `Place`."""
    items(list_of(list_of(items(check_count, check_count))), check_count, check_count)(value, field)


def is_scalar(key: str, value: Tensor, region: Region) -> bool:
    """Whether a state is one number for the piece, and not an element for each of the parameter's."""
    return value.dim() == 0 and (region.full_shape != () or key in SCALAR_STATE)


def place_of(region: Region) -> Place:
    """Where in its parameter a region is."""
    return region.spans, region.start, region.stop


# Of all ranks ---------------------------------------------------------------------------------------------------------

OfRank = Mapping[str, Mapping[Place, PieceState]]  # by parameter


def merged(ranks: Sequence[OfRank]) -> dict[str, list[tuple[dict[str, Any], dict[Place, list[int]]]]]:
    """The different states of each parameter's pieces, as plain containers, and which ranks had each where; no places
    where all are the same."""
    found: dict[str, list[tuple[PieceState, dict[Place, list[int]]]]] = {}
    for rank, own in enumerate(ranks):
        for name, pieces in own.items():
            states = found.setdefault(name, [])
            for place, state in pieces.items():
                at = next((places for known, places in states if same(known, state)), None)
                if at is None:
                    states.append((state, at := {}))
                at.setdefault(place, []).append(rank)
    return {
        name: [(asdict(state), places if len(states) > 1 else {}) for state, places in states]
        for name, states in found.items()
    }


class PieceStates:
    """What `merged` returned, for the pieces of another layout.

    Args:
        ranks: The saved ranks that are like this one; of copies that differ theirs is taken.

    Attributes:
        together: What `of` has put together of pieces that differed, in words.
    """

    def __init__(self, content: Mapping[str, Any], ranks: set[int]) -> None:
        self._states = {
            name: [(PieceState(**state), places) for state, places in states] for name, states in content.items()
        }
        self._ranks = ranks
        self.together: list[str] = []

    @property
    def keys(self) -> set[tuple[str, str]]:
        """(key, parameter) of every state of a parameter's shape that a piece has."""
        return {(key, name) for name, states in self._states.items() for state, _ in states for key in state.tensors}

    def missing(self, name: str, region: Region) -> Iterator[tuple[str, torch.dtype]]:
        """The tensors that other pieces of the parameter have and this one does not, on any rank: key and dtype."""
        states = self._states.get(name, [])
        here = {key for state, places in states if place_of(region) in places for key in state.tensors}
        known = {key: dtype for state, places in states for key, dtype in state.tensors.items() if places}
        return ((key, getattr(torch, known[key])) for key in sorted(known.keys() - here))

    def of(self, name: str, region: Region) -> PieceState:
        """The state of a piece.

        Raises:
            ValueError: It would come from pieces whose states differ and can't be put together.
        """
        states = self._states.get(name, [])
        if len(states) < 2:
            return states[0][0] if states else PieceState()
        here = [(state, places[place_of(region)]) for state, places in states if place_of(region) in places]
        found = [state for state, ranks in here if not self._ranks.isdisjoint(ranks)] or [state for state, _ in here]
        if not found:
            found = [state for state, places in states if any(_region(region, at).overlaps(region) for at in places)]
        return self._put_together(name, found) if len(found) > 1 else found[0] if found else PieceState()

    def _put_together(self, name: str, states: Sequence[PieceState]) -> PieceState:
        stepped = [state for state in states if state.is_begun]
        begun = stepped or [state for state in states if not same(state, PieceState())]
        counts = [state.steps for state in begun]
        differing = _differing([{**state.scalars, **state.values} for state in begun])
        if differing and (None in counts or not all(_is_number(state, key) for state in begun for key in differing)):
            raise ValueError(
                f"the optimizer's {', '.join(differing)} of {name} differed between pieces that are put together here, and "
                "nothing says which to take; continue on the mesh of the checkpoint"
            )
        fewest = begun[counts.index(min(counts))] if differing else begun[0]
        tensors = {key: dtype for state in begun for key, dtype in state.tensors.items()}
        how = [f"{min(counts):g} to {max(counts):g} steps"] if differing else []
        missing = any(not state.is_begun or state.tensors.keys() != tensors.keys() for state in states)
        how += ["no state yet"] if missing else []
        if stepped:
            self.together.append(f"{name} ({', '.join(how)})")
        return PieceState(
            tensors,
            sorted({key for state in begun for key in state.odd}),
            fewest.scalars,
            fewest.values,
        )


def _region(of_same_parameter: Region, place: Place) -> Region:
    return Region(of_same_parameter.full_shape, *place)


def _differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = {key for one in found for key in one}
    return sorted(key for key in keys if any(not same(one.get(key), found[0].get(key)) for one in found))


def _is_number(state: PieceState, key: str) -> bool:
    return key in state.scalars or isinstance(state.values.get(key), (int, float))


def same(one: object, other: object) -> bool:
    """Whether two values are equal; tensors of several elements are not."""
    try:
        return bool(one == other)
    except RuntimeError:  # tensors within
        return False


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
