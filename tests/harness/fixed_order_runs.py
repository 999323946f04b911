"""Training runs with ``sum_order="fixed"`` on any number of data ranks, and a hash of their results."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from meshstep.amp.modes import precision_of
from meshstep.optim import AdaGC, Muon, Offloaded, ParallelOptimizer, Sharded, ZClip, load_checkpoint, save_checkpoint
from meshstep.parallel import ColumnParallelLinear, P, ProcessGroupRegistry, RowParallelLinear, Topology, declare
from torch import Tensor, nn

CLIPS: dict[str, Any] = {
    "norm": lambda: 0.3,
    "zclip": ZClip,
    "adagc": AdaGC,
    "groups": lambda: None,
    "none": lambda: None,
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=True),
    "Muon": lambda groups: Muon(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
}


@dataclass(frozen=True)
class FixedRun:
    """The settings of a run, which do not depend on the number of data ranks.

    Args:
        total: The number of micro-batches per accumulation window, over all data ranks.
        states: "whole", "zero1", "zero2", "offloaded", "zero1 offloaded" or "zero2 offloaded".
        clip: A key of `CLIPS`. "groups": each param group has its own threshold.
        weighted: True: losses are sums, and micro-batches have weights.
        optimizer: A key of `OPTIMIZERS`.
        fault: "overflow": the loss of one micro-batch is inf in the third step. "missing": one micro-batch per window
            has no loss. "unused": a parameter has no gradient in half of the micro-batches. None: no fault.
        axis: "tensor": two ranks share the layers of one model. "pipe": two ranks have a model each, as stages without
            activations between them, and a common norm. None: each rank has the full model.
    """

    total: int = 24
    steps: int = 5
    precision: str = "fp32"
    states: str = "whole"
    clip: str = "norm"
    weighted: bool = False
    optimizer: str = "AdamW"
    order: Any = "fixed"
    fault: str | None = None
    norm_type: float = 2.0
    axis: str | None = None

    @property
    def ranks_per_replica(self) -> int:
        return 1 if self.axis is None else 2


class Net(nn.Module):
    """A small model whose layers have prime sizes (13, 37, 11 and 3), and a layer that forward can leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(13, 37)
        self.second: nn.Module = nn.Linear(37, 11)
        self.norm, self.last, self.extra = nn.LayerNorm(11), nn.Linear(11, 3), nn.Linear(11, 3, bias=False)

    def forward(self, inputs: Tensor, with_extra: bool = True) -> Tensor:
        hidden = self.norm(self.second(torch.tanh(self.first(inputs))))
        out: Tensor = self.last(hidden)
        return out + self.extra(hidden) if with_extra else out


class SplitNet(Net):
    """`Net` with 38 instead of 37 hidden features, and its first two layers sharded over the axis "tensor"."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.first = ColumnParallelLinear(13, 38, registry)
        self.second = RowParallelLinear(38, 11, registry)


class Training:
    """The training of one rank. ``data_ranks`` may be 1."""

    def __init__(self, run: FixedRun, data_ranks: int) -> None:
        torch.manual_seed(0)
        self.run, self.data_ranks = run, data_ranks
        axes: dict[str, Any] = ({"data": data_ranks} if data_ranks > 1 else {}) | (
            {run.axis: 2} if run.axis is not None else {}
        )
        self.registry = ProcessGroupRegistry(Topology(**axes))
        self.rank = self.registry.rank("data") if data_ranks > 1 else 0
        mode = precision_of(run.precision)
        if run.axis == "pipe":
            torch.manual_seed(self.registry.rank("pipe"))
        self.model = mode.prepare(SplitNet(self.registry) if run.axis == "tensor" else Net())
        declare(self.model, {"*": P()})
        params = [*self.model.named_parameters()]
        groups: list[dict[str, Any]] = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
        if run.clip == "groups":
            groups[0]["max_norm"], groups[1]["max_norm"] = 0.2, 0.4
        zero = "zero1" in run.states or "zero2" in run.states
        states: list[Any] = [Sharded("data", gradients="zero2" in run.states)] if zero and data_ranks > 1 else []
        states += [Offloaded(0.5)] if "offloaded" in run.states else []
        self.optimizer = ParallelOptimizer(
            OPTIMIZERS[run.optimizer](groups),
            self.registry,
            max_norm=CLIPS[run.clip](),
            norm_type=run.norm_type,
            precision=mode,
            accumulation_steps=run.total // data_ranks,
            states=states,
            sum_order=run.order,
        )

    def step(self, number: int) -> None:
        run, per_rank = self.run, self.run.total // self.data_ranks
        for local in range(per_rank):
            micro_batch = self.rank * per_rank + local
            generator = torch.Generator().manual_seed(1000 * number + micro_batch)
            inputs, wanted = torch.randn(5, 13, generator=generator), torch.randn(5, 3, generator=generator)
            with_extra = run.fault != "unused" or micro_batch < run.total // 2
            out = self.model(inputs.to(next(self.model.parameters()).dtype), with_extra).float()
            weight = 1 + (7 * micro_batch + number) % 5
            loss = (out - wanted).square()[:weight].sum() if run.weighted else (out - wanted).square().mean()
            if run.fault == "overflow" and number == 2 and micro_batch == run.total - 1:
                loss = loss * torch.inf
            is_missing = run.fault == "missing" and micro_batch == run.total // 2
            given = (0 if is_missing else weight) if run.weighted else None
            self.optimizer.backward(None if is_missing else loss, weight=given)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> tuple[str, int, float, int]:
        """Return the hash of the weights, the hash of the state, the last norm, and the number of skipped steps."""
        weights = hashlib.sha256()
        for param in self.model.parameters():
            weights.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
        optimizer = self.optimizer
        assert optimizer.last_stats is not None
        return weights.hexdigest(), int(optimizer.state_hash()), float(optimizer.last_stats), optimizer.skipped_steps


def trained(run: FixedRun, data_ranks: int) -> tuple[str, int, float, int]:
    training = Training(run, data_ranks)
    for number in range(run.steps):
        training.step(number)
    return training.result()


def resumed(run: FixedRun, data_ranks: int, path: Path, first: int, stop: int) -> tuple[str, int, float, int]:
    """Run the steps from ``first`` to ``stop`` (excluded), and return the `Training.result`.

    Load a checkpoint before, unless ``first`` is 0, and save one after.
    """
    training = Training(run, data_ranks)
    if first:
        load_checkpoint(path / str(first), training.model, training.optimizer)
    for number in range(first, stop):
        training.step(number)
    save_checkpoint(path / str(stop), training.model, training.optimizer)
    return training.result()
