"""Controllers of gradient averaging over data-parallel axes, by this library or by a module of torch or Megatron."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, cast, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...amp.capture import is_captured
from ...parallel.interop.local_parameters import fully_sharded, has_aborted_backward, has_dtensors
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ...parallel.mesh.value_checks import is_whole
from ..gradients.buckets import CommHook
from ..gradients.fixed_order import FixedOrderSum
from ..gradients.reduce_in_backward import BackwardReducer
from ..norm.plan import ParameterEntry
from .window import Window


def check_gradient_reduction(
    modules: Sequence[nn.Module],
    average_data: bool,
    overlap: bool,
    compression: CommHook | None,
    bucket_bytes: int | None,
    sum_order: SumOrder,
    accumulation_steps: int | None,
) -> None:
    """Check the arguments of `ParallelOptimizer` for gradient reduction. ``modules`` are those in ``data_parallel=``."""
    if overlap and modules:
        raise ValueError(
            f"overlap=True with data_parallel={type(modules[0]).__name__}: the module reduces gradients during backward "
            "itself; leave overlap=True out, or leave data_parallel out and don't wrap the model"
        )
    if overlap and not average_data:
        raise ValueError(
            "overlap=True with average_data=False: other code averages the gradients, so backward has none to reduce; "
            "leave out one of the two arguments"
        )
    if compression is not None and not isinstance(compression, CommHook):
        raise TypeError(f"compression={compression!r}: give an instance of a CommHook, such as Bf16Compression()")
    if bucket_bytes is not None and not is_whole(bucket_bytes, 1):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: give a whole number of bytes >= 1")
    if sum_order not in get_args(SumOrder):
        raise ValueError(f"sum_order={sum_order!r}: give 'any' or 'fixed'")
    if sum_order == "fixed":
        given = {
            "data_parallel=...": (bool(modules), "leave data_parallel out and don't wrap the model"),
            "average_data=False": (not average_data, "remove average_data=False and the code that averages gradients"),
            "overlap=True": (overlap, "leave overlap out"),
            "compression=...": (compression is not None, "leave compression out"),
        }
        for argument, (is_given, instead) in given.items():
            if is_given:
                raise ValueError(
                    f"{argument} with sum_order='fixed', with which the optimizer itself sums uncompressed gradients after "
                    f"the last backward: leave sum_order='fixed' out, or {instead}"
                )
        if accumulation_steps is None:
            raise ValueError(
                "sum_order='fixed' must know the number of micro-batches per step: give accumulation_steps=1, or more"
            )


SumOrder = Literal["any", "fixed"]
"""The order of sums of gradients over micro-batches and data ranks. "any": the fastest order. "fixed": an order in which
the sum does not depend on how many data ranks share the micro-batches of a window."""


def check_fixed_order(params: Iterable[tuple[ParameterEntry, Tensor]], topology: Topology) -> None:
    """Raise ValueError if the gradient of a trained parameter can't be summed with ``sum_order="fixed"``."""
    for entry, param in params:
        if entry.trained and has_dtensors((param,)):
            raise ValueError(
                f"{entry.name} is a DTensor, and sum_order='fixed' sums gradients of plain tensors only: leave "
                "sum_order='fixed' out, or use plain tensors with declared layouts"
            )
        over = [axis for axis in topology.data_axes if axis in entry.spec.named_axes or axis in entry.averaged]
        if entry.trained and over:
            raise ValueError(
                f"the spec {entry.spec} of {entry.name} contains the data axis {over[0]!r}, but sum_order='fixed' supports "
                "only parameters that are replicated over data axes: leave out sum_order='fixed', or replicate the "
                "parameter and declare a spec without data axes"
            )


