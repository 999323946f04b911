"""A pipeline: a schedule of `torch.distributed.pipelining`, and the optimizer that steps the stages of this rank.

    stage = PipelineStage(chunk, index, stages, device, group=registry.group("pipe"))
    pipeline = Pipeline(Schedule1F1B(stage, 4, loss_fn=criterion), optimizer)
    for inputs, targets in loader:  # the same lines on every rank
        optimizer.zero_grad()
        loss = pipeline.backward(inputs, target=targets)
        optimizer.step()

The schedule says who computes what, and when, and calls backward itself. Afterwards it would divide the gradients by the
number of micro-batches (``scale_grads=True``), each stage its own: those of a parameter that two stages of a rank share (a
tied embedding, in a V-shaped schedule) twice, those of an earlier call of the same window again, and those that were
reduced by then not at all. Here it is the loss that is divided, each once, where it is multiplied by the loss scale.
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

from ...parallel.mesh.agreement import on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ..parallel_optimizer import ParallelOptimizer
from ..step.data_parallel import TorchGradSync, reducing_module

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Pipeline:
    """Runs a schedule's micro-batches within the optimizer's window.

    The loss function is run as the precision mode wants it. With ``scale_grads=True``, torch's default, it gives the mean
    over a micro-batch, and a call counts as the mean over all of them; with ``scale_grads=False`` it gives a sum: then say
    what that is divided by, ``weight=`` in `backward`.

    Args:
        schedule: Any of `torch.distributed.pipelining`, with its ``loss_fn``; changed in place. Its stages' modules may be
            split over model axes, and `fully_shard` (give the optimizer ``data_parallel=[...]``, one a stage; a parameter
            that two stages of a rank share is left out of it: ``ignored_params=``). Those that compute a backward in two
            (zero-bubble) keep its weights whole for the time of a call, ``reshard_after_forward=False``.
        optimizer: It steps their parameters.
    Raises:
        TypeError, ValueError: On every rank: it is no schedule, or has no loss function; its stages don't talk over the
            mesh's pipeline axes; or it divides a backward in two (the zero-bubble ones) with a stage in
            `DistributedDataParallel`, which never hears of the second half.
    Collectives: here, an object all-gather.

    Attributes:
        schedule, optimizer: As given.
        modules: Of this rank's stages, in the schedule's order.
    """

    def __init__(self, schedule: Schedule, optimizer: ParallelOptimizer[Any]) -> None:
        on_all_ranks(lambda: check_pipeline(schedule, optimizer.registry), optimizer.registry)
        self.schedule, self.optimizer, self.modules = schedule, optimizer, modules_of(schedule)
        self._is_first, self._is_last = (
            any(getattr(s, end) for s in _stages(schedule)) for end in ("is_first", "is_last")
        )
        self._loss = _Loss.of(schedule, optimizer)
        if _computes_in_two(schedule):
            _keep_whole(self.modules)
        # Not public: there is no other way to a schedule that exists.
        schedule._loss_fn, schedule.scale_grads = self._loss, False

    def backward(
        self, *args: Any, target: Any = None, weight: float | Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """All micro-batches of this data coordinate, forward and backward; for the optimizer's window they are one.

        Every rank calls it, with the same samples on the ranks of a data coordinate: the first stage takes ``args``, the
        last one ``target``, and the others leave them alone. torch's data parallelism reduces at the end of every call.

        Args:
            args, kwargs: As for the schedule's ``step``, which splits tensors along dim 0 into micro-batches.
            target: Of the loss function.
            weight: As for `ParallelOptimizer.backward`.
        Returns:
            On ranks of the last stage the mean of the losses, or, with ``scale_grads=False``, their sum: 0-dim, detached,
            as the loss function gave them. None on others.
        Raises:
            ValueError: A tensor can't be cut into equal micro-batches; a weight is given for losses that are means. Else as
                `ParallelOptimizer.window`.
        Collectives: those of the schedule, of the model's and data_parallel's backward, of `Sharded` and ``overlap=True``.
            Host reads: none.
        """
        self._check_even([*args, *kwargs.values(), target])
        if weight is not None and self._loss.is_mean:
            raise ValueError(
                "weight= is what a sum is divided by, and this schedule's loss_fn gives means: let it sum, and make the "
                "schedule with scale_grads=False"
            )
        if isinstance(self.optimizer.grad_sync, TorchGradSync):
            self.optimizer.window_ends()
        with self.optimizer.window(weight=weight):
            return self._run(self.schedule.step, args, target, {**kwargs, "return_outputs": False})

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor | None:
        """The loss alone: given and returned as in `backward`. Every rank calls it. Collectives: the schedule's."""
        self._check_even([*args, *kwargs.values(), target])
        with _forward_only(self.schedule):
            loss = self._run(self.schedule.eval, args, target, kwargs)
        for module in (part for stage in self.modules for part in stage.modules()):
            if hasattr(module, "reshard"):  # fully_shard leaves weights whole for a backward, which does not come
                module.reshard()  # type: ignore[operator]
        # torch 2.11 makes what stages receive into once, and without a gradient if the first call evaluates.
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
        """Micro-batches of other sizes would have other weights in the mean, and don't fit the schedule's buffers."""
        parts = self.schedule._n_microbatches
        if self.schedule._args_chunk_spec is not None or self.schedule._kwargs_chunk_spec is not None:
            return  # what is cut, and along which dim, only they know
        for value in values:
            if isinstance(value, Tensor) and (value.dim() == 0 or value.size(0) % parts):
                raise ValueError(
                    f"a tensor of shape {tuple(value.shape)} can't be cut into {parts} equal micro-batches along dim 0: "
                    f"give a multiple of {parts} samples (drop_last=True), or the schedule chunk specs"
                )

    def __repr__(self) -> str:
        stages = ", ".join(str(stage.stage_index) for stage in _stages(self.schedule))
        return (
            f"Pipeline({type(self.schedule).__name__}, stages {stages} of {_stages(self.schedule)[0].num_stages} here)"
        )


