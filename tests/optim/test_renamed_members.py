"""Former public names and signatures keep working for one version, with a warning that says what to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import meshstep.optim
import pytest
import torch
from meshstep.optim import Link, ParallelOptimizer, Placement, Position, SteppedTensor
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn


@pytest.fixture
def optimizer() -> Iterator[ParallelOptimizer]:
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Linear(3, 2)
        declare(model, {"*": P()})
        yield ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry)


def test_piece_is_deprecated_alias_of_stepped_tensor() -> None:
    with pytest.warns(DeprecationWarning, match=r"meshstep\.optim\.Piece is deprecated: write SteppedTensor"):
        assert meshstep.optim.Piece is SteppedTensor
    with pytest.raises(AttributeError, match="no attribute 'Pieces'"):
        meshstep.optim.Pieces  # noqa: B018


def test_deprecated_members_of_records_warn_and_return_same_values(optimizer: ParallelOptimizer) -> None:
    row, plan = optimizer.pieces()[0], optimizer.plan
    with pytest.warns(DeprecationWarning, match=r"SteppedTensor\.piece is deprecated: write tensor"):
        assert row.piece is row.tensor
    with pytest.warns(DeprecationWarning, match="write num_replicas"):
        assert plan.holders == plan.num_replicas
    with pytest.warns(DeprecationWarning, match="write replica_weights"):
        assert plan.weights == plan.replica_weights


class FormerLink(Link):
    seen: Any = None

    def install(self, optimizer: torch.optim.Optimizer, held: Any, tensors: Any) -> Any:  # type: ignore[override]
        self.seen = [at.name for at in held], list(tensors)
        return {}

    def derive(self, plan: Any, held: Any, tensors: Any) -> Any:  # type: ignore[override]
        assert len(held) == len(tensors) == len(plan.entries)
        return plan


class FormerPlacement(Placement):
    position = Position.STATE

    def check(self, binding: Any) -> None: ...

    def link(self, binding: Any) -> Link:
        self.made = FormerLink()
        return self.made


def test_deprecated_link_signatures_work_with_warning() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model, placement = nn.Linear(3, 2), FormerPlacement()
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with pytest.warns(DeprecationWarning, match=r"write (install\(self, optimizer, positions\)|derive)"):
            ParallelOptimizer(inner, registry, states=placement)
        assert placement.made.seen[0] == ["weight", "bias"]
        assert all(map(lambda one, other: one is other, placement.made.seen[1], model.parameters()))
