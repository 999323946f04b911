"""`Booster`, which prepares a model, optimizer, criterion, data loader and learning-rate schedule for training.

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

`Booster` combines the precision modes of `meshstep.amp`, data parallelism, and `ParallelOptimizer`. Each of the three
can also be used without a `Booster`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
from collections.abc import Iterable, Sequence
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

from ...amp.modes import Mode, Precision, precision_of
from ...parallel.data import ShardedDataLoader, prepare_dataloader
from ...parallel.layout.annotation import annotate, annotation_of, attach
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import check_all_say_the_same, on_all_ranks, on_all_ranks_with
from ...parallel.mesh.random_state import cpu_random_state_kept
from ...parallel.mesh.registry import ProcessGroupRegistry, check_registry
from ...parallel.mesh.topology import Topology
from ..arguments import ELSEWHERE, Stats_co, StepOptions, replace_deprecated, what_instead
from ..build import as_one
from ..clip.rules import ClipSpec, clip_of
from ..norm.measure import GradStats
from ..norm.plan import entries_of
from ..parallel_optimizer import ParallelOptimizer
from ..schedule import follow, followers
from ..step.window import Window
from ..step.wrapped_optimizer import CombinedOptimizer, uncombined_on_error
from .data_parallel import DataParallel, broadcast_weights, check_data_parallel, optimizer_options, wrap
from .pipeline import Pipeline, check_pipeline, is_schedule, modules_of

# Checks and defaults of a `Booster` -----------------------------------------------------------------------------------


def registry_of_replicas() -> ProcessGroupRegistry:
    """Return the process groups for a mesh with a single axis, ``data``, that contains all ranks.

    Raise RuntimeError under torchrun with several processes if `init_distributed` has not been called.
    """
    if not dist.is_initialized() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise RuntimeError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, and torch.distributed is not initialized; call "
            "meshstep.parallel.init_distributed() before you create the Booster"
        )
    return ProcessGroupRegistry(Topology(data=dist.get_world_size() if dist.is_initialized() else 1))


def check_options(options: dict[str, Any]) -> None:
    """Raise TypeError for an option that `ParallelOptimizer` does not have, or that an argument of `Booster` determines."""
    here = {
        "precision": "mixed_precision",
        "average_data": "data_parallel",
    }
    signature = inspect.signature(ParallelOptimizer.__init__)
    known = set(signature.parameters) - {"self", "optimizer", "other"} - here.keys()
    for name in options:
        if name in here:
            raise TypeError(f"{name}= is an argument of ParallelOptimizer; for Booster, give {here[name]}=...")
        if name not in known:
            elsewhere = {
                "dtype": "mixed_precision=...",
                "plugin": "data_parallel=...",
                "model": "booster.boost(model, optimizer)",
            }
            instead = what_instead(name, sorted(known), ELSEWHERE | elsewhere)
            raise TypeError(f"{name}= is an argument of neither Booster nor ParallelOptimizer: {instead}")


def name_parameters(model: nn.Module, topology: Topology) -> None:
    """Write each parameter's name into the declaration of its layout, for errors, norms and checkpoints.

    If a declaration already has a name, the name is kept. On a mesh without model axes, parameters without a
    declaration are declared replicated. On other meshes, parameters without a declaration are unchanged.
    """
    for name, param in model.named_parameters():
        known = annotation_of(param)
        if known is None and not topology.model_axes:
            annotate(param, P(), name)
        elif known is not None and known.name is None:
            attach(param, replace(known, name=name))


def prepare_criterion(criterion: Any, precision: Precision, registry: ProcessGroupRegistry) -> Any:
    """Return ``criterion`` prepared for the precision mode. A module is moved to the registry's device if that is a GPU."""
    if criterion is None:
        return None
    if isinstance(criterion, nn.Module) and registry.device.type == "cuda":
        criterion.to(registry.device)
    return precision.prepare_criterion(criterion)