class _Loss:
    """The schedule's loss function, times the loss scale, and divided by the number of micro-batches where it is a mean.

    Attributes:
        given: What it returned since it was cleared, by id, with the loss as it was.
    """

    def __init__(self, criterion: Callable[..., Tensor], schedule: Schedule, optimizer: ParallelOptimizer[Any]) -> None:
        self.criterion, self._schedule, self._optimizer = criterion, schedule, optimizer
        self.is_mean = schedule.scale_grads
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, schedule: Schedule, optimizer: ParallelOptimizer[Any]) -> _Loss:
        given: Any = schedule._loss_fn
        if not isinstance(given, _Loss):
            return cls(optimizer.precision.prepare_criterion(given), schedule, optimizer)
        new = cls(given.criterion, schedule, optimizer)  # for another optimizer now
        new.is_mean = given.is_mean
        return new

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
        """Of what a call gave: the mean, or the sum."""
        plain = torch.stack([self.given[id(loss)][1] if id(loss) in self.given else loss.detach() for loss in losses])
        return plain.mean() if self.is_mean else plain.sum()


def check_pipeline(
    schedule: Any, registry: ProcessGroupRegistry, data_parallel: str | None = None, optimizer: object = ...
) -> None:
    """Raise TypeError for what is no schedule of torch's, ValueError for one that would not train rightly; see `Pipeline`.

    Args:
        data_parallel: That of a `Booster`.
        optimizer: None: there is none, by mistake.
    """
    if not is_schedule(schedule):
        raise TypeError(
            f"the schedule is a {type(schedule).__name__}: give one of torch.distributed.pipelining, such as "
            "Schedule1F1B(stage, n_microbatches, loss_fn=...)"
        )
    kind = type(schedule).__name__
    if schedule._loss_fn is None:
        raise ValueError(f"{kind} has no loss_fn, so it runs no backward: give it one, on every rank")
    _check_group(schedule, registry)
    if optimizer is None:
        raise ValueError(f"{kind} is given without an optimizer; to evaluate only, call its eval()")
    if data_parallel == "ddp":
        raise ValueError(
            "data_parallel='ddp' puts a wrapper around the stages that the schedule was made of: take None, 'zero1', "
            "'zero2' or 'fsdp'"
        )
    _check_ddp(schedule)


def _check_group(schedule: Any, registry: ProcessGroupRegistry) -> None:
    axes = registry.topology.pipe_axes
    if not axes:
        raise ValueError(
            f"a pipeline needs an axis for its stages, and {registry.topology!r} has none: name one 'pipe', or say which "
            "one it is: Topology(roles={'name': 'pipe'}, ...)"
        )
    expected = list(registry.ranks(*axes))
    for stage in _stages(schedule):
        if (found := dist.get_process_group_ranks(stage.group)) != expected:
            given = ", ".join(map(repr, axes))
            raise ValueError(
                f"stage {stage.stage_index} talks to ranks {found}, but the stages of this pipeline are on {expected}: "
                f"give PipelineStage(..., group=registry.group({given}))"
            )


def _check_ddp(schedule: Any) -> None:
    by_ddp = any(isinstance(reducing_module(module), DistributedDataParallel) for module in modules_of(schedule))
    if by_ddp and _computes_in_two(schedule):
        raise ValueError(
            f"{type(schedule).__name__} computes the gradients of weights apart from those of inputs, and sets them past "
            "DistributedDataParallel, which would never average them: leave it out, and the optimizer does; or take "
            "fully_shard"
        )


def _computes_in_two(schedule: Any) -> bool:
    """Whether gradients of weights come apart from those of inputs, with work of other micro-batches between."""
    from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

    return isinstance(schedule, (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV))


@contextmanager
def _forward_only(schedule: Any) -> Iterator[None]:
    """Leave backward out of a V-shaped schedule, in which torch's evaluation hands on gradients that there are none of."""
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
    """Let stages under `fully_shard` keep their weights whole until the schedule is through.

    If another micro-batch's forward sharded them again between the halves of a backward, torch would put the gradients of
    the second half where `fully_shard` never looks: they are lost without a word.
    """
    for module in map(reducing_module, modules):
        if hasattr(module, "set_reshard_after_forward"):
            module.set_reshard_after_forward(False)  # type: ignore[operator]


def is_schedule(value: object) -> bool:
    """Whether it is a schedule of `torch.distributed.pipelining`, which is not imported for it."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    return module is not None and isinstance(value, (module.PipelineScheduleSingle, module.PipelineScheduleMulti))


def _stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def modules_of(schedule: Schedule) -> list[nn.Module]:
    """The modules of this rank's stages."""
    return [stage.submod for stage in _stages(schedule)]