class GradSyncController(ABC):
    """A controller that turns gradient reduction in backward on and off.

    With ``accumulation_steps``, reduction is on only for the last micro-batch of an accumulation window.

    Attributes:
        on: True if the next backward may reduce gradients. `set` changes it.
        is_ddp: True if torch's or Megatron's `DistributedDataParallel` reduces gradients.
        in_backward: True if a data-parallel module averages all gradients over data-parallel axes before backward ends.
        float32_grads: True if half-precision parameters may have float32 gradients.
        completes_failed_backward: True if `micro_batch` issues all of its collectives even if its body raises.
    """

    completes_failed_backward = False
    on = True
    is_ddp = False
    in_backward = False
    float32_grads = True

    def set(self, on: bool) -> None:
        """Set whether the next backward reduces gradients. Call it before the forward."""
        self.on = on

    def expect(self, window: Window) -> None:
        """With ``accumulation_steps``, turn reduction on if the next micro-batch is the window's last one, else off."""
        if window.steps is not None:
            self.set(window.next_is_last)

    @abstractmethod
    def averages(self, window: Window) -> bool:
        """Return False if a data-parallel module did not average the window's gradients, so that `step` must do it.

        Call it at the end of a window. If the gradients can't be reduced correctly any more, it raises RuntimeError.
        """

    def not_captured(self) -> str | None:
        """Return the reason why a CUDA graph can't capture a step with this controller; None (default) if it can."""
        return None

    def hand_over(self, params: Sequence[Tensor]) -> None:  # noqa: B027 (optional to override)
        """Put the gradients of ``params`` into ``.grad`` at the end of a window."""

    def clear(self) -> None:  # noqa: B027 (optional to override)
        """Clear gradients that the module keeps outside ``.grad``. Default: no effect."""

    def check_clearing(self, sync_skipped: bool) -> None:  # noqa: B027 (optional to override)
        """Raise RuntimeError if the module keeps gradients that `zero_grad` can't clear. Default: no error."""

    def discard_old_weights(self) -> None:  # noqa: B027 (optional to override)
        """Free copies of the weights that a module made before an update. Default: no effect."""

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """Return a context manager around one micro-batch. On exit without an error it calls `expect`."""
        yield
        window.sync_skipped = not self.on
        self.expect(window)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context manager in which backward does not reduce gradients. Run forward and backward within it."""
        before = self.on
        self.set(False)
        try:
            yield
        finally:
            self.set(before)


class OverlappedReduce(GradSyncController):
    """The controller for ``overlap=True``: gradient buckets are reduced in the backward of a window's last micro-batch."""

    completes_failed_backward = True

    def __init__(self, reducer: BackwardReducer) -> None:
        self._reducer = reducer

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """Return a context manager around the backward of one micro-batch."""
        if self.on and window.reduced:
            raise RuntimeError(
                "an earlier backward has already reduced the gradients of this step, as overlap=True does in each backward "
                "outside of optimizer.no_sync(): run all micro-batches except the last within `with optimizer.no_sync():`, "
                "or give ParallelOptimizer accumulation_steps="
            )
        reduces = self.on
        if reduces and is_captured():
            self._reducer.keep_in_place()
        try:
            with super().micro_batch(window), self._reducer.micro_batch(window.several) if reduces else nullcontext():
                yield
        finally:
            window.reduced |= reduces

    def averages(self, window: Window) -> bool:
        """Return True, because `step` reduces the gradients that backward has not reduced."""
        if window.reduced:
            self._reducer.check_no_stray()
        return True

    def renew(self, reducer: BackwardReducer) -> None:
        self._reducer.remove_hooks()
        self._reducer = reducer


class FixedOrderSync(GradSyncController):
    """The controller for ``sum_order="fixed"``: gradients are summed over micro-batches and data ranks in a fixed order.

    It takes each micro-batch's gradients out of the parameters, and sets the sums at the end of the window.
    """

    def __init__(self, total: FixedOrderSum) -> None:
        self._total = total

    def set(self, on: bool) -> None:
        """Do nothing: this controller always sums gradients at the end of the window."""

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """Return a context manager around one micro-batch."""
        window.reduced = True
        if window.micro_batches == 1:
            self._total.clear()
        if any(param.grad is not None for param in self._total.params):
            raise RuntimeError(
                "parameters have gradients before the backward of a micro-batch: with sum_order='fixed' call zero_grad() "
                "after each step, without set_to_none=False, and optimizer.backward(loss) for each micro-batch"
            )
        with super().micro_batch(window):
            yield
        self._total.take()

    def averages(self, window: Window) -> bool:
        return True

    def hand_over(self, params: Sequence[Tensor]) -> None:
        """Set gradients to sums over the micro-batches of all data ranks, or give slices of sums to buckets."""
        self._total.finish()

    def clear(self) -> None:
        self._total.clear()

    def not_captured(self) -> str:
        return "sum_order='fixed' sums gradients in Python: leave it out"

    def renew(self, total: FixedOrderSum) -> None:
        self._total = total


