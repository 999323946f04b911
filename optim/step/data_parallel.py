"""Who reduces gradients over the data axes: the optimizer, or torch's data parallelism."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...amp.capture import is_captured
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ...parallel.mesh.value_checks import is_whole
from ..gradients.buckets import Exchange
from ..gradients.reduce_in_backward import BackwardReducer
from ..norm.plan import ParameterEntry
from .window import Window


def check_gradient_reduction(
    modules: Sequence[nn.Module],
    average_data: bool,
    overlap: bool,
    compression: Exchange | None,
    bucket_bytes: int | None,
) -> None:
    """Check the arguments that say how the optimizer itself reduces gradients.

    Args:
        modules: Those of ``data_parallel=``.
    Raises:
        ValueError: One is out of range, or two exclude each other.
        TypeError: ``compression`` is no `Exchange`.
    """
    if overlap and modules:
        raise ValueError(
            f"overlap=True with data_parallel={type(modules[0]).__name__}: the module reduces gradients during backward "
            "itself; leave one out"
        )
    if overlap and not average_data:
        raise ValueError(
            "overlap=True with average_data=False: there is nothing to reduce while backward runs; leave one out"
        )
    if compression is not None and not isinstance(compression, Exchange):
        raise TypeError(f"compression={compression!r}: give an instance of an Exchange, such as Bf16Wire()")
    if bucket_bytes is not None and not is_whole(bucket_bytes, 1):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: give a whole number of bytes >= 1")


class GradSyncController(ABC):
    """Whether gradients are reduced in backward, which only the last micro-batch of a window does.

    Attributes:
        on: Whether the next forward and backward reduce.
        is_ddp: It is torch's `DistributedDataParallel` that does, or Megatron's.
        in_backward: A module averages all gradients over the data axes before backward ends.
        float32_grads: The gradients of half-precision parameters may be float32.
    """

    on = True
    is_ddp = False
    in_backward = False
    float32_grads = True

    def set(self, on: bool) -> None:
        """Whether the next forward and backward reduce."""
        self.on = on

    def expect(self, window: Window) -> None:
        """In managed accumulation the micro-batch that comes next reduces if it is the last one of its window."""
        if window.steps is not None:
            self.set(window.next_is_last)

    @abstractmethod
    def averages(self, window: Window) -> bool:
        """Whether what was to be averaged in the window's backward has been, or will be in `step`; asked at its end.

        Raises:
            RuntimeError: Something has not been reduced, and nobody can reduce it any more.
        """

    def not_captured(self) -> str | None:
        """Return why a step can't be captured in a CUDA graph with it; None: it can be."""
        return None

    def hand_over(self, params: Sequence[Tensor]) -> None:  # noqa: B027 (most leave them there)
        """Let ``params`` have their gradients in ``.grad``, at the end of a window."""

    def clear(self) -> None:  # noqa: B027 (most keep none)
        """Forget the gradients that are kept elsewhere."""

    def check_clearing(self, sync_skipped: bool) -> None:  # noqa: B027 (most can be cleared)
        """Raise RuntimeError if gradients are to be cleared that can't be."""

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """Around the backward of one micro-batch."""
        yield
        window.sync_skipped = not self.on
        self.expect(window)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Don't reduce within the context."""
        before = self.on
        self.set(False)
        try:
            yield
        finally:
            self.set(before)


class OverlappedReduce(GradSyncController):
    """The optimizer's own buckets are reduced while the backward of the last micro-batch of a window runs."""

    def __init__(self, reducer: BackwardReducer) -> None:
        self._reducer = reducer

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """Raises RuntimeError where a backward of the window has reduced already: what it summed would be summed again."""
        if self.on and window.reduced:
            raise RuntimeError(
                "an earlier backward of this window has reduced the gradients already, as overlap=True does in the last "
                "micro-batch: call the others within optimizer.no_sync(), or give accumulation_steps"
            )
        reduces = self.on
        if reduces and is_captured():
            self._reducer.keep_in_place()
        with super().micro_batch(window), self._reducer.micro_batch(window.several) if reduces else nullcontext():
            yield
        window.reduced |= reduces

    def averages(self, window: Window) -> bool:
        """What has not been reduced is reduced in `step`, but not what came to the sum afterwards."""
        if window.reduced:
            self._reducer.check_no_stray()
        return True

    def renew(self, reducer: BackwardReducer) -> None:
        """Leave the parameters alone that were reduced so far, and reduce by another one."""
        self._reducer.remove_hooks()
        self._reducer = reducer


