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

import hashlib
import inspect
import os
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...amp.precision import Mode, Precision, precision_of
from ...parallel.data.loader import ShardedDataLoader, prepare_dataloader
from ...parallel.layout.annotation import annotate, annotation_of, attach
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.random_state import cpu_random_state_kept
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ...parallel.mesh.topology import Topology
from ..build import ELSEWHERE, Stats_co, StepOptions, as_one, what_instead
from ..clip.rules import ClipSpec, clip_of
from ..deprecated_arguments import replace_deprecated
from ..norm.measure import GradStats
from ..norm.plan import entries_of
from ..parallel_optimizer import ParallelOptimizer
from ..schedule.schedules import follow, followers
from ..step.combined_optimizer import CombinedOptimizer, unchanged
from ..step.window import Window
from .data_parallel import DataParallel, check_data_parallel, optimizer_options, share_weights, wrap
from .pipeline import Pipeline, check_pipeline, is_schedule, modules_of

# What a `Booster` checks and fills in before it puts anything together ------------------------------------------------


def registry_of_replicas() -> ProcessGroupRegistry:
    """All ranks on one data axis; RuntimeError where torchrun started several that have not been joined."""
    if not dist.is_initialized() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise RuntimeError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, which do not know of each other yet: call "
            "meshstep.parallel.launch.init_distributed() before making the Booster"
        )
    return ProcessGroupRegistry(Topology(data=dist.get_world_size() if dist.is_initialized() else 1))


def check_options(options: dict[str, Any]) -> None:
    """Raise TypeError for what is no argument of `ParallelOptimizer`, or follows from one of Booster's."""
    here = {
        "precision": "mixed_precision",
        "average_data": "data_parallel",
        "plugin": "data_parallel=",
    }
    signature = inspect.signature(ParallelOptimizer.__init__)
    known = set(signature.parameters) - {"self", "optimizer", "other"} - here.keys()
    for name in options:
        if name in here:
            raise TypeError(f"{name}= is ParallelOptimizer's; here it is {here[name]}")
        if name not in known:
            instead = what_instead(name, sorted(known), {**ELSEWHERE, "dtype": "mixed_precision=..."})
            raise TypeError(f"{name}= is no argument of Booster, and none of ParallelOptimizer: {instead}")


def name_parameters(model: nn.Module, topology: Topology) -> None:
    """Let every declared parameter carry its name in the model, for errors, norms and checkpoints.

    Where there are no model axes, those that nobody declared are replicated.
    """
    for name, param in model.named_parameters():
        known = annotation_of(param)
        if known is None and not topology.model_axes:
            annotate(param, P(), name)
        elif known is not None and known.name is None:
            attach(param, replace(known, name=name))


def prepare_criterion(criterion: Any, precision: Precision, registry: ProcessGroupRegistry) -> Any:
    """The criterion on the registry's device, run as the mode wants it."""
    if criterion is None:
        return None
    if isinstance(criterion, nn.Module) and registry.device.type == "cuda":
        criterion.to(registry.device)
    return precision.prepare_criterion(criterion)


# Each gives all samples of a dataset; where that is a part of them, nobody can tell.
_EVERYTHING = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_ADVICE = (
    "make the loader with booster.prepare_dataloader(dataset, batch_size, ...), or give it a sampler or batch sampler of "
    "your own class that chooses by registry.rank(*registry.topology.sample_axes)"
)


def check_loader(loader: Any, registry: ProcessGroupRegistry) -> None:
    """Raise ValueError where torch's DataLoader gives data ranks the same samples, or model peers different ones, by what
    its sampler is. Samplers and batch samplers of other classes are trusted."""
    axes = registry.topology.sample_axes
    size, rank = (registry.size(*axes), registry.rank(*axes)) if axes else (1, 0)
    if not isinstance(loader, DataLoader) or isinstance(loader, ShardedDataLoader):
        return
    batch_sampler = loader.batch_sampler
    # A loader with a batch sampler has a sampler that it does not use.
    sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (size, rank):
            raise ValueError(
                f"the loader's DistributedSampler is part {sampler.rank} of {sampler.num_replicas}, but this rank is data "
                f"coordinate {rank} of {size} in {registry.topology!r}; {_ADVICE}"
            )
    elif size > 1 and type(sampler) in _EVERYTHING and type(batch_sampler) in (BatchSampler, type(None)):
        raise ValueError(
            f"each of the {size} data ranks would see all of the loader's samples, by {type(sampler).__name__}; {_ADVICE}"
        )


