"""A small language model built from 2-D, 2.5-D or 3-D tensor-parallel layers, and its dense version. All are made with
the same seed, so their full weights are equal."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from meshstep.parallel import (
    Classifier2D,
    Classifier3D,
    Embedding2D,
    Embedding3D,
    LayerNorm2D,
    LayerNorm3D,
    Linear2D,
    Linear3D,
    P,
    ProcessGroupRegistry,
    cross_entropy_2d,
    cross_entropy_3d,
    gather_objects,
    join,
    shard,
    spec_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, BATCH, SEED = 9, 8, 7


class Kind(NamedTuple):
    """The layer classes of a family, and the model axes that split the batch."""

    embedding: Any
    norm: Any
    linear: Any
    classifier: Any
    rows: tuple[str, ...]


KINDS = {
    "2-D": Kind(Embedding2D, LayerNorm2D, Linear2D, Classifier2D, ("row",)),
    "2.5-D": Kind(
        partial(Embedding2D, depth="depth"),
        partial(LayerNorm2D, depth="depth"),
        partial(Linear2D, depth="depth"),
        partial(Classifier2D, depth="depth"),
        ("depth", "row"),
    ),
    "3-D": Kind(Embedding3D, LayerNorm3D, Linear3D, Classifier3D, ("weight", "input")),
}


class Lm(nn.Module):
    """Maps ids [batch, seq] to a loss, in float64.

    ``kind`` is the layer family; None: torch's own layers. ``tied``: the classifier shares the embedding's table.
    """

    def __init__(self, kind: str | None, registry: ProcessGroupRegistry | None, width: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.kind = None if kind is None else KINDS[kind]
        self.registry = registry
        made = self.kind or Kind(nn.Embedding, nn.LayerNorm, nn.Linear, nn.Linear, ())
        where = () if registry is None else (registry,)
        back = {"input": "output", "output": "input"} if kind == "3-D" else {}
        options: dict[str, Any] = {"dtype": torch.float64}
        self.table = made.embedding(VOCABULARY, width, *where, **options)
        self.norm = made.norm(width, *where, **options)
        self.up = made.linear(width, 2 * width, *where, **options)
        self.down = made.linear(2 * width, width, *where, **back, **options)
        self.head = made.classifier(width, VOCABULARY, *where, bias=True, **options)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss over this data coordinate's batch: each id predicts the next id of its row, cyclically."""
        targets = ids.roll(-1, 1)
        if self.kind is None or self.registry is None:
            return F.cross_entropy(self._logits(ids).movedim(-1, 1), targets)
        ids, targets = (shard(full, P(self.kind.rows), self.registry) for full in (ids, targets))
        if self.kind.linear is Linear3D:
            return cross_entropy_3d(self._logits(ids), targets, self.registry)
        return cross_entropy_2d(self._logits(ids), targets, self.registry, row=self.kind.rows, classes=VOCABULARY)

    def _logits(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits: Tensor = self.head(x)
        return logits


def ids_of(step: int) -> Tensor:
    """Return the full batch of a step."""
    return torch.randint(VOCABULARY, (BATCH, 3), generator=torch.Generator().manual_seed(step))


def full_parameters(model: Lm) -> dict[str, Tensor]:
    """Return the full parameters in the dense model's layout, on every rank; asserts that all replicas are equal."""
    assert model.registry is not None
    topology = model.registry.topology
    held = {name: (spec_of(param), param.detach()) for name, param in model.named_parameters()}
    everybody = gather_objects(held, model.registry)
    full = {}
    for name, spec in {name: spec for of_rank in everybody for name, (spec, _) in of_rank.items()}.items():
        whole = join([of_rank[name][1] if name in of_rank else None for of_rank in everybody], spec, topology)
        if name in held:
            assert torch.equal(shard(whole, spec, model.registry, uneven=True), held[name][1]), (
                f"replicas of {name} differ"
            )
        full[name] = whole.t() if name in ("up.weight", "down.weight") else whole
    return full