class TorchGradSync(GradSyncController):
    """The controller for torch's data-parallel modules, `DistributedDataParallel` (DDP) and `fully_shard`.

    Modules may be inside wrappers (``torch.compile``, a framework's wrapper), and all must be of one kind. A rank with
    several pipeline stages has several modules.
    """

    in_backward = True
    float32_grads_advice: ClassVar[str] = (
        "which DistributedDataParallel does not make: leave data_parallel out and don't wrap the model, so that the "
        "optimizer averages over the data axes itself"
    )
    """Second part of an error that is raised if float32 gradients are needed and `float32_grads` is False."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list[nn.Module]()
        for given in modules:
            module = reducing_module(given) if isinstance(given, nn.Module) else given
            if type(module).__name__ == "FullyShardedDataParallel":
                raise TypeError(
                    "data_parallel=FullyShardedDataParallel (FSDP1) is not supported: shard the model with "
                    "torch.distributed.fsdp.fully_shard instead, and give its root module"
                )
            if not isinstance(module, DistributedDataParallel) and not hasattr(module, "set_requires_gradient_sync"):
                raise TypeError(
                    f"data_parallel={type(given).__name__}: give the DistributedDataParallel module, or the root module "
                    "that fully_shard was applied to (a list of them if a rank has several pipeline stages); "
                    "leave data_parallel= out if the optimizer averages gradients itself"
                )
            self.modules.append(module)
        by_ddp = {isinstance(module, DistributedDataParallel) for module in self.modules}
        self.is_ddp = True in by_ddp
        self.float32_grads = not self.is_ddp  # DDP fails if a gradient has another dtype than its parameter
        if len(by_ddp) > 1:
            raise TypeError(
                "data_parallel= has DistributedDataParallel and fully_shard modules: make all stages of a rank data "
                "parallel in the same way"
            )

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        """Return a context manager around one micro-batch."""
        if not self.is_ddp and any(map(has_aborted_backward, self.modules)):
            raise RuntimeError(
                "an earlier backward raised within a fully_shard module, and torch no longer reduces all gradients of such "
                "a module: call reset_iter_state() of the root module (torch 2.14 or later) and optimizer.zero_grad() on "
                "every rank; or build the model and the optimizer again, and load a checkpoint"
            )
        with super().micro_batch(window):
            yield

    @cached_property
    def _fully_sharded(self) -> list[Any]:
        return [] if self.is_ddp else [inner for module in self.modules for inner in fully_sharded(module)]

    def discard_old_weights(self) -> None:
        """Free the gathered parameters of `fully_shard` modules.

        A forward without a backward, such as an evaluation, may have left them. The next forward would use them, although
        the update changed the shards.
        """
        for module in self._fully_sharded:
            module.reshard()

    def not_captured(self) -> str | None:
        module = type(self.modules[0]).__name__
        return (
            f"data_parallel={module} averages gradients in Python: leave it out and don't wrap the model, and the "
            "optimizer averages them"
        )

    def check_layouts(self, entries: Iterable[ParameterEntry], topology: Topology) -> None:
        """Raise ValueError if a data axis shards a trained parameter (such as an expert) and the module is DDP.

        `DistributedDataParallel` (DDP) averages all gradients over its process group, so it would average gradients of
        different shards. If the user makes DDP ignore the parameter, its gradient is not divided by the number of data
        ranks.
        """
        large = [axis for axis in topology.data_axes if topology.size(axis) > 1 and self.is_ddp]
        for entry in entries:
            if entry.trained and any(axis in entry.spec.distinct_axes(topology) for axis in large):
                raise ValueError(
                    f"{entry.name} is declared {entry.spec}, with different shards along a data axis, so "
                    "DistributedDataParallel must not average its gradient: do not wrap the model in "
                    "DistributedDataParallel, and leave data_parallel out, so that the optimizer reduces gradients by the "
                    "specs"
                )

    def check_members(self, params: Iterable[tuple[ParameterEntry, Tensor]], topology: Topology) -> None:
        """Raise ValueError if a `DistributedDataParallel` (DDP) does not reduce the gradient of a trained parameter.

        DDP reduces the gradients of the parameters that the model had when DDP was made. Parameters that the user makes
        DDP ignore are accepted. With ``device_mesh=``, DDP may replace parameters, so nothing is checked.
        """
        modules = [module for module in self.modules if isinstance(module, DistributedDataParallel)]
        if topology.size(*topology.data_axes) == 1 or any(hasattr(module, "device_mesh") for module in modules):
            return
        known: set[int] = set()
        for module in modules:
            known.update(map(id, (*module._module_parameters, *module._delay_all_reduce_params)))
            ignored, named = module.parameters_to_ignore, module.module.named_parameters()
            known.update(id(param) for name, param in named if name in ignored)
        for entry, param in params if modules else ():
            if entry.trained and id(param) not in known:
                raise ValueError(
                    f"{entry.name} is not in the DistributedDataParallel in data_parallel=, so its gradient would not be "
                    "averaged, and replicas would diverge. Wrap the model with DistributedDataParallel after its last "
                    "change (a new head, an adapter), and create the optimizers after that. If other code averages this "
                    "gradient, give average_data=False"
                )

    def check_groups(self, registry: ProcessGroupRegistry) -> None:
        """Raise ValueError if the process group of a `DistributedDataParallel` (DDP) is not the group of the data axes.

        With ranks outside the data axes, DDP would overwrite their shards with those of its first rank, and average
        gradients of different shards. `fully_shard` needs no check, because its DTensors contain its mesh.
        """
        for module in self.modules:
            if isinstance(module, DistributedDataParallel):
                check_group(module, module.process_group, registry)

    def set(self, on: bool) -> None:
        self.on = on
        for module in self.modules:
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = on
            else:
                cast(Any, module).set_requires_gradient_sync(on)

    def averages(self, window: Window) -> bool:
        """Return False if DDP did not reduce gradients in the last micro-batch, so that `step` must average them.

        Gradients that DDP averaged in earlier micro-batches are equal on all ranks; averaging again changes them by
        rounding only.
        """
        if window.sync_skipped and not self.is_ddp:
            raise RuntimeError(
                "fully_shard has not reduced the gradients of this step, because it was not told before the last "
                "micro-batch to do so. Run the last micro-batch outside of no_sync(); if a step has fewer micro-batches "
                "than accumulation_steps, also call optimizer.mark_last_micro_batch() before the forward of the last one"
            )
        return not window.sync_skipped

    def check_clearing(self, sync_skipped: bool) -> None:
        if sync_skipped and not self.is_ddp:
            raise RuntimeError(
                "fully_shard has gradients that it has not reduced yet, which can't be cleared and would be added to later "
                "gradients: before zero_grad() or loading a state, call optimizer.mark_last_micro_batch() and run one more "
                "micro-batch outside of no_sync(), so that fully_shard reduces these gradients"
            )


def check_group(module: nn.Module, group: dist.ProcessGroup, registry: ProcessGroupRegistry) -> None:
    """Raise ValueError if ``group``, over which ``module`` averages gradients, is not the group of the data axes."""
    axes = registry.topology.data_axes
    ranks = sorted(dist.get_process_group_ranks(group))
    expected = sorted(registry.ranks(*axes)) if axes else [registry.global_rank]
    if ranks == expected:
        return
    kind, names = type(module).__name__, ", ".join(map(repr, axes)) or "none"
    if not isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"data_parallel={kind} of Megatron averages gradients over ranks {ranks}, but this rank's data axes ({names}) "
            f"have the ranks {expected}: create the registry with meshstep.parallel.interop.megatron.registry_of()"
        )
    text = (
        f"data_parallel={kind} averages gradients over ranks {ranks}, but this rank's data axes ({names}) have the ranks "
        f"{expected}"
    )
    wrapper = f"DistributedDataParallel(..., process_group=registry.group({names}))"
    if set(ranks) <= set(expected):
        raise ValueError(f"{text}, so replicas on the other ranks would diverge: wrap the model with {wrapper}")
    write = f"wrap it with {wrapper}" if axes else "don't wrap it with DistributedDataParallel"
    raise ValueError(
        f"{text}. {kind} has also copied the parameters of rank {ranks[0]} to all of these ranks, so shards are lost: "
        f"build the model again, and {write}"
    )


def find_misplaced_ddp(
    params: Iterable[tuple[ParameterEntry, Tensor]], registry: ProcessGroupRegistry
) -> tuple[str, list[int]] | None:
    """Find a `DistributedDataParallel` (DDP) module over ranks that hold different shards of one of its parameters.

    Return the parameter's name and the ranks of the DDP's process group. The function searches all modules of the
    process, because a parameter has no reference to its DDP module. Parameters that the DDP ignores are accepted.
    """
    topology = registry.topology
    sharded: dict[int, tuple[str, tuple[str, ...]]] = {}
    for entry, param in params:
        distinct = entry.spec.distinct_axes(topology)
        if topology.size(*distinct) > 1:
            sharded[id(param)] = entry.name, tuple(axis for axis in topology.data_axes if axis not in distinct)
    replicas = cache(lambda axes: {*topology.peers(registry.global_rank, *axes)})
    classes = _with_subclasses(DistributedDataParallel)
    # There can be millions of objects, and a lookup in a set of classes is faster than isinstance.
    objects: list[object] = gc.get_objects() if sharded else []
    for module in objects:
        if type(module) not in classes or not isinstance(module, DistributedDataParallel):
            continue
        try:
            ranks = dist.get_process_group_ranks(module.process_group)
        except KeyError:  # the process group was destroyed, so the module can't be used any more
            continue
        # Set by torch's DistributedDataParallel._set_params_and_buffers_to_ignore_for_model.
        ignored = getattr(module.module, "_ddp_params_and_buffers_to_ignore", ())
        for path, submodule in module.module.named_modules():
            for attribute, param in submodule.named_parameters(recurse=False):
                # torch looks up ".weight" for the outermost module's own parameters, so it never ignores these.
                if id(param) not in sharded or f"{path}.{attribute}" in ignored:
                    continue
                name, replicated = sharded[id(param)]
                if not {*ranks} <= replicas(replicated):
                    return name, sorted(ranks)
    return None


def _with_subclasses(base: type[object]) -> set[type[object]]:
    classes = {base}
    for subclass in base.__subclasses__():
        classes |= _with_subclasses(subclass)
    return classes


def modules_in(data_parallel: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    if data_parallel is None:
        return []
    if isinstance(data_parallel, (list, tuple, nn.ModuleList)):
        return list(data_parallel)
    return [cast(nn.Module, data_parallel)]  # the type is checked by `TorchGradSync`


def reducing_module(module: nn.Module) -> nn.Module:
    """Return the `DistributedDataParallel` or `fully_shard` module inside wrappers; without one, the innermost module."""
    while True:
        wrapped = [module._modules.get(name) for name in ("_orig_mod", "_forward_module")]
        if not isinstance(module, DistributedDataParallel) and not hasattr(module, "set_requires_gradient_sync"):
            wrapped.append(module._modules.get("module"))
        inner = next((found for found in wrapped if found is not None), None)
        if inner is None:
            return module
        module = inner


# Megatron data parallel -----------------------------------------------------------------------------------------------

# Megatron-core's `DistributedDataParallel` as ``data_parallel=``: it accumulates and averages gradients in ``main_grad``.
#
#     model = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
#     declare_by_flags(model, registry)
#     optimizer = ParallelOptimizer(adam, registry, data_parallel=model)
#
# The ``main_grad`` tensors are views of buffers, which collectives reduce. `step` finishes these reductions,
# aliases ``.grad`` to ``main_grad``, and reduces the remaining partial gradients (sequence parallelism, tied embeddings).
# Don't call ``finalize_model_grads``: it would reduce the remaining partial gradients a second time.


def switch_of(modules: Sequence[nn.Module]) -> TorchGradSync | None:
    """Return the controller for torch's or Megatron's data-parallel modules; None if ``modules`` is empty."""
    megatrons = [hasattr(module, "finish_grad_sync") and hasattr(module, "zero_grad_buffer") for module in modules]
    if len(modules) > 1 and any(megatrons):
        raise TypeError(
            "data_parallel= has several modules, including a DistributedDataParallel of Megatron; with Megatron, give "
            "only one module"
        )
    if not modules:
        return None
    return MegatronGradSync(modules[0]) if megatrons[0] else TorchGradSync(modules)


class MegatronGradSync(TorchGradSync):
    """The controller for Megatron's `DistributedDataParallel`: its gradient buffers are reduced at the end of a window.

    With Megatron's ``overlap_grad_reduce``, the buffers are reduced while the backward of the last micro-batch runs.
    The module's config must not enable a feature that this library provides, nor sum gradients instead of averaging.
    """

    is_ddp, in_backward = True, False  # without overlap the reduction runs in `hand_over`
    float32_grads_advice = (
        "which Megatron's DistributedDataParallel only makes with grad_reduce_in_fp32=True: set this option in its "
        "DistributedDataParallelConfig"
    )

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module  # the class of Megatron, which is not imported
        self.modules = [module]
        config: Any = module.ddp_config
        self._overlap, self.float32_grads = config.overlap_grad_reduce, config.grad_reduce_in_fp32
        wrong = []
        if config.use_distributed_optimizer:
            wrong.append("use_distributed_optimizer=True: give states=Sharded('data') instead")
        if getattr(module.config, "calculate_per_token_loss", False):
            wrong.append(
                "calculate_per_token_loss=True: leave it False, and give the number of tokens to backward(loss, weight=...)"
            )
        if wrong:
            raise ValueError(f"{type(module).__name__} of Megatron has an unsupported setting: {'; '.join(wrong)}")

    def check_groups(self, registry: ProcessGroupRegistry) -> None:
        """Raise ValueError if Megatron averages gradient buffers over other ranks than those of the data axes.

        Buffers of experts, and modules without ``dp_cp_group``, are not checked.
        """
        group = getattr(self.module, "dp_cp_group", None)
        if group is not None:
            check_group(self.module, group, registry)

    def check_layouts(self, entries: Iterable[ParameterEntry], topology: Topology) -> None:
        """Accept all layouts: Megatron gives experts separate buffers and process groups."""

    def set(self, on: bool) -> None:
        self.on = on
        for group in (*self.module.bucket_groups, *self.module.expert_parallel_bucket_groups):
            group.is_last_microbatch = on

    def averages(self, window: Window) -> bool:
        """Return True. Raises RuntimeError if ``overlap_grad_reduce`` is set and the last micro-batch was not reduced."""
        if window.sync_skipped and self._overlap:
            raise RuntimeError(
                "Megatron's DistributedDataParallel with overlap_grad_reduce=True has not reduced the gradients of this "
                "step. Run the last micro-batch outside of no_sync(); if a step has fewer micro-batches than "
                "accumulation_steps, also call optimizer.mark_last_micro_batch() before the forward of the last one"
            )
        return True

    def hand_over(self, params: Sequence[Tensor]) -> None:
        self.module.finish_grad_sync()
        for param in params:
            if hasattr(param, "main_grad"):
                # `detach` makes a new tensor object per window, by which master weights detect a new gradient.
                param.grad = param.main_grad.detach()

    @contextmanager
    def micro_batch(self, window: Window) -> Iterator[None]:
        self._take_away()
        with super().micro_batch(window):
            yield

    def clear(self) -> None:
        self._take_away()
        self.module.zero_grad_buffer()

    def _take_away(self) -> None:
        for param in self.module.parameters():
            if hasattr(param, "main_grad"):
                param.grad = None

    def check_clearing(self, sync_skipped: bool) -> None:
        """Do nothing, because Megatron's buffers can always be cleared."""