def first_samples(loader: Any) -> str | None:
    """A digest of the first samples of a DataLoader's IterableDataset, which are read for it; None: nobody can tell."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if not isinstance(dataset, IterableDataset):
        return None
    try:
        with cpu_random_state_kept():
            samples = pickle.dumps([_plain(sample) for sample in islice(dataset, 4)])
    except Exception:  # the loop that iterates over it will say what is wrong
        return None
    return hashlib.blake2b(samples).hexdigest()


def _plain(sample: Any) -> Any:
    """Without tensors, whose pickles name the memory that they were in."""
    if isinstance(sample, Tensor):
        value = sample.detach().cpu().contiguous()
        return str(value.dtype), tuple(value.shape), bytes(value.flatten().view(torch.uint8).tolist())
    if isinstance(sample, dict):
        return {key: _plain(item) for key, item in sample.items()}
    return [_plain(item) for item in sample] if isinstance(sample, (tuple, list)) else sample


def check_contents(digests: Sequence[str | None], topology: Topology) -> None:
    """Raise ValueError where IterableDatasets give data ranks the same samples, or model peers different ones.

    Args:
        digests: `first_samples` of every rank.
    """
    advice = "let each choose its part by registry.rank(*registry.topology.sample_axes)"
    seen: dict[tuple[int, ...], tuple[int, str]] = {}
    for rank, digest in enumerate(digests):
        if digest is not None:
            place = tuple(topology.coordinate_of(rank, axis) for axis in topology.sample_axes)
            first, begins = seen.setdefault(place, (rank, digest))
            if begins != digest:
                raise ValueError(
                    f"the IterableDatasets of ranks {first} and {rank}, which are on the same data coordinate, begin with "
                    f"different samples; {advice}"
                )
    first_with: dict[str, int] = {}
    for rank, digest in seen.values():
        if (other := first_with.setdefault(digest, rank)) != rank:
            raise ValueError(
                f"the IterableDatasets of ranks {other} and {rank}, which are on different data coordinates, begin with "
                f"the same samples; {advice}"
            )


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a model that is data parallel already."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync"):
            raise ValueError(
                f"a {type(module).__name__} is data parallel already; give the bare model and Booster(data_parallel='ddp' "
                "or 'fsdp'), or pass the wrapped one to ParallelOptimizer(data_parallel=...)"
            )


def check_optimizer(optimizer: object, model: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Raise TypeError for what is no plain torch optimizer, ValueError for one of parameters that are not the model's, or
    that have no spec though the mesh has model axes; or which can't follow the model to the registry's device."""
    if isinstance(optimizer, ParallelOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a plain torch optimizer, it is wrapped here")
    params = {id(param) for param in model.parameters()}
    strangers = sum(id(param) not in params for group in optimizer.param_groups for param in group["params"])
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's parameters are not the model's: it was made of another model, or before the "
            "model got new parameters; make it of model.parameters(), last"
        )
    if (topology := registry.topology).model_axes:
        entries_of([[(name, param) for name, param in model.named_parameters() if param.requires_grad]], topology)
    check_movable(model, optimizer, registry.device)