class TorchGradSync(GradSyncController):
    """Turns the gradient synchronisation of torch's data parallelism on and off.

    Args:
        modules: Each a `DistributedDataParallel`, or a module that `fully_shard` was applied to; or a wrapper of one of
            these (``torch.compile``, a framework's). All of one kind; several where a rank has several pipeline stages.
    Raises:
        TypeError: One is neither, or some are one and some the other.
    """

    in_backward = True

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [reducing_module(module) if isinstance(module, nn.Module) else module for module in modules]
        by_ddp = {isinstance(module, DistributedDataParallel) for module in self.modules}
        self.is_ddp = True in by_ddp
        self.float32_grads = not self.is_ddp  # it reduces in the parameters' dtype, and breaks on others
        for given, module in zip(modules, self.modules, strict=True):
            if not isinstance(module, DistributedDataParallel) and not hasattr(module, "set_requires_gradient_sync"):
                raise TypeError(
                    f"data_parallel={type(given).__name__}: give the DistributedDataParallel module, or the root module "
                    "that fully_shard was applied to (a list of them where a rank has several stages of a pipeline); "
                    "leave it out if the optimizer itself averages"
                )
        if len(by_ddp) > 1:
            raise TypeError(
                "data_parallel= has DistributedDataParallel and fully_shard modules: make all stages of a rank data "
                "parallel in the same way"
            )

    def not_captured(self) -> str | None:
        module = type(self.modules[0]).__name__
        return f"data_parallel={module} averages gradients in Python: leave it out, and the optimizer averages them"

    def check_layouts(self, entries: Iterable[ParameterEntry], topology: Topology) -> None:
        """`DistributedDataParallel` averages whatever it has over its group, and divides nothing that it ignores.

        Raises:
            ValueError: It does so though ranks that see different samples hold different pieces of a parameter, as of
                experts.
        """
        large = [axis for axis in topology.data_axes if topology.size(axis) > 1 and self.is_ddp]
        for entry in entries:
            if entry.trained and any(axis in entry.spec.distinct_axes(topology) for axis in large):
                raise ValueError(
                    f"{entry.name} is declared {entry.spec}, of different pieces along a data axis, over which "
                    "DistributedDataParallel would average it, or leave it undivided where it ignores it: leave "
                    "data_parallel out, so that the optimizer reduces gradients by the specs"
                )

    def check_groups(self, registry: ProcessGroupRegistry) -> None:
        """Raise ValueError if a `DistributedDataParallel` averages over other ranks than those of the data axes.

        It copies the parameters of its first rank to all ranks of its group when it is made, and averages gradients over
        them. Over more ranks than the data axes both mix shards; over fewer, gradients stay unaveraged. `fully_shard`
        needs no check here: its mesh is part of the layout of its DTensors.
        """
        for module in self.modules:
            if isinstance(module, DistributedDataParallel):
                check_group(module, module.process_group, registry)

    def set(self, on: bool) -> None:
        """Whether the next forward and backward synchronise."""
        self.on = on
        for module in self.modules:
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = on
            else:
                module.set_requires_gradient_sync(on)  # type: ignore[operator]

    def averages(self, window: Window) -> bool:
        """Not if DDP left the last micro-batch out, for which `step` can make up: what it averaged before is the same on
        all ranks, and stays as it is. Only `fully_shard` itself reduces what it has."""
        if window.sync_skipped and not self.is_ddp:
            raise RuntimeError(
                "fully_shard has not reduced the gradients of this window: it must know the last micro-batch of a window "
                "before its backward. Call window_ends() before the forward of the last one where a window is shorter than "
                "accumulation_steps, and leave it out of no_sync()"
            )
        return not window.sync_skipped

    def check_clearing(self, sync_skipped: bool) -> None:
        """What only `fully_shard` has would add to later gradients."""
        if sync_skipped and not self.is_ddp:
            raise RuntimeError(
                "fully_shard keeps the gradients of micro-batches that it has not reduced, whoever clears the parameters' "
                "gradients: finish the window with a micro-batch that it reduces, after window_ends() and outside of "
                "no_sync(), before zero_grad()"
            )


