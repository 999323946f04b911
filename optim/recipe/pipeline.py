"""`Pipeline`, which runs a schedule of `torch.distributed.pipelining` within the optimizer's accumulation window.

    stage = PipelineStage(chunk, index, stages, device, group=registry.group("pipe"))
    pipeline = Pipeline(Schedule1F1B(stage, 4, loss_fn=criterion), optimizer)
    for inputs, targets in loader:  # the same lines on every rank
        optimizer.zero_grad()
        loss = pipeline.backward(inputs, target=targets)
        optimizer.step()

The schedule calls backward itself. With ``scale_grads=True``, torch then divides each stage's gradients by the number
of micro-batches. This division is wrong in three cases:

* The gradient of a parameter that two stages of a rank share (a tied embedding in a V-shaped schedule) is divided twice.
* Gradients of an earlier call in the same accumulation window (since the last step) are divided again.
* Gradients that backward has already moved into shards (``Sharded(gradients=True)``) are not divided.

So `Pipeline` turns ``scale_grads`` off, and divides each loss by the number of micro-batches before its backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...parallel.interop.local_parameters import discard_gathered, fully_sharded
from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..build import check_is_parallel
from ..parallel_optimizer import ParallelOptimizer
from ..step.data_parallel import TorchGradSync, reducing_module

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Pipeline:
    """Runs forward and backward of a pipeline schedule, with the loss scale and gradient reduction of the optimizer.

        pipeline = Pipeline(schedule, optimizer)
        loss = pipeline.backward(inputs, target=targets)    # on every rank; None except on the last stage
        optimizer.step()

    The schedule's loss function is prepared for the precision mode. If the schedule was created with
    ``scale_grads=True``, torch's default, the loss function must return the mean over a micro-batch. The loss of a call
    of `backward` is then the mean over all micro-batches. With ``scale_grads=False``, the loss function must return a
    sum. Then pass `backward` the number by which the sum is divided, as ``weight=``.

    Args:
        schedule: A schedule of `torch.distributed.pipelining` with a ``loss_fn``. Its loss function and ``scale_grads``
            are replaced. The modules of its stages may be sharded over model axes, or by `fully_shard`. With
            `fully_shard`, create the optimizer with ``data_parallel=[...]``, a list of this rank's stage modules. If
            two stages of a rank share a parameter, exclude it from sharding (``ignored_params=``). Zero-bubble
            schedules compute the gradients of weights later than the gradients of inputs. For these schedules,
            ``reshard_after_forward`` is set to False, so gathered weights are kept during a call.
        optimizer: The optimizer of the stages' parameters.

    Raises:
        TypeError: On every rank: ``schedule`` is not a schedule of `torch.distributed.pipelining`. On this rank:
            ``optimizer`` is not a `ParallelOptimizer`.
        ValueError: On every rank: the schedule has no loss function, or its stages don't communicate over the mesh's
            pipeline axes. Or a stage of a zero-bubble schedule is in `DistributedDataParallel`, which would never
            average the gradients of weights.

    Collectives: an object all-gather in the constructor.

    Attributes:
        schedule: The pipeline schedule.
        optimizer: The optimizer of the stages' parameters.
        modules: The modules of this rank's stages, in the schedule's order.
    """

    def __init__(self, schedule: Schedule, optimizer: ParallelOptimizer[Any]) -> None:
        check_is_parallel(optimizer)
        on_all_ranks(lambda: check_pipeline(schedule, optimizer.registry), optimizer.registry)
        self.schedule, self.optimizer, self.modules = schedule, optimizer, modules_of(schedule)
        self._is_first, self._is_last = (
            any(getattr(s, end) for s in _stages(schedule)) for end in ("is_first", "is_last")
        )
        self._loss = _Loss(schedule, optimizer)
        if _computes_in_two(schedule):
            _keep_whole(self.modules)
        # torch has no public way to change these attributes of an existing schedule.
        schedule._loss_fn, schedule.scale_grads = self._loss, False

    def backward(
        self, *args: Any, target: Any = None, weight: float | Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Run forward and backward of all micro-batches of the schedule, and return the loss on the last stage.

        For ``accumulation_steps`` of the optimizer, a call counts as one micro-batch. Every rank must call it. Ranks with
        the same data coordinate must pass the same samples. Only the first stage uses ``args``, and only the last stage
        uses ``target``. `DistributedDataParallel` and `fully_shard` reduce gradients at the end of every call.

        Args:
            *args, **kwargs: Arguments of the schedule's ``step``, which splits tensors along dim 0 into micro-batches.
            target: Second argument of the loss function, split in the same way. Default: None.
            weight: The number of items, such as tokens, whose losses are summed. Only with ``scale_grads=False``. 0: the
                call adds nothing to the gradients. None (default): the sum is not divided.
        Returns:
            On ranks of the last stage, the mean of the micro-batches' unscaled losses, or their sum with
                ``scale_grads=False``: 0-dim, detached. None on other ranks.

        Raises:
            ValueError: A tensor can't be split into equal micro-batches, or ``weight`` is given although the losses are
                means. Other errors as in `ParallelOptimizer.window`.

        Collectives: issued by the schedule, and all reductions of gradients during backward: by the model's layers,
            `DistributedDataParallel`, `fully_shard`, `Sharded`, and ``overlap=True``.
        Host synchronization: only by the schedule, whose first call may exchange shapes.
        """
        self._check_even([*args, *kwargs.values(), target])
        if weight is not None and self._loss.is_mean:
            raise ValueError(
                "weight= divides a sum of losses, and this schedule's loss_fn returns means; leave weight= out, or return "
                "sums and create the schedule with scale_grads=False"
            )
        if isinstance(self.optimizer.grad_sync, TorchGradSync):
            self.optimizer.mark_last_micro_batch()
        with self.optimizer.window(weight=weight):
            return self._run(self.schedule.step, args, target, {**kwargs, "return_outputs": False})

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor | None:
        """Run forward only, without gradients, and return the loss on the last stage. Every rank must call it.

        Args:
            *args, **kwargs: Arguments of the schedule's ``eval``, which splits tensors along dim 0 into micro-batches.
            target: Second argument of the loss function, split in the same way. Default: None.
        Returns:
            On ranks of the last stage, the mean of the micro-batches' losses, or their sum with ``scale_grads=False``:
                0-dim. None on other ranks.

        Raises:
            ValueError: A tensor can't be split into equal micro-batches.

        Collectives: issued by the schedule and by the model, such as the all-gathers of `fully_shard`.
        """
        self._check_even([*args, *kwargs.values(), target])
        with _forward_only(self.schedule):
            loss = self._run(self.schedule.eval, args, target, kwargs)
        for stage in self.modules:
            discard_gathered(stage)  # fully_shard keeps gathered weights for a backward; an evaluation has none
        # torch creates receive buffers in the first call. An evaluation creates them without requires_grad, which
        # training needs.
        for info in (info for s in _stages(self.schedule) for infos in s.args_recv_info.values() for info in infos):
            if isinstance(buffer := getattr(info, "buffer", None), Tensor) and buffer.is_floating_point():
                buffer.requires_grad_()
        return loss

    def _run(self, run: Callable[..., Any], args: Sequence[Any], target: Any, kwargs: dict[str, Any]) -> Tensor | None:
        losses: list[Tensor] = []
        self._loss.given.clear()
        run(*(args if self._is_first else ()), target=target if self._is_last else None, losses=losses, **kwargs)
        total = self._loss.total(losses) if self._is_last else None
        self._loss.given.clear()
        return total

    def _check_even(self, values: Sequence[Any]) -> None:
        """Raise ValueError unless the tensors in ``values`` can be split into micro-batches of equal size.

        A smaller micro-batch would have the same weight in the mean loss, and would not fit the schedule's buffers. If
        the schedule has chunk specs, sizes are not checked.
        """
        parts = self.schedule._n_microbatches
        if self.schedule._args_chunk_spec is not None or self.schedule._kwargs_chunk_spec is not None:
            return  # the user's chunk specs decide how tensors are split
        for value in values:
            if isinstance(value, Tensor) and (value.dim() == 0 or value.size(0) % parts):
                raise ValueError(
                    f"a tensor of shape {tuple(value.shape)} can't be split into {parts} equal micro-batches along dim 0; "
                    f"give a multiple of {parts} samples (drop_last=True). If the samples are not along dim 0, create the "
                    "schedule with chunk specs"
                )

    def __repr__(self) -> str:
        stages = ", ".join(str(stage.stage_index) for stage in _stages(self.schedule))
        return (
            f"Pipeline({type(self.schedule).__name__}, stages {stages} of {_stages(self.schedule)[0].num_stages} here)"
        )


