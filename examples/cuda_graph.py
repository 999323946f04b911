"""A training step that is captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 3  # the first steps create states, connect process groups and check gradients, which can't be captured


class GraphedStep:
    """Training step that runs normally three times. The fourth call captures a CUDA graph, which it and later calls replay.

        step = GraphedStep(lambda images, labels: train(images, labels))
        loss, norm = step(images, labels)

    Args:
        step: A function from the tensors of a batch, with constant shapes, to tensors. It must clear gradients itself.
    Raises:
        ValueError: There is no GPU.
    """

    def __init__(self, step: Callable[..., Sequence[Tensor]]) -> None:
        if not torch.cuda.is_available():
            raise ValueError("--cuda-graph needs a GPU, and this process has none: leave out --cuda-graph")
        self._step, self._count = step, 0
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: Sequence[Tensor] = ()
        self._graph = torch.cuda.CUDAGraph()

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the results of the step. After the capture, each call overwrites the same tensors."""
        self._count += 1
        if self._count <= WARM_UP:
            return self._warm_up(inputs)
        if not self._inputs:
            self._inputs = tuple(given.clone() for given in inputs)
            with torch.cuda.graph(self._graph):  # the capture executes no kernel
                self._outputs = self._step(*self._inputs)
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        return self._outputs

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Run the step on a side stream.

        Autograd keeps using the stream of the first step, and the default stream can't be captured.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outputs = self._step(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return outputs
