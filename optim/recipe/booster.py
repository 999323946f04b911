"""The training recipe in a few lines: one object that makes a model, optimizer, criterion and schedule fit together.

    booster = Booster(mixed_precision="fp16", data_parallel="ddp")
    loader = booster.prepare_dataloader(dataset, batch_size=128, shuffle=True)
    model, optimizer, criterion, loader, schedule = booster.boost(model, optimizer, criterion, loader, schedule)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(max_norm=1.0)
        optimizer.step()
        schedule.step()

It decides nothing itself: precision modes are `meshstep.amp`'s, the step is `ParallelOptimizer`'s, and all that it puts
together here can be had one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...amp.by_name import Mode, precision_of
from ...amp.precision import Precision
from ...parallel.data.loader import ShardedDataLoader, prepare_dataloader
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ..clip.given import Given, clip_of
from ..norm.stats import GradStats
from ..options import Stats_co, StepOptions, as_one
from ..parallel_optimizer import ParallelOptimizer
from ..schedule.follow import follow, followers
from ..step.several import Several, unchanged
from ..step.window import Window
from .checks import (
    check_contents,
    check_loader,
    check_optimizer,
    check_options,
    check_unwrapped,
    first_samples,
    name_parameters,
    prepare_criterion,
    registry_of_replicas,
)
from .data_parallel import DataParallel, check_data_parallel, optimizer_options, share_weights, wrap
from .pipeline import Pipeline, check_pipeline, is_schedule, modules_of
from .saving import Saving

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .pipeline import Schedule as PipelineSchedule

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Criterion = TypeVar("Criterion")
Loader = TypeVar("Loader")
Schedule = TypeVar("Schedule")


class Booster(Saving, Generic[Stats_co]):
    """Prepares what a training loop uses, in one precision mode and one form of data parallelism.

    Args:
        mixed_precision: A mode's name (``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp16_naive"``, ``"fp16_apex"``, ``"fp8"``) or
            object.
        registry: The mesh. None: all ranks are replicas, on one axis ``data``.
        data_parallel: Who averages gradients over the data axes, and what is sharded over them. All take the same steps::

                None      the optimizer, in `step`, a few collectives a window; for every layout
                "ddp"     torch's DistributedDataParallel, while backward runs
                "zero1"   the optimizer, which shards its states and masters over the last data axis
                "zero2"   the same, and gradients are sharded too, while backward runs
                "fsdp"    torch's fully_shard: parameters as well

        max_norm: Clip the global norm in every step, or another rule; see also the optimizer's ``clip_grad_by_norm``.
        accumulation_steps: K: windows of K micro-batches; `ParallelOptimizer` says what `step` and the tail of an epoch do
            then. 1: gradients add up until you call `step`, which may be after several micro-batches (see `no_sync`).
        **options: Other arguments of `ParallelOptimizer`, such as ``measure``, ``states`` or ``on_nonfinite``.
    Raises:
        ValueError: No such mode; the mesh has no data axis for ``data_parallel``; an argument is out of range.
        TypeError: An option is none of `ParallelOptimizer`'s, or is decided here.
        RuntimeError: ``registry`` is None under torchrun, but `init_distributed` has not been called.
    """

    @overload
    def __init__(
        self: Booster[GradStats],
        mixed_precision: Mode | Precision = ...,
        registry: ProcessGroupRegistry | None = ...,
        data_parallel: DataParallel | None = ...,
        max_norm: Given = ...,
        accumulation_steps: Literal[1] = ...,
        **options: Unpack[StepOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: Booster[GradStats | None],
        mixed_precision: Mode | Precision = ...,
        registry: ProcessGroupRegistry | None = ...,
        data_parallel: DataParallel | None = ...,
        max_norm: Given = ...,
        accumulation_steps: int = ...,
        **options: Unpack[StepOptions],
    ) -> None: ...
    def __init__(
        self,
        mixed_precision: Mode | Precision = "fp32",
        registry: ProcessGroupRegistry | None = None,
        data_parallel: DataParallel | None = None,
        max_norm: Given = None,
        accumulation_steps: int = 1,
        **options: Any,
    ) -> None:
        self.precision = precision_of(mixed_precision)
        self.registry = registry_of_replicas() if registry is None else registry
        check_registry(self.registry)
        check_data_parallel(data_parallel, self.registry)
        check_options(options)
        clip_of(max_norm)
        self.data_parallel = data_parallel
        # In managed windows of one a second backward before `step` is an error; here it is the caller's own window.
        steps = None if Window[Any, Any](accumulation_steps).steps == 1 else accumulation_steps
        self._options = {**options, "max_norm": max_norm, "accumulation_steps": steps}
        self._optimizers: dict[nn.Module | Pipeline, ParallelOptimizer] = {}

    # Boosting --------------------------------------------------------------------------------------------------------

    @overload
    def boost(
        self,
        model: M,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        criterion: Criterion = ...,
        dataloader: Loader = ...,
        lr_scheduler: Schedule = ...,
    ) -> tuple[M, ParallelOptimizer[Stats_co], Criterion, Loader, Schedule]: ...
    @overload
    def boost(
        self,
        model: PipelineSchedule,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        criterion: Criterion = ...,
        dataloader: Loader = ...,
        lr_scheduler: Schedule = ...,
    ) -> tuple[Pipeline, ParallelOptimizer[Stats_co], Criterion, Loader, Schedule]: ...
    @overload
    def boost(
        self, model: M, optimizer: None = ..., criterion: Criterion = ..., dataloader: Loader = ...
    ) -> tuple[M, None, Criterion, Loader, None]: ...
    def boost(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Prepare all of them, in place as far as possible. Every rank calls it at the same point.

        Replicas start equal: the weights and buffers of data coordinate 0 are broadcast. Where the mesh has model axes,
        the layout must have been declared; else everything is replicated.

        Args:
            model: Bare, and not stepped yet; it is moved to the registry's device if that is a CUDA device. Or a schedule
                of `torch.distributed.pipelining` with its loss function, over this rank's bare stages; see `Pipeline`.
            optimizer: A torch optimizer over its parameters; or a list of them, which take one step with one norm. None:
                the model is prepared for evaluation.
            criterion: A function or module, run as the precision mode wants it.
            dataloader: Returned as it is, once data ranks are seen to share its samples: by its sampler, or by the first
                samples of an IterableDataset, which are read for it. Samplers of your own class are trusted.
            lr_scheduler: A torch or meshstep schedule that was made on ``optimizer``. torch's own move with every call of
                their ``step`` (but see `HoldOnSkip`); meshstep's only when the optimizer has really stepped. With a list of
                optimizers there is none to make it on before: make it on the one that is returned.
        Returns:
            (model, optimizer, criterion, dataloader, lr_scheduler), None for what was not given. The optimizer is a
            `ParallelOptimizer`; the model is wrapped with ``"ddp"``: yours, as the type says, is its ``.module`` then; of a
            schedule comes a `Pipeline`, to be run in its place.
        Raises:
            ValueError, TypeError: On every rank, before anything is changed: things that don't fit together. Or as
                `ParallelOptimizer` does, when the model has been prepared; build it anew then.
        Collectives: gathers of Python objects, broadcasts of the model over the data axes.
        """
        several = isinstance(optimizer, (list, tuple))
        one: Any = as_one(optimizer, self.registry) if several else optimizer  # type: ignore[arg-type]
        with unchanged(one):
            return self._boost(model, one, criterion, dataloader, lr_scheduler)

    def _boost(
        self, model: Any, optimizer: torch.optim.Optimizer | None, criterion: Any, dataloader: Any, lr_scheduler: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        schedule = model if is_schedule(model) else None
        parts: list[nn.Module] = [model] if schedule is None else modules_of(schedule)
        whole: nn.Module = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        begins = on_all_ranks(lambda: self._check(schedule, whole, optimizer, dataloader, lr_scheduler), self.registry)
        check_contents(gather_objects(begins, self.registry), self.registry.topology)
        name_parameters(whole, self.registry.topology)
        if self.registry.device.type == "cuda":
            whole.to(self.registry.device)
        for part in parts:
            self.precision.prepare(part, self.registry)
        share_weights(whole, self.registry)
        criterion = prepare_criterion(criterion, self.precision, self.registry)
        if optimizer is not None or self.data_parallel == "fsdp":
            parts = wrap(parts, optimizer, self.registry, self.data_parallel)
        if optimizer is None:
            return parts[0], None, criterion, dataloader, None
        stepped = ParallelOptimizer(
            optimizer,
            self.registry,
            precision=self.precision,
            **{**self._options, **optimizer_options(parts, self.registry, self.data_parallel, self._options)},
        )
        if lr_scheduler is not None:
            follow(lr_scheduler, stepped)
        boosted = parts[0] if schedule is None else Pipeline(schedule, stepped)
        self._optimizers[boosted] = stepped
        return boosted, stepped, criterion, dataloader, lr_scheduler

    def _check(self, schedule: Any, model: nn.Module, optimizer: Any, dataloader: Any, lr_scheduler: Any) -> str | None:
        """Raise ValueError or TypeError for what does not fit together; issues no collective. Returns `first_samples`."""
        if schedule is not None:
            check_pipeline(schedule, self.registry, self.data_parallel, optimizer)
        check_unwrapped(model)
        check_data_parallel(self.data_parallel, self.registry, model, optimizer)
        check_loader(dataloader, self.registry)
        if optimizer is not None:
            check_optimizer(optimizer, model, self.registry)
            if lr_scheduler is not None and isinstance(optimizer, Several):
                raise ValueError("lr_scheduler is of one of several optimizers; make it on the one that boost returns")
            if lr_scheduler is not None:
                followers(lr_scheduler, optimizer)
        elif lr_scheduler is not None:
            raise ValueError("lr_scheduler is given without the optimizer it was made on; give that too")
        return first_samples(dataloader)

    # Training --------------------------------------------------------------------------------------------------------

    def prepare_dataloader(
        self,
        dataset: Dataset[T],
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        **loader_kwargs: Any,
    ) -> ShardedDataLoader[T]:
        """`meshstep.parallel.data.prepare_dataloader` on this mesh; ``batch_size`` is that of one data coordinate."""
        return prepare_dataloader(dataset, self.registry, batch_size, shuffle, drop_last, seed, **loader_kwargs)

    def backward(
        self, loss: Tensor | None, optimizer: ParallelOptimizer, *, weight: float | Tensor | None = None, **kwargs: Any
    ) -> None:
        """`ParallelOptimizer.backward`.

        Raises:
            TypeError: The optimizer is not the one that `boost` returned; else as there.
        """
        if not isinstance(optimizer, ParallelOptimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; give the one that boost returned")
        optimizer.backward(loss, weight=weight, **kwargs)

    def no_sync(
        self, model: nn.Module | Pipeline | None = None, optimizer: ParallelOptimizer | None = None
    ) -> AbstractContextManager[None]:
        """`ParallelOptimizer.no_sync`: for the forward and backward of all micro-batches of your own window but the last.

        Args:
            model: As `boost` returned it.
            optimizer: The same of the optimizer; either says which one is meant.
        Raises:
            ValueError: Neither was boosted here.
        """
        found = optimizer if optimizer is not None else self._optimizers.get(model)  # type: ignore[arg-type]
        if not isinstance(found, ParallelOptimizer):
            raise ValueError("give no_sync the model or the optimizer that boost returned")
        return found.no_sync()

    def __repr__(self) -> str:
        how = f"mixed_precision={self.precision.name!r}, data_parallel={self.data_parallel!r}"
        return f"Booster({how}, {self.registry.topology!r})"