class _Loss:
    """A wrapper of a schedule's loss function that scales losses for backward.

    A loss is multiplied by the loss scale. If the schedule was created with ``scale_grads=True``, the loss is also
    divided by the number of micro-batches. In an evaluation, the loss is returned unchanged.

    `given` has (scaled loss, unscaled loss) of each micro-batch of the current call, by the id of the scaled loss.
    """

    def __init__(self, schedule: Schedule, optimizer: ParallelOptimizer[Any]) -> None:
        self._schedule, self._optimizer = schedule, optimizer
        self.given: dict[int, tuple[Tensor, Tensor]] = {}
        given: Any = schedule._loss_fn
        # If it was wrapped for an earlier optimizer, its criterion is already prepared for that optimizer's precision mode.
        is_wrapped, precision = isinstance(given, _Loss), optimizer.precision
        self.criterion: Callable[..., Tensor] = given.criterion if is_wrapped else precision.prepare_criterion(given)
        self.is_mean: bool = given.is_mean if is_wrapped else schedule.scale_grads

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = self.criterion(*args, **kwargs)
        if not self._schedule._has_backward:
            return loss
        scaled = self._optimizer.scale_loss(loss)
        if self.is_mean:
            scaled = scaled / self._schedule._n_microbatches
        self.given[id(scaled)] = scaled, loss.detach()
        return scaled

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean, or with ``scale_grads=False`` the sum, of the unscaled losses of a call."""
        plain = torch.stack([self.given[id(loss)][1] if id(loss) in self.given else loss.detach() for loss in losses])
        return plain.mean() if self.is_mean else plain.sum()


def check_pipeline(
    schedule: Any, registry: ProcessGroupRegistry, data_parallel: str | None = None, optimizer: object = ...
) -> None:
    """Raise an error if `Pipeline` can't train with a schedule, or not with the other arguments.

    ``data_parallel`` must not be "ddp", and ``optimizer`` must not be None. Default: neither is checked.
    """
    if not is_schedule(schedule):
        raise TypeError(
            f"the schedule is a {type(schedule).__name__}; give a schedule of torch.distributed.pipelining, such as "
            "Schedule1F1B(stage, n_microbatches, loss_fn=...)"
        )
    kind = type(schedule).__name__
    if schedule._loss_fn is None:
        raise ValueError(
            f"{kind} has no loss_fn and would run no backward; give {kind}(..., loss_fn=...) on every rank"
        )
    _check_group(schedule, registry)
    if optimizer is None:
        raise ValueError(
            f"{kind} is given without an optimizer; give the optimizer of its stages; the Pipeline then evaluates with its "
            "method evaluate, also if you don't train"
        )
    if data_parallel == "ddp":
        raise ValueError(
            "data_parallel='ddp' would wrap the stages, but the schedule already refers to the unwrapped stages; give "
            "None, 'zero1', 'zero2' or 'fsdp'"
        )
    _check_ddp(schedule)


def _check_group(schedule: Any, registry: ProcessGroupRegistry) -> None:
    axes = registry.topology.pipe_axes
    if not axes:
        raise ValueError(
            f"a pipeline needs a pipeline axis, and {registry.topology!r} has none; name an axis 'pipe', or give another "
            "axis that role: Topology(roles={'name': 'pipe'}, ...)"
        )
    expected = list(registry.ranks(*axes))
    for stage in _stages(schedule):
        if (found := dist.get_process_group_ranks(stage.group)) != expected:
            given = ", ".join(map(repr, axes))
            raise ValueError(
                f"stage {stage.stage_index} has a group of ranks {found}, but this pipeline's stages are on ranks "
                f"{expected}; give PipelineStage(..., group=registry.group({given}))"
            )


def _check_ddp(schedule: Any) -> None:
    by_ddp = any(isinstance(reducing_module(module), DistributedDataParallel) for module in modules_of(schedule))
    if by_ddp and _computes_in_two(schedule):
        raise ValueError(
            f"{type(schedule).__name__} sets the gradients of weights after the backward that DistributedDataParallel "
            "observes, so DistributedDataParallel would never average them; remove that wrapper, so that the optimizer "
            "averages them, or use fully_shard"
        )


def _computes_in_two(schedule: Any) -> bool:
    """Return True for a zero-bubble schedule, which computes gradients of weights later than gradients of inputs."""
    from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

    return isinstance(schedule, (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV))


@contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Return a context in which a V-shaped schedule has no backward actions, because torch's ``eval`` would run them."""
    from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleZBVZeroBubble

    if not isinstance(schedule, (ScheduleZBVZeroBubble, ScheduleDualPipeV)):
        yield
        return
    whole = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {
        rank: [part for action in actions for part in action.sub_actions or (action,) if _is_forward(part)]
        for rank, actions in whole.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def _is_forward(action: Any) -> bool:
    return action.computation_type.value in ("F", "SEND_F", "RECV_F", "WAIT_SEND_F", "UNSHARD", "RESHARD")


def _keep_whole(modules: Sequence[nn.Module]) -> None:
    """Set ``reshard_after_forward`` to False in modules that `fully_shard` sharded, so that gathered weights are kept.

    Otherwise, the forward of another micro-batch could reshard the weights after the gradients of inputs were computed,
    and before the gradients of weights are. torch would store these gradients where `fully_shard` never reads them.
    """
    for stage in modules:
        for module in fully_sharded(stage):
            module.set_reshard_after_forward(False, recurse=False)


def is_schedule(value: object) -> bool:
    """Return True for a schedule of `torch.distributed.pipelining`, without importing that module."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    return module is not None and isinstance(value, (module.PipelineScheduleSingle, module.PipelineScheduleMulti))


def _stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def modules_of(schedule: Schedule) -> list[nn.Module]:
    """Return the modules of this rank's stages."""
    return [stage.submod for stage in _stages(schedule)]