# torch's samplers that do not divide the samples between ranks.
_EVERYTHING = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def check_loader(loader: Any, registry: ProcessGroupRegistry) -> None:
    """Raise ValueError if a torch DataLoader gives ranks the wrong samples.

    Ranks with different data coordinates must get different samples. Ranks with the same data coordinate must get equal
    samples. A `DistributedSampler` is always checked. Another sampler is only checked if there are several data
    coordinates, and if it and the batch sampler are of torch's own classes; the orders of ranks with the same data
    coordinate are not compared. A `ShardedDataLoader`, and any object that is not a torch DataLoader, is not checked.
    """
    axes = registry.topology.sample_axes
    size, rank = (registry.size(*axes), registry.rank(*axes)) if axes else (1, 0)
    if not isinstance(loader, DataLoader) or isinstance(loader, ShardedDataLoader):
        return
    batch_sampler = loader.batch_sampler
    # a loader with a batch sampler does not use loader.sampler
    sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    advice = _loader_advice(sampler, size, rank)
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (size, rank):
            raise ValueError(
                f"the loader's DistributedSampler has rank {sampler.rank} of {sampler.num_replicas}, but this rank has "
                f"data coordinate {rank} of {size} in {registry.topology!r}; {advice}"
            )
    elif size > 1 and type(sampler) in _EVERYTHING and type(batch_sampler) in (BatchSampler, type(None)):
        raise ValueError(
            f"the loader's {type(sampler).__name__} doesn't divide its samples between the {size} data coordinates (ranks "
            f"with different data coordinates must get different samples); {advice}"
        )


def _loader_advice(sampler: object, size: int, rank: int) -> str:
    """Return the loader to create instead of one with ``sampler``, with the same samples and order of an epoch."""
    shuffle, dataset, drawn = isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False), "dataset", ""
    if isinstance(sampler, SubsetRandomSampler):
        shuffle, dataset, drawn = True, "subset", " and subset = torch.utils.data.Subset(dataset, indices)"
    elif isinstance(sampler, WeightedRandomSampler):
        dataset = "subset"
        drawn = (
            " and, in each epoch, subset = torch.utils.data.Subset(dataset, [*sampler]), where the sampler has a generator "
            "with the same seed on every rank"
        )
    return (
        f"create the loader with booster.prepare_dataloader({dataset}, batch_size, shuffle={shuffle}, ...), or with "
        f"sampler=DistributedSampler({dataset}, num_replicas={size}, rank={rank}, shuffle={shuffle}){drawn}"
    )


def first_samples(loader: Any) -> str | None:
    """Read the first four samples of a DataLoader's IterableDataset, and return a hash of them.

    Return None if ``loader`` is not a DataLoader of an IterableDataset, or if the samples can't be read or pickled.
    """
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if not isinstance(dataset, IterableDataset):
        return None
    try:
        with cpu_random_state_kept():
            samples = pickle.dumps([_plain(sample) for sample in islice(dataset, 4)])
    except Exception:  # an error of the dataset is raised again when the training loop reads the samples
        return None
    return hashlib.blake2b(samples).hexdigest()


def _plain(sample: Any) -> Any:
    """Return ``sample`` with dtype, shape and bytes in place of tensors, because pickles of equal tensors may differ."""
    if isinstance(sample, Tensor):
        value = sample.detach().cpu().contiguous()
        return str(value.dtype), tuple(value.shape), bytes(value.flatten().view(torch.uint8).tolist())
    if isinstance(sample, dict):
        return {key: _plain(item) for key, item in sample.items()}
    return [_plain(item) for item in sample] if isinstance(sample, (tuple, list)) else sample


