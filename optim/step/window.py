"""Windows of micro-batches: what they weigh together, and when torch's data parallelism synchronises.

The gradient of a window is the mean over everything in it, whatever the micro-batches and data ranks hold:

    grad = sum over data ranks, micro-batches of grad(loss_sum)  /  sum over data ranks, micro-batches of weight

Gradient synchronisation divides by the number of data ranks D, so D / W is left, with W the total weight. W travels in
the packed collective that the norm needs anyway, and D / W is folded into the same factor as clipping and unscaling.
Means of micro-batch means are something else where micro-batches hold different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...parallel.mesh.registry import ProcessGroupRegistry


class Window:
    """The micro-batches since the last step: how many, and their weight on this rank.

    Args:
        steps: Micro-batches a window in managed accumulation; None: the caller decides when to step.
    Raises:
        ValueError: steps is no whole number >= 1.
    """

    def __init__(self, steps: int | None) -> None:
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(f"accumulation_steps={steps!r}: give a whole number >= 1, or None to decide yourself")
        self.steps = steps
        self._weighted: bool | None = None
        self.open()

    def open(self) -> None:
        """Start an empty window."""
        self.is_broken = False  # a backward of it raised: some gradients have it in them and some not
        self.micro_batches = 0
        self.weight: float | Tensor = 0.0
        self._weighted = None
        self._with_gradient: list[int] = []

    @property
    def has_weight(self) -> bool:
        """Whether this rank gave any."""
        return isinstance(self.weight, Tensor) or self.weight != 0

    @property
    def is_full(self) -> bool:
        """Whether a step is due: always, where the caller decides."""
        return self.steps is None or self.micro_batches >= self.steps

    def check_whole(self) -> None:
        """Raise RuntimeError if a backward of this window raised."""
        if self.is_broken:
            raise RuntimeError(
                "a backward of this window raised, so that some gradients have its part and some do not: call zero_grad() "
                "of this optimizer and begin the window anew"
            )

    def add(self, weight: float | Tensor | None, empty: bool = False) -> None:
        """Count one micro-batch.

        Args:
            empty: This rank has nothing to compute in it and gives no weight: it counts 0, among weights and means alike.
            weight: What the summed loss is to be divided by, e.g. its number of tokens; a number or a 0-dim tensor. None:
                the loss is a mean; it counts 1 in managed accumulation, and nothing is divided otherwise, as in torch.
        Raises:
            ValueError: The window is full; some of its micro-batches have a weight and some have none; a number is
                negative or infinite.
        """
        if self.steps is not None and self.micro_batches >= self.steps:
            raise ValueError(
                f"the window of accumulation_steps={self.steps} micro-batches is full; call step() before the next backward"
            )
        if not empty and self._weighted not in (None, weight is not None):
            raise ValueError("give every micro-batch of a window a weight, or none: sums and means don't add up")
        if isinstance(weight, (int, float)) and not 0 <= weight < inf:
            raise ValueError(f"weight={weight}: give a finite number >= 0, such as the number of tokens in the loss")
        self.micro_batches += 1
        if empty:
            return
        self._weighted = weight is not None
        if weight is None:
            weight = 0.0 if self.steps is None else 1.0
        self.weight = self.weight + weight

    # Gradients that disappear in the middle ---------------------------------------------------------------------------

    def note_gradients(self, params: Sequence[Tensor]) -> None:
        """Remember which parameters have gradients after a micro-batch, where more are to come."""
        if self.steps != 1:
            self._with_gradient = [index for index, param in enumerate(params) if param.grad is not None]

    def check_gradients(self, params: Sequence[Tensor]) -> None:
        """Raise RuntimeError if one of them is gone: somebody cleared it between the micro-batches of a window."""
        for index in self._with_gradient:
            if params[index].grad is None:
                raise RuntimeError(
                    f"after {self.micro_batches} micro-batches of this window gradients were cleared (parameter {index}, "
                    f"shape {tuple(params[index].shape)}): a forward, module.zero_grad() or another optimizer did it; "
                    "clear them with this optimizer's zero_grad(), which waits for the end of the window"
                )


def weight_slots(weight: float | Tensor, registry: ProcessGroupRegistry) -> Tensor:
    """[pipeline stages] float64: this rank's part of W, in its stage's slot; `inverse_weight` reads the sum over ranks.

    All ranks of a stage that share a data coordinate know the same weight, so each adds its part of it. Stages that know
    none (only the last one computes a loss) add 0.
    """
    topology = registry.topology
    stages = topology.size(*topology.pipe_axes)
    slots = torch.zeros(stages, dtype=torch.float64, device=registry.device)
    stage = registry.rank(*topology.pipe_axes) if topology.pipe_axes else 0
    slots[stage] = weight / topology.size(*topology.model_axes)
    return slots


def inverse_weight(totals: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    """0-dim: D / W; 1 where nobody gave a weight (or all gave 0), NaN where W is negative or NaN. Host reads: none."""
    total = totals.amax()
    data_ranks = registry.topology.size(*registry.topology.data_axes)
    inverse = torch.where(total > 0, data_ranks / total, torch.full_like(total, torch.nan))
    return torch.where(total == 0, torch.ones_like(total), inverse)


class DataParallelSwitch:
    """Turns the gradient synchronisation of torch's data parallelism on for the last micro-batch of a window only.

    Args:
        module: A `DistributedDataParallel`, or a module that `fully_shard` was applied to.
    Raises:
        TypeError: It is neither.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_ddp = isinstance(module, DistributedDataParallel)
        if not self.is_ddp and not hasattr(module, "set_requires_gradient_sync"):
            raise TypeError(
                f"data_parallel={type(module).__name__}: give the DistributedDataParallel module, or the root module that "
                "fully_shard was applied to"
            )
        self.on = True
        self._left_out = False  # whether the last micro-batch was not synchronised

    def set(self, on: bool) -> None:
        """Whether the next forward and backward synchronise."""
        self.on = on
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = on
        else:
            self.module.set_requires_gradient_sync(on)  # type: ignore[operator]

    def note_backward(self) -> None:
        """A micro-batch has been run through, with or without synchronisation."""
        self._left_out = not self.on

    def synchronised(self) -> bool:
        """Whether the gradients are averaged, as far as there are any; asked at the end of a window.

        Raises:
            RuntimeError: They are not, and only `fully_shard` could have done it, in backward.
        """
        if self._left_out and not self.is_ddp:
            raise RuntimeError(
                "fully_shard has not reduced the gradients of this window: it must know the last micro-batch of a window "
                "before its backward. Call window_ends() before the forward of the last one where a window is shorter than "
                "accumulation_steps, and leave it out of no_sync()"
            )
        left_out, self._left_out = self._left_out, False
        return not left_out

    def check_clearing(self) -> None:
        """Raise RuntimeError if gradients are to be cleared that only `fully_shard` has: they would add to later ones."""
        if self._left_out and not self.is_ddp:
            raise RuntimeError(
                "fully_shard keeps the gradients of micro-batches that it has not reduced, whoever clears the parameters' "
                "gradients: finish the window with a micro-batch that it reduces, after window_ends() and outside of "
                "no_sync(), before zero_grad()"
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Don't synchronise within the context."""
        before = self.on
        self.set(False)
        try:
            yield
        finally:
            self.set(before)
