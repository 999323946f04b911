"""Megatron-core's `DistributedDataParallel` as ``data_parallel=``: gradients are kept, and averaged, in its ``main_grad``.

    model = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    declare_by_flags(model, registry)
    optimizer = ParallelOptimizer(adam, registry, data_parallel=model)

`backward` adds up in ``main_grad``, in buffers that are reduced in one piece; `step` lets them be reduced, calls each
``main_grad`` the parameter's ``.grad`` for what follows, and makes what else is pending: sums of sequence parallelism, tied
embeddings. ``finalize_model_grads`` would do that as well, so nobody may call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.entries import ParameterEntry
from .data_parallel import DataParallelSwitch, check_group
from .window import Window


def switch_of(modules: Sequence[nn.Module]) -> DataParallelSwitch | None:
    """The switch of the modules that average gradients, torch's or Megatron's, whose class is not imported for that; None:
    there are none.

    Raises:
        TypeError: As for `DataParallelSwitch`, or one of several is Megatron's.
    """
    megatrons = [hasattr(module, "finish_grad_sync") and hasattr(module, "zero_grad_buffer") for module in modules]
    if len(modules) > 1 and any(megatrons):
        raise TypeError("data_parallel= has several modules, and Megatron's DistributedDataParallel: give that alone")
    if not modules:
        return None
    return MegatronSwitch(modules[0]) if megatrons[0] else DataParallelSwitch(modules)


class MegatronSwitch(DataParallelSwitch):
    """Its buffers are reduced at the end of a window, whatever backward was told; with ``overlap_grad_reduce`` while the
    backward of the last micro-batch runs.

    Args:
        module: Megatron's `DistributedDataParallel`.
    Raises:
        ValueError: Its config asks for what would be done twice, or for sums where means are taken.
    """

    is_ddp, in_backward = True, False  # in hand_over, without overlap

    def __init__(self, module: nn.Module) -> None:
        self.module, self.modules = module, [module]
        config: Any = module.ddp_config
        self._overlap, self.float32_grads = config.overlap_grad_reduce, config.grad_reduce_in_fp32
        wrong = [
            f"{name}=True: {instead}"
            for name, instead, value in (
                (
                    "use_distributed_optimizer",
                    "give states=Sharded('data') in its place",
                    config.use_distributed_optimizer,
                ),
                (
                    "calculate_per_token_loss",
                    "leave it False, and give the number of tokens to backward(loss, weight=...)",
                    getattr(module.config, "calculate_per_token_loss", False),
                ),
            )
            if value
        ]
        if wrong:
            raise ValueError(f"data_parallel={type(module).__name__} of Megatron with {'; '.join(wrong)}")

    def check_groups(self, registry: ProcessGroupRegistry) -> None:
        """Raise ValueError if the buffers of parameters that are no experts are averaged over other ranks than those of the
        data axes."""
        group = getattr(self.module, "dp_cp_group", None)
        if group is not None:
            check_group(self.module, group, registry)

    def check_layouts(self, entries: Iterable[ParameterEntry], topology: Topology) -> None:
        """Any: experts have buffers of their own, over their own groups."""

    def set(self, on: bool) -> None:
        self.on = on
        for group in (*self.module.bucket_groups, *self.module.expert_parallel_bucket_groups):  # type: ignore[misc]
            group.is_last_microbatch = on

    def averages(self, window: Window[Any, Any]) -> bool:
        """Raises RuntimeError where it is told to reduce while backward runs, and was not told of the last micro-batch."""
        if window.left_out and self._overlap:
            raise RuntimeError(
                "overlap_grad_reduce=True has not reduced the gradients of this window: call window_ends() before the "
                "forward of the last micro-batch where a window is shorter than accumulation_steps, and leave it out of "
                "no_sync()"
            )
        return True

    def hand_over(self, params: Sequence[Tensor]) -> None:
        """Collectives: an all-reduce a buffer over the data ranks, and over those of experts."""
        self.module.finish_grad_sync()  # type: ignore[operator]
        for param in params:
            if hasattr(param, "main_grad"):
                param.grad = param.main_grad.detach()  # each time another: masters know by it what they have taken

    @contextmanager
    def micro_batch(self, window: Window[Any, Any]) -> Iterator[None]:
        """What was handed over is taken away first, or it would be added to itself."""
        self._take_away()
        with super().micro_batch(window):
            yield

    def clear(self) -> None:
        self._take_away()
        self.module.zero_grad_buffer()  # type: ignore[operator]

    def _take_away(self) -> None:
        for param in self.module.parameters():
            if hasattr(param, "main_grad"):
                param.grad = None

    def check_clearing(self, left_out: bool) -> None:
        """All of it can be cleared."""
