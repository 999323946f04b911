"""`prove` and `infer` on parameters without effect on the loss, whose gradients are rounding errors that differ per
rank.
"""

from __future__ import annotations

import torch
from meshstep.optim.proof.prove import infer, prove
from meshstep.parallel import (
    ColumnParallelLinear,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    declare,
)
from torch import Tensor, nn
from world import World


class Attention(nn.Module):
    """One head per rank. ``shift`` is added to all keys, which does not change the attention."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.query, self.key, self.value = (ColumnParallelLinear(6, 8, registry).double() for _ in range(3))
        self.out = RowParallelLinear(8, 6, registry).double()
        self.shift = nn.Parameter(torch.randn(4, dtype=torch.float64))
        declare(self, {"shift": P(partial="tensor")})

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ (self.key(x) + self.shift).mT
        out: Tensor = self.out(scores.softmax(-1) @ self.value(x))
        return out.square().mean()


def undecided() -> tuple[tuple[str, ...], str, tuple[str, ...], bool]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = Attention(registry)
        x = torch.randn(3, 5, 6, dtype=torch.float64)
        proof = prove(model, lambda model: model(x), registry)
        # The gradients of `shift` are only rounding errors, which differ between ranks. If it is declared as replicated,
        # the proof must not report this difference as a mistake.
        declare(model, {"shift": P()})
        copied = prove(model, lambda model: model(x), registry)
        found = infer(model, lambda model: model(x), registry)
        assert "# shift: inferred from values only; the loss hardly depends on it" in str(found)
        return proof.undecided, str(copied), copied.undecided, "shift" in found.rules and found.proof.is_correct


def test_prove_reports_parameters_without_effect_on_loss_as_undecided(world: World) -> None:
    for found, told, copied, has_rule in world.run(2, undecided):
        assert "key.bias" in found, "key.bias shifts all keys of a head too"
        assert {*found} == {*copied} == {"shift", "key.bias"}, told
        assert has_rule