def check_contents(digests: Sequence[str | None], topology: Topology) -> None:
    """Raise ValueError if IterableDatasets give ranks the wrong first samples.

    Ranks with different data coordinates must get different samples. Ranks with the same data coordinate must get equal
    samples. A rank whose digest is None is not checked.
    """
    advice = (
        "select each rank's samples by registry.rank(*registry.topology.sample_axes)"
        if topology.sample_axes
        else "give all ranks the same samples"
    )
    seen: dict[tuple[int, ...], tuple[int, str]] = {}
    for rank, digest in enumerate(digests):
        if digest is not None:
            place = tuple(topology.coordinate_of(rank, axis) for axis in topology.sample_axes)
            first, begins = seen.setdefault(place, (rank, digest))
            if begins != digest:
                raise ValueError(
                    f"the IterableDatasets of ranks {first} and {rank} begin with different samples, but the ranks have "
                    f"the same data coordinate; {advice}"
                )
    first_with: dict[str, int] = {}
    for rank, digest in seen.values():
        if (other := first_with.setdefault(digest, rank)) != rank:
            raise ValueError(
                f"the IterableDatasets of ranks {other} and {rank} begin with the same samples, but the ranks have "
                f"different data coordinates; {advice}"
            )


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError if ``model`` contains a `DistributedDataParallel`, or a module sharded by `fully_shard`."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync"):
            raise ValueError(
                f"the model contains a {type(module).__name__}, which is already data parallel; give the bare model to a "
                "Booster(data_parallel='ddp' or 'fsdp'), or the wrapped model to ParallelOptimizer(data_parallel=...)"
            )


