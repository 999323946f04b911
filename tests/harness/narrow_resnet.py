"""The ResNet example with fewer and narrower blocks: it still has both kinds of blocks and several buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from meshstep.optim import build as setup
from meshstep.optim.gradients import buckets as sync
from meshstep.optim.states import sharded
from run_example import example, printed_by_example, train_example
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

NARROWER = 4
BUCKET_BYTES = 2**19  # the model has about 2.6 MB in float64; DistributedDataParallel's first bucket has 1 MB


class NarrowResNet(ResNet):  # type: ignore[misc]
    """One plain block, and four blocks with a convolution in the shortcut: 320,000 parameters.

    The 21 million parameters of ResNet-34 would take most of the time, and further blocks of the same kinds add
    nothing that depends on topology or precision.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(BasicBlock, [2, 1, 1, 1], **options)
        self.fc = nn.Linear(512 // NARROWER, options["num_classes"])

    def _make_layer(self, block: type[BasicBlock], planes: int, *args: Any, **options: Any) -> nn.Sequential:
        made: nn.Sequential = super()._make_layer(block, planes // NARROWER, *args, **options)
        return made


def train_narrow(flags: Sequence[str], topology: str = "data=1", stop_after: int | None = None) -> int:
    with _narrow():
        return train_example("clip_resnet34", flags, topology, stop_after)


def printed_by_narrow(flags: Sequence[str], topology: str) -> str:
    with _narrow():
        return printed_by_example("clip_resnet34", flags, topology)


@contextmanager
def _narrow() -> Iterator[None]:
    with (
        mock.patch.object(example("models.resnet"), "resnet34", NarrowResNet),
        mock.patch.object(setup, "BUCKET_BYTES", BUCKET_BYTES),
        mock.patch.object(sync, "BUCKET_BYTES", BUCKET_BYTES),
        mock.patch.object(sharded, "BUCKET_BYTES", BUCKET_BYTES),
    ):
        yield