def check_group(module: nn.Module, group: dist.ProcessGroup, registry: ProcessGroupRegistry) -> None:
    axes = registry.topology.data_axes
    ranks = sorted(dist.get_process_group_ranks(group))
    expected = sorted(registry.ranks(*axes)) if axes else [registry.global_rank]
    if ranks == expected:
        return
    kind, names = type(module).__name__, ", ".join(map(repr, axes)) or "none"
    write = f"process_group=registry.group({names})" if axes else "no DistributedDataParallel"
    raise ValueError(
        f"data_parallel={kind} averages gradients over ranks {ranks}, but this rank's data axes ({names}) have the ranks "
        f"{expected}. It has also copied the parameters of rank {ranks[0]} to all of its ranks, so shards are lost: make "
        f"the model anew, and give {write}"
    )


def find_misplaced_ddp(
    params: Iterable[Tensor], entries: Iterable[ParameterEntry], registry: ProcessGroupRegistry
) -> tuple[str, list[int]] | None:
    """Return a sharded parameter of a `DistributedDataParallel` over ranks with other shards of it, and these ranks.

    All modules of the process are searched, because a `DistributedDataParallel` is not found from its parameters.

    Args:
        params: The model's parameters.
        entries: Their entries in the plan.
    Returns: None if there is no such module. Collectives, host reads: none.
    """
    topology = registry.topology
    replicas = {*topology.peers(registry.global_rank, *topology.data_axes)}
    sharded = {
        id(param): entry.name
        for param, entry in zip(params, entries, strict=True)
        if topology.size(*(axis for axis in entry.spec.distinct_axes(topology) if axis not in topology.data_axes)) > 1
    }
    for module in gc.get_objects() if sharded else ():
        if not issubclass(type(module), DistributedDataParallel):
            continue
        name = next((sharded[id(param)] for param in module.parameters() if id(param) in sharded), None)
        if name is not None and not {*(ranks := dist.get_process_group_ranks(module.process_group))} <= replicas:
            return name, sorted(ranks)
    return None


def modules_in(data_parallel: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """Those that ``data_parallel=`` names; none where the optimizer averages."""
    if data_parallel is None:
        return []
    if isinstance(data_parallel, (list, tuple, nn.ModuleList)):
        return list(data_parallel)
    return [data_parallel]  # type: ignore[list-item]  # one; what is none, its user refuses


def reducing_module(module: nn.Module) -> nn.Module:
    """The module within wrappers that is a `DistributedDataParallel` or has been given to `fully_shard`; the innermost
    where none is."""
    while True:
        wrapped = [module._modules.get(name) for name in ("_orig_mod", "_forward_module")]
        if not isinstance(module, DistributedDataParallel) and not hasattr(module, "set_requires_gradient_sync"):
            wrapped.append(module._modules.get("module"))
        inner = next((found for found in wrapped if found is not None), None)
        if inner is None:
            return module
        module = inner


# Megatron data parallel -----------------------------------------------------------------------------------------------

# Megatron-core's `DistributedDataParallel` as ``data_parallel=``: gradients are kept, and averaged, in its ``main_grad``.
#
#     model = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
#     declare_by_flags(model, registry)
#     optimizer = ParallelOptimizer(adam, registry, data_parallel=model)
#
# `backward` adds up in ``main_grad``, in buffers that are reduced in one piece; `step` lets them be reduced, calls each
# ``main_grad`` the parameter's ``.grad`` for what follows, and makes what else is pending: sums of sequence parallelism,
# tied embeddings. ``finalize_model_grads`` would do that as well, so nobody may call it.


def switch_of(modules: Sequence[nn.Module]) -> TorchGradSync | None:
    """The switch of the modules that average gradients, torch's or Megatron's, whose class is not imported for that; None:
    there are none.

    Raises:
        TypeError: As for `TorchGradSync`, or one of several is Megatron's.
    """
    megatrons = [hasattr(module, "finish_grad_sync") and hasattr(module, "zero_grad_buffer") for module in modules]
    if len(modules) > 1 and any(megatrons):
        raise TypeError("data_parallel= has several modules, and Megatron's DistributedDataParallel: give that alone")
    if not modules:
        return None
    return MegatronGradSync(modules[0]) if megatrons[0] else TorchGradSync(modules)


class MegatronGradSync(TorchGradSync):
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

    def averages(self, window: Window) -> bool:
        """Raises RuntimeError where it is told to reduce while backward runs, and was not told of the last micro-batch."""
        if window.sync_skipped and self._overlap:
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
    def micro_batch(self, window: Window) -> Iterator[None]:
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

    def check_clearing(self, sync_skipped: bool) -> None:
        """All of it can be cleared."""