def check_movable(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise ValueError where the model can't be moved to ``device``, if that is a CUDA device, with its optimizer: whose
    parameters stay the same objects, but whose state stays where it is."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no elements: call model.to_empty(device=registry.device), and "
                "initialise or load the model, before the optimizer is made"
            )
    elsewhere = sorted({str(param.device) for param in model.parameters() if param.device != device})
    if device.type != "cuda" or not elsewhere:
        return
    advice = f"call model.to(registry.device), which is {device}, before the optimizer is made"
    if any(optimizer.state.values()):
        raise ValueError(f"the model is on {', '.join(elsewhere)}, and the optimizer has state there already: {advice}")
    if torch.__future__.get_overwrite_module_params_on_conversion():
        raise ValueError(
            "torch.__future__.set_overwrite_module_params_on_conversion is set, so that to move the model would give it "
            f"parameters that the optimizer does not have: {advice}"
        )


# A run on disk, with the loader's position in its epoch: what a `Booster` saves and loads -----------------------------


class Saving:
    """Saves and loads what `Booster.boost` returned."""

    def save(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: ParallelOptimizer,
        lr_scheduler: LRScheduler | None = None,
        dataloader: ShardedDataLoader[Any] | None = None,
        *,
        extra: Any = None,
        keep: int = 1,
    ) -> Path:
        """`save_checkpoint`, with the loader's position in its epoch. Every rank calls it.

        Args, returns, raises, collectives: as there; all of them as `boost` returned them.
        """
        from ..checkpoint import save_checkpoint

        position = None if dataloader is None else dataloader.state_dict()
        own = {"extra": extra, "dataloader": position}
        return save_checkpoint(path, model, optimizer, lr_scheduler=lr_scheduler, extra=own, keep=keep)

    def load(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: ParallelOptimizer,
        lr_scheduler: LRScheduler | None = None,
        dataloader: ShardedDataLoader[Any] | None = None,
    ) -> Any:
        """`load_checkpoint` of what `save` wrote, into what `boost` returned, on this mesh or another. Every rank calls it.

        The next ``for`` over the loader has what was left of the saved epoch; see `ShardedDataLoader.load_state_dict`.

        Returns, raises, collectives: as there; and ValueError, once all else is loaded, where the loader does not have the
            saved epoch's order.
        """
        from ..checkpoint import load_checkpoint

        own = load_checkpoint(path, model, optimizer, lr_scheduler=lr_scheduler)
        if dataloader is not None and own["dataloader"] is not None:
            dataloader.load_state_dict(own["dataloader"])
        return own["extra"]


# Booster --------------------------------------------------------------------------------------------------------------

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
        **options: Other arguments of `ParallelOptimizer`, such as ``check_replicas``, ``overlap`` or ``states``.
            With "zero1" and "zero2", ``compression`` is also that of the sharded gradients.
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
        max_norm: ClipSpec = ...,
        accumulation_steps: Literal[1] = ...,
        **options: Unpack[StepOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: Booster[GradStats | None],
        mixed_precision: Mode | Precision = ...,
        registry: ProcessGroupRegistry | None = ...,
        data_parallel: DataParallel | None = ...,
        max_norm: ClipSpec = ...,
        accumulation_steps: int = ...,
        **options: Unpack[StepOptions],
    ) -> None: ...
    def __init__(
        self,
        mixed_precision: Mode | Precision = "fp32",
        registry: ProcessGroupRegistry | None = None,
        data_parallel: DataParallel | None = None,
        max_norm: ClipSpec = None,
        accumulation_steps: int = 1,
        **options: Any,
    ) -> None:
        self.precision = precision_of(mixed_precision)
        self.registry = registry_of_replicas() if registry is None else registry
        check_registry(self.registry)
        check_data_parallel(data_parallel, self.registry)
        if wrong := replace_deprecated(options, options, "Booster"):
            raise wrong
        check_options(options)
        if options.get("overlap") and data_parallel is not None:
            raise ValueError(
                f"overlap=True with data_parallel={data_parallel!r}: overlap is for data_parallel=None, where the "
                "optimizer itself averages gradients; leave one out"
            )
        clip_of(max_norm)
        self.data_parallel = data_parallel
        # In managed windows of one a second backward before `step` is an error; here it is the caller's own window.
        steps = None if Window(accumulation_steps).steps == 1 else accumulation_steps
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
            if lr_scheduler is not None and isinstance(optimizer, CombinedOptimizer):
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
