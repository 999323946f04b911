"""A training step whose kernels are launched once, as a CUDA graph, and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 3  # the first steps make states, meet and look at what came: they can't be captured


class GraphedStep:
    """Calls a step as it is a few times, then captures it, and replays it from then on.

        step = GraphedStep(lambda images, labels: train(images, labels))
        loss, norm = step(images, labels)

    Args:
        step: From the tensors of a batch, always of the same shapes, to tensors. It clears gradients itself.
    Raises:
        ValueError: There is no GPU.
    """

    def __init__(self, step: Callable[..., Sequence[Tensor]]) -> None:
        if not torch.cuda.is_available():
            raise ValueError("--cuda-graph needs a GPU, and this process has none: leave it out")
        self._step, self._count = step, 0
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: Sequence[Tensor] = ()
        self._graph = torch.cuda.CUDAGraph()

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """What the step returns; from the capture on always in the same tensors, which the next call overwrites."""
        self._count += 1
        if self._count <= WARM_UP:
            return self._warm_up(inputs)
        if not self._inputs:
            self._inputs = tuple(given.clone() for given in inputs)
            with torch.cuda.graph(self._graph):  # nothing of it runs yet
                self._outputs = self._step(*self._inputs)
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        return self._outputs

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """On another stream than the default one: autograd comes back to the stream that it has seen first."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outputs = self._step(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return outputs
