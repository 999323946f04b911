"""Train replicas with and without overlap, in the accumulation windows that `Windows` defines; run by every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from meshstep.amp import NaiveFp16
from meshstep.optim import Offloaded, ParallelOptimizer
from meshstep.optim.gradients.buckets import GradientBucket, Reducible
from meshstep.optim.gradients.reduce_in_backward import BackwardReducer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from optimizers import adamw
from precision_modes import MODES
from torch import Tensor, nn
from zero_models import Odd, inputs

SMALL = 1024  # bytes: small enough for many buckets in small models
STEPS = 4


class Replica(Odd):
    """A model whose parameters are all replicated over the data axis. Its forward runs the layers of `Odd` twice."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(None, dtype)
        declare(self, {"*": P()})

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return super().forward(x, use) + super().forward(x * 0.5, False)


@dataclass
class Watch:
    """Log of the gradient buckets whose reduction started.

    ``order`` has the index of the first parameter of each bucket, in the order in which the reductions started.
    ``early`` has the buckets whose reduction a backward hook started.
    """

    order: list[int] = field(default_factory=list)
    early: list[Reducible] = field(default_factory=list)

    @property
    def in_backward(self) -> int:
        return len(self.early)


@contextmanager
def watched() -> Iterator[Watch]:
    """Record every bucket whose reduction is started within the block."""
    watch, arrived, start = Watch(), BackwardReducer._arrived, GradientBucket.start

    def on_start(bucket: GradientBucket) -> Any:
        watch.order.append(bucket.layout.indices[0])
        return start(bucket)

    def on_gradient(reducer: BackwardReducer, param: Tensor) -> None:
        before = reducer._next if reducer._is_open else len(reducer._eager)
        arrived(reducer, param)
        # `_next` does not exist before the first window.
        watch.early += reducer._eager[before : getattr(reducer, "_next", 0)]

    with (
        mock.patch.object(GradientBucket, "start", on_start),
        mock.patch.object(BackwardReducer, "_arrived", on_gradient),
    ):
        yield watch


class Trained(dict[str, Tensor]):
    """The parameters after training, and the norms; ``in_backward`` counts buckets that were reduced in backward."""

    in_backward = 0


def train_replicas(ranks: int, mode: str, how: str, overlap: bool, compression: Any = None) -> Trained:
    """Train `Replica` for a few steps on this rank of data=``ranks``; ``how`` is one of the ways that `Windows`
    describes."""
    dtype = torch.float32 if mode == "fp32" else torch.float16 if mode.startswith("fp16") else torch.bfloat16
    with ProcessGroupRegistry(Topology(data=ranks)) as registry, watched() as watch:
        model = Replica(dtype)
        reduction = {"overlap": overlap, "bucket_bytes": SMALL, "compression": compression}
        optimizer = make_optimizer(model, registry, mode, how, **reduction)
        norms = Windows(model, optimizer, registry, how).run()
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
        trained = Trained({**found, "norms": torch.stack(norms)})
        trained.in_backward = watch.in_backward
        return trained


def make_optimizer(
    model: nn.Module, registry: ProcessGroupRegistry, mode: str, how: str, **options: Any
) -> ParallelOptimizer:
    """Return an optimizer in the precision ``mode``, with the options that ``how`` needs (see `Windows`).
    For "added", the head's parameters are left out."""
    params = [param for name, param in model.named_parameters() if how != "added" or not name.startswith("head")]
    return ParallelOptimizer(
        adamw(params),
        registry,
        max_norm=0.5,
        precision=NaiveFp16(init_scale=2.0**10) if mode == "fp16_naive" else MODES[mode],
        accumulation_steps=3 if how in ("managed", "short", "announced") else None,
        states=Offloaded(0.5) if how == "offloaded" else (),
        **options,
    )


@dataclass
class Windows:
    """Accumulation windows of micro-batches; the methods and `make_optimizer` define each value of ``how``."""

    model: Replica
    optimizer: ParallelOptimizer
    registry: ProcessGroupRegistry
    how: str

    def run(self) -> list[Tensor]:
        norms = []
        for step in range(STEPS):
            if step == 2 and self.how == "added":
                self.optimizer.add_param_group({"params": list(self.model.head.parameters()), "lr": 1e-3})
            if step == 2 and self.how == "frozen later":
                self.model.head.bias.requires_grad_(False)
            if self.how != "kept":
                self.optimizer.zero_grad(set_to_none=self.how != "in place")
            self.window(step)
            if self.how == "clipped":
                self.optimizer.clip_grad_by_norm(0.3)
            stats = self.optimizer.step(final=self.how in ("short", "announced"))
            assert stats is not None
            norms.append(stats.total_norm)
        return norms

    def window(self, step: int) -> None:
        """Run one window: three micro-batches for "managed" and "explicit", two for "short", "announced" and "all under
        no_sync", else one."""
        count = {"managed": 3, "explicit": 3, "short": 2, "announced": 2, "all under no_sync": 2}.get(self.how, 1)
        for index in range(count):
            if self.how == "announced" and index == count - 1:
                self.optimizer.mark_last_micro_batch()
            off = self.how == "all under no_sync" or (self.how == "explicit" and index < count - 1)
            with self.optimizer.no_sync() if off else nullcontext():
                self.micro_batch(10 * step + index)

    def micro_batch(self, index: int) -> None:
        """Run one backward. The last rank passes no loss with "idle", and does not call backward with "silent"; with
        "unused" only the first rank uses all parameters."""
        rank, size = self.registry.coordinate["data"], self.registry.size("data")
        if self.how == "idle" and rank == size - 1:
            self.optimizer.backward(None)
            return
        if self.how == "silent" and rank == size - 1:
            return
        x = inputs(index, rank).to(self.model.gain.dtype)
        loss = self.model(x, use=self.how != "unused" or rank == 0)
        if self.how == "backward without optimizer":
            self.optimizer.scale_loss(loss).backward()
        else:
            self.optimizer.backward(loss)


def train_dense(ranks: int, steps: int = STEPS) -> dict[str, Tensor]:
    """Train in one process, in float64, on the mean of all ranks' losses, with one micro-batch per step."""
    model = Replica(torch.float64)
    # Start from the initial values of the float32 model, which are rounded.
    for param, rounded in zip(model.parameters(), Replica().parameters(), strict=True):
        param.data.copy_(rounded.data)
    optimizer = adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        losses = [model(inputs(10 * step, rank).double()) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}