def check_optimizer(optimizer: object, model: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Raise an error if `boost` can't use the optimizer with the model.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer, or is already a `ParallelOptimizer`.
        ValueError: A parameter of the optimizer is not in the model, a trainable parameter of the model has no declared
            layout on a mesh with model axes, or the model can't be moved to the registry's device.
    """
    if isinstance(optimizer, ParallelOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a plain torch optimizer, which boost wraps")
    params = {id(param) for param in model.parameters()}
    strangers = sum(id(param) not in params for group in optimizer.param_groups for param in group["params"])
    if strangers:
        raise ValueError(
            f"{strangers} parameters of the optimizer are not parameters of the model (the optimizer belongs to another "
            "model, or parameters were replaced after it was created); create the optimizer from model.parameters() after "
            "the last change of the model"
        )
    if (topology := registry.topology).model_axes:
        entries_of([[(name, param) for name, param in model.named_parameters() if param.requires_grad]], topology)
    check_movable(model, optimizer, registry.device)


def check_movable(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise ValueError if the model can't be moved to ``device`` after its optimizer was created.

    A tensor of the model on the meta device is always an error. If parameters must be moved to a CUDA device, two more
    cases are errors: the optimizer has states, which a move of the model would leave on the old device; or torch is set
    to create new parameters when a module is moved.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device and has no elements; call model.to_empty(device=registry.device), and "
                "initialize or load the model, before you create the optimizer"
            )
    elsewhere = sorted({str(param.device) for param in model.parameters() if param.device != device})
    if device.type != "cuda" or not elsewhere:
        return
    advice = f"call model.to(registry.device), which is {device}, before you create the optimizer"
    if any(optimizer.state.values()):
        raise ValueError(f"the model is on {', '.join(elsewhere)}, where the optimizer already has a state; {advice}")
    if torch.__future__.get_overwrite_module_params_on_conversion():
        raise ValueError(
            "torch.__future__.set_overwrite_module_params_on_conversion is set, so a move of the model would create new "
            f"parameters that the optimizer does not have; {advice}"
        )


# Booster --------------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .pipeline import Schedule as PipelineSchedule

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Criterion = TypeVar("Criterion")
Loader = TypeVar("Loader")
Schedule = TypeVar("Schedule")


class Booster(Generic[Stats_co]):
    """Prepares model, optimizer, loss function, data loader and schedule for a precision mode and data parallelism.

        booster = Booster("bf16", registry, max_norm=1.0)
        model, optimizer, criterion, loader, _ = booster.boost(model, adamw, criterion, loader)
        for inputs, targets in loader:
            optimizer.zero_grad()
            booster.backward(criterion(model(inputs), targets), optimizer)
            optimizer.step()

    Args:
        mixed_precision: Name of a mode (``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp16_naive"``, ``"fp16_apex"``,
            ``"fp8"``) or a precision object. Default: ``"fp32"``.
        registry: The process groups. None (default): all ranks are replicas on one axis ``data``.
        data_parallel: How gradients are averaged over the data axes, and which tensors are sharded over these axes. The
            lines of the training loop are the same with all values. Default: None::

                None      the optimizer's `step` averages the gradients; works with every layout
                "ddp"     torch's DistributedDataParallel averages the gradients during backward
                "zero1"   `step` averages the gradients; optimizer states and master weights are sharded over the
                    last data axis larger than 1, or over all data axes if the topology has an alias for them
                "zero2"   as "zero1", and gradients are sharded too, during backward
                "fsdp"    torch's fully_shard shards parameters, gradients and states, and averages the gradients

        max_norm: Threshold of the global gradient norm, or another clipping rule, applied in every step. None (default):
            no clipping, except by the optimizer's ``clip_grad_by_norm`` and ``clip_grad_by_value``.
        accumulation_steps: Number of micro-batches per optimizer step. With n > 1, call the optimizer's `step` after
            every micro-batch; it updates the weights in every n-th call. Default 1: each call of `step` updates the
            weights, with the sum of the gradients of all micro-batches since the previous step. With
            ``sum_order="fixed"`` only one micro-batch per step is allowed then.
        **options: Other arguments of `ParallelOptimizer`, such as ``check_replicas``, ``overlap`` or ``states``. With
            "zero1" and "zero2", ``compression`` also applies to the reduce-scatters of `Sharded`.

    Raises:
        ValueError: The precision mode does not exist, ``data_parallel`` is unknown or not possible on the mesh, or an
            argument is out of range.
        TypeError: An option is not an argument of `ParallelOptimizer`, or another argument of Booster determines it; or
            ``max_norm`` has a wrong type.
        RuntimeError: ``registry`` is None under torchrun, and `init_distributed` has not been called.
        An argument that is wrong on one rank raises on every rank, except ``registry``.

    Collectives: a gather of Python objects over all ranks.
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
        self.registry = registry_of_replicas() if registry is None else registry
        check_registry(self.registry)
        self.data_parallel = data_parallel
        self.precision, steps = on_all_ranks(
            lambda: self._check_arguments(mixed_precision, max_norm, accumulation_steps, options), self.registry
        )
        self._options = {**options, "max_norm": max_norm, "accumulation_steps": steps}
        self._optimizers: dict[object, ParallelOptimizer] = {}  # by the model or `Pipeline` that `boost` returned

    def _check_arguments(
        self, mixed_precision: Mode | Precision, max_norm: ClipSpec, accumulation_steps: int, options: dict[str, Any]
    ) -> tuple[Precision, int | None]:
        """Return the precision and ``accumulation_steps`` of `ParallelOptimizer`; replace deprecated options in place."""
        precision = precision_of(mixed_precision, "mixed_precision")
        check_data_parallel(self.data_parallel, self.registry)
        if wrong := replace_deprecated(options, options, "Booster"):
            raise wrong
        check_options(options)
        if options.get("overlap") and self.data_parallel is not None:
            raise ValueError(
                f"overlap=True with data_parallel={self.data_parallel!r}: overlap needs data_parallel=None, with which the "
                "optimizer itself averages gradients; leave out overlap= or data_parallel="
            )
        clip_of(max_norm)
        # ParallelOptimizer(accumulation_steps=1) rejects a second backward before `step`; with None, gradients of several
        # backwards add up. sum_order="fixed" does not support None.
        may_add = Window(accumulation_steps).steps == 1 and options.get("sum_order") != "fixed"
        return precision, None if may_add else accumulation_steps

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
        """Prepare the objects of a training loop, and return them. Every rank must call it at the same point.

        The model is changed in place, except that ``"ddp"`` wraps it. The weights and buffers of data coordinate 0 are
        broadcast over the data axes, so that replicas start equal. On a mesh with model axes, declare the layout of the
        model first. On other meshes, parameters without a declaration are declared replicated.

        Args:
            model: A model without a data-parallel wrapper. It is moved to the registry's device if this is a CUDA
                device. Or a schedule of `torch.distributed.pipelining` over this rank's stages, with a loss function.
            optimizer: A torch optimizer of the model's parameters. Or a list of optimizers, which are combined: one
                step and one gradient norm for all. None (default): the model is prepared for evaluation.
            criterion: A loss function or module, which is prepared for the precision mode. None (default): no criterion.
            dataloader: A loader, which is returned unchanged after a check of the samples: different data ranks must
                get different samples. The check uses the loader's sampler, or reads the first samples of an
                IterableDataset. Samplers of your own class are not checked. None (default): no loader.
            lr_scheduler: A torch or meshstep schedule that was created with ``optimizer``. A torch schedule advances
                with every call of its ``step``; to prevent this after skipped steps, wrap it in `HoldOnSkip` after
                `boost`. A meshstep schedule advances only if the optimizer took a step. With a list of optimizers,
                create the schedule afterwards, with the returned optimizer. None (default): no schedule.
        Returns:
            (model, optimizer, criterion, dataloader, lr_scheduler), with None for omitted objects. The optimizer is a
                `ParallelOptimizer`. With ``"ddp"``, an optimizer and several data ranks, the model is a
                `DistributedDataParallel` with the original model as its ``.module``. Instead of a schedule of
                `torch.distributed.pipelining`, a `Pipeline` is returned.

        Raises:
            ValueError, TypeError: On every rank, before any change: the objects don't fit together. The constructor of
                `ParallelOptimizer` may also raise errors, after the model was changed; then build the model again.

        Collectives: gathers of Python objects, and broadcasts of the model over the data axes.
        """
        one: Any = as_one(optimizer, self.registry) if isinstance(optimizer, (list, tuple)) else optimizer
        with uncombined_on_error(one):
            return self._boost(model, one, criterion, dataloader, lr_scheduler)

    def _boost(
        self, model: Any, optimizer: torch.optim.Optimizer | None, criterion: Any, dataloader: Any, lr_scheduler: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        schedule = model if is_schedule(model) else None
        parts: list[nn.Module] = [model] if schedule is None else modules_of(schedule)
        whole: nn.Module = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        _, by_rank = on_all_ranks_with(
            lambda: (None, self._check(schedule, whole, optimizer, criterion, dataloader, lr_scheduler)), self.registry
        )
        check_all_say_the_same([given for given, _ in by_rank])
        check_contents([first for _, first in by_rank], self.registry.topology)
        name_parameters(whole, self.registry.topology)
        if self.registry.device.type == "cuda":
            whole.to(self.registry.device)
        for part in parts:
            self.precision.prepare(part, self.registry)
        broadcast_weights(whole, self.registry)
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
        stepped._compare_with(*parts)
        if lr_scheduler is not None:
            follow(lr_scheduler, stepped)
        boosted = parts[0] if schedule is None else Pipeline(schedule, stepped)
        self._optimizers[boosted] = stepped
        return boosted, stepped, criterion, dataloader, lr_scheduler

    def _check(
        self, schedule: Any, model: nn.Module, optimizer: Any, criterion: Any, dataloader: Any, lr_scheduler: Any
    ) -> tuple[dict[str, str], str | None]:
        """Raise ValueError or TypeError if the objects that the user passed to `boost` don't fit together.

        Return texts that must be equal on all ranks, by name, and the result of `first_samples`.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model is a {type(model).__name__}; give the nn.Module, or a schedule of its stages")
        if criterion is not None and not callable(criterion):
            raise TypeError(f"criterion is a {type(criterion).__name__}; give a loss function or a module, or None")
        if dataloader is not None and not isinstance(dataloader, Iterable):
            raise TypeError(
                f"dataloader is a {type(dataloader).__name__}; give a DataLoader, another iterable, or None"
            )
        if schedule is not None:
            check_pipeline(schedule, self.registry, self.data_parallel, optimizer)
        check_unwrapped(model)
        check_data_parallel(self.data_parallel, self.registry, model, optimizer)
        check_loader(dataloader, self.registry)
        if optimizer is not None:
            check_optimizer(optimizer, model, self.registry)
            if lr_scheduler is not None and isinstance(optimizer, CombinedOptimizer):
                raise ValueError(
                    "lr_scheduler was created with one of several optimizers; leave it out of boost, and create it later "
                    "with the optimizer that boost returns"
                )
            if lr_scheduler is not None:
                followers(lr_scheduler, optimizer)
        elif lr_scheduler is not None:
            raise ValueError("lr_scheduler is given without its optimizer; give both")
        given = {"optimizer= of boost": "None" if optimizer is None else "given"}
        return given, first_samples(dataloader)

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
        """Return a loader for this rank's samples of ``dataset``. Every rank must call this method.

        Ranks with the same position on the data-parallel axes (except ``cp`` and ``context``) get the same samples, and
        other ranks different ones. The loader is the result of `meshstep.parallel.data.prepare_dataloader` for this
        Booster's registry.

        Args:
            dataset: A map-style dataset with a length, the same on every rank.
            batch_size: Number of samples per batch of one rank.
            shuffle: True: use a new random order in every epoch. Default False: the order of the dataset.
            drop_last: True: skip the last step of an epoch if it has fewer samples than a global batch. Default False:
                keep it as a smaller step.
            seed: Seed of the orders and of random draws while samples are loaded, the same on every rank. Default: 0.
            **loader_kwargs: ``seed_samples``, and arguments of torch's DataLoader: ``num_workers``, ``pin_memory``, ...

        Raises, collectives, host synchronization: as `meshstep.parallel.data.prepare_dataloader`.
        """
        return prepare_dataloader(dataset, self.registry, batch_size, shuffle, drop_last, seed, **loader_kwargs)

    def backward(
        self, loss: Tensor | None, optimizer: ParallelOptimizer, *, weight: float | Tensor | None = None, **kwargs: Any
    ) -> None:
        """Run the backward of one micro-batch: call `ParallelOptimizer.backward`, which applies the loss scale.

        Args:
            loss: 0-dim loss; None on a rank without a batch in this micro-batch.
            optimizer: The optimizer that `boost` returned.
            weight: The number of items, such as tokens, whose losses are summed in ``loss``. None (default): the loss
                is a mean.
            **kwargs: Arguments of ``loss.backward``.

        Raises:
            TypeError: ``optimizer`` is not a `ParallelOptimizer`, the loss is neither a tensor nor None, or the weight is
                neither a number nor a 0-dim tensor.
            ValueError, RuntimeError: As in `ParallelOptimizer.backward`.

        Collectives, host synchronization: as `ParallelOptimizer.backward`.
        """
        if not isinstance(optimizer, ParallelOptimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; give the optimizer that boost returned")
        optimizer.backward(loss, weight=weight, **kwargs)

    def no_sync(
        self, model: nn.Module | Pipeline | None = None, optimizer: ParallelOptimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which backward does not reduce gradients over the data axes.

        Run all micro-batches before a `step`, except the last micro-batch, in this context. With
        ``data_parallel="zero2"``, backward reduces the gradients of every micro-batch even in this context.

        Args:
            model: The model that `boost` returned. Not used if ``optimizer`` is given. Default: None.
            optimizer: The optimizer that `boost` returned. None (default): the optimizer that `boost` returned together
                with ``model``.

        Raises:
            ValueError: ``optimizer`` is not a `ParallelOptimizer`. Or it is None, and the model was not returned by
                `boost` together with an optimizer.
        """
        found = optimizer if optimizer is not None else self._optimizers.get(model)
        if not isinstance(found, ParallelOptimizer):
            given = model if optimizer is None else optimizer
            raise ValueError(
                f"no_sync was given a {type(given).__name__}: give an optimizer that boost returned, or the model that "
                "it returned together with an optimizer"
            )
        return found.no_sync()

    # Checkpoints that contain the data loader's position in its epoch ------------------------------------------------

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
        trainable_only: bool = False,
    ) -> Path:
        """Save a checkpoint with `save_checkpoint`, and return its directory. Every rank must call it.

        The checkpoint also contains the data loader's position in its epoch.

        Args:
            path: A directory that only this run uses, in a file system that all ranks share.
            model: The model that `boost` returned. If it returned a `Pipeline`, a module with all of this rank's stages.
            optimizer: The optimizer that `boost` returned.
            lr_scheduler: The schedule that `boost` returned. None (default): no schedule is saved.
            dataloader: A loader of `prepare_dataloader`. None (default): no position is saved.
            extra: Other data to restore: numbers, strings and tensors, in lists, tuples and dicts. The value of rank 0 is
                stored. Default: None.
            keep: Number of newest checkpoints to keep, including this one. Default: 1.
            trainable_only: As in `save_checkpoint`. Default: False.
        Returns:
            The directory of the checkpoint, ``path/meshstep-<number>``.

        Raises:
            ValueError, RuntimeError, TypeError: As in `save_checkpoint`.

        Collectives: gathers of Python objects over all ranks.
        Host synchronization: yes.
        """
        from ..checkpoint import save_checkpoint

        position = None if dataloader is None else dataloader.state_dict()
        own = {"extra": extra, "dataloader": position}
        return save_checkpoint(
            path, model, optimizer, lr_scheduler=lr_scheduler, extra=own, keep=keep, trainable_only=trainable_only
        )

    def load(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: ParallelOptimizer,
        lr_scheduler: LRScheduler | None = None,
        dataloader: ShardedDataLoader[Any] | None = None,
        *,
        trainable_only: bool = False,
    ) -> Any:
        """Load a checkpoint of `save` or `save_checkpoint` into the objects that `boost` returned; return its ``extra``.

        Every rank must call it. The checkpoint may come from another mesh. The next ``for`` loop over the loader
        continues the saved epoch after the batches that were already used.

        Args:
            path: The ``path`` of `save`, whose newest checkpoint is loaded; or the directory of one checkpoint.
            model: The model that `boost` returned. If it returned a `Pipeline`, a module with all of this rank's stages.
            optimizer: The optimizer that `boost` returned.
            lr_scheduler: The schedule that `boost` returned. None (default): the run was saved without a schedule.
            dataloader: A loader of `prepare_dataloader`. None (default), or for a checkpoint without a position, such as
                one of `save_checkpoint`: no position is loaded.
            trainable_only: As in `load_checkpoint`. Default: False.
        Returns:
            The ``extra`` value that was saved.

        Raises:
            ValueError: The loader does not have the order of the saved epoch. Then all other objects have already been
                loaded. Or the checkpoint does not fit, as in `load_checkpoint`; then nothing is changed.
            RuntimeError, TypeError: As in `load_checkpoint`.

        Collectives: gathers of Python objects over all ranks; with `Sharded` also all-gathers of weights.
        Host synchronization: yes.
        """
        from ..checkpoint import load_checkpoint

        own = load_checkpoint(path, model, optimizer, lr_scheduler=lr_scheduler, trainable_only=trainable_only)
        if not isinstance(own, dict) or own.keys() != {"extra", "dataloader"}:
            return own  # `save_checkpoint` was called directly
        if dataloader is not None and own["dataloader"] is not None:
            dataloader.load_state_dict(own["dataloader"])
        return own["extra"]

    def __repr__(self) -> str:
        how = f"mixed_precision={self.precision.name!r}, data_parallel={self.data_parallel!r}"
        return f"Booster({how}, {self.registry.topology!r})"
