"""What a `Booster` checks and fills in before it puts anything together."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...amp.precision import Precision
from ...parallel.data.loader import ShardedDataLoader
from ...parallel.data.random_state import cpu_random_state_kept
from ...parallel.layout.annotation import annotate, annotation_of, attach
from ...parallel.layout.spec import P
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.entries import entries_of
from ..options import ELSEWHERE, renamed, what_instead
from ..parallel_optimizer import ParallelOptimizer


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
        "shard_states": "data_parallel='zero1'",
        "shard_gradients": "data_parallel='zero2'",
        "average_data": "data_parallel",
        "plugin": "data_parallel=",
    }
    signature = inspect.signature(ParallelOptimizer.__init__)
    known = set(signature.parameters) - {"self", "optimizer", "removed"} - here.keys()
    for name in options:
        if name in here:
            raise TypeError(f"{name}= is ParallelOptimizer's; here it is {here[name]}")
        if name not in known:
            instead = what_instead(name, sorted(known), {**ELSEWHERE, "dtype": "mixed_precision=..."})
            raise renamed(name) or TypeError(
                f"{name}= is no argument of Booster, and none of ParallelOptimizer: {instead}"
            )


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
