"""A DataLoader that distributes a dataset over the data-parallel axes. Ranks along other axes get the same batches.

    loader = prepare_dataloader(dataset, registry, batch_size=32, shuffle=True)
    for epoch in range(epochs):
        for images, labels in loader:  # a new order in every epoch, without set_epoch
            loss_sum = cross_entropy(model(images), labels, reduction="sum")
            optimizer.backward(loss_sum, weight=len(labels))

In the last two steps of an epoch, batches may be smaller, and their sizes may differ by one between ranks. Because the
example passes the sum of the losses and the number of samples, the gradient is the mean over all samples in these steps
too.

The *data coordinate* of a rank is its coordinate on the data-parallel axes except ``cp`` and ``context``. All ranks
with the same data coordinate get the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from .mesh.agreement import gather_objects, on_all_ranks
from .mesh.call_tracker import track_call
from .mesh.random_state import cpu_random_state_kept, seed_cpu_generators
from .mesh.registry import ProcessGroupRegistry
from .mesh.value_checks import is_whole, wrong

# Which samples each data coordinate gets in each step (pure computation, no communication) ----------------------------

# A step takes the next ``batch_size * D`` samples of the epoch's order, where D is the number of data coordinates:
# coordinate 0 gets the first ``batch_size`` samples, coordinate 1 the next, and so on. The last step has the remaining
# samples, in D parts whose sizes differ by at most one, so that each sample is used exactly once. If fewer than D
# samples would remain for the last step, the previous step leaves some of its samples to the last step. With
# ``batch_size=1``, or without a previous step, this is impossible, and `step_bounds` raises ValueError. With ``drop_last``
# the remaining samples are skipped.


class Batch(list[int]):
    """Picklable list of the sample indices of a batch, with the seed and the epoch for random draws in loading."""

    def __init__(self, indices: Sequence[int], seed: int, epoch: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch


class ShardedBatchSampler(Sampler[Batch]):
    """Batch sampler of one data coordinate. All data coordinates have the same number of batches, and no batch is empty.

    ``rank`` is the index of this data coordinate, and ``ranks`` is the number of data coordinates. ``epoch`` is the number
    of the epoch of the next iteration. ``position`` is the number of samples, counted over all data coordinates, that the
    next iteration skips at the start of the epoch's order.
    """

    def __init__(
        self, samples: int, batch_size: int, rank: int, ranks: int, *, shuffle: bool, drop_last: bool, seed: int
    ) -> None:
        if not is_whole(batch_size, 1):
            raise ValueError(f"batch_size={batch_size!r}: give a whole number >= 1")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: give a whole number, the same on every rank")
        self.samples, self.batch_size, self.rank, self.ranks = samples, batch_size, rank, ranks
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.bounds = step_bounds(samples, batch_size, ranks, drop_last)
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[Batch]:
        epoch, order = self.epoch, self.order(self.epoch)
        for start, stop in pairwise(self.bounds_from(self.position)):
            yield Batch(order[start:stop].tensor_split(self.ranks)[self.rank].tolist(), self.seed, epoch)

    def bounds_from(self, position: int) -> list[int]:
        """Return the bounds of the steps after the first ``position`` samples, as positions in the epoch's order.

        ``position`` is counted over all data coordinates. If it is the start of a step of the full epoch, these are the
        bounds of this step and of the later steps.
        """
        try:
            left = step_bounds(self.samples - position, self.batch_size, self.ranks, self.drop_last)
        except ValueError as problem:
            if not position:
                raise
            cause, _, _ = str(problem).partition("; give")  # the number of samples must be that of the saved run
            raise ValueError(
                f"after {position} samples of an epoch: {cause}; give drop_last=True, use fewer data-parallel ranks, or "
                "begin the next epoch: add 1 to 'epoch' and set 'position' to 0 in the state"
            ) from None
        return [position + bound for bound in left]

    def order(self, epoch: int) -> Tensor:
        """Return the order of an epoch: [N] int64 indices of samples, the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(mixed(self.seed, epoch)))


def step_bounds(samples: int, batch_size: int, ranks: int, drop_last: bool) -> list[int]:
    """Return the bounds of the steps of an epoch, as numbers of samples: the start of each step, and the end of the last.

    If the last step would have fewer samples than there are data coordinates, samples of the previous step are moved to
    the last step, so that each data coordinate gets one sample. With ``batch_size=1``, or without a previous step, this
    is impossible, and raises ValueError.
    """
    bounds = list(range(0, samples + 1, batch_size * ranks))
    if bounds[-1] < samples and not drop_last:
        bounds.append(samples)
        if len(bounds) > 2 and batch_size > 1:
            bounds[-2] = min(bounds[-2], samples - ranks)
    last = bounds[-1] - bounds[-2] if len(bounds) > 1 else 0
    if last >= ranks:
        return bounds
    given = f"{samples} sample{'s' if samples != 1 else ''} with batch_size={batch_size} and data-parallel size {ranks}"
    if not last:
        smaller = ", a smaller batch_size, or drop_last=False" if samples >= ranks else ""
        raise ValueError(
            f"{given}{', drop_last=True' * drop_last}: an epoch would have no step; give more samples{smaller}"
        )
    if len(bounds) == 2:
        raise ValueError(
            f"{given}: there are fewer samples than data-parallel ranks, so a rank would get an empty batch; give at least "
            f"{ranks} samples, or use fewer data-parallel ranks"
        )
    raise ValueError(
        f"{given}: the last step has fewer samples ({last}) than data-parallel ranks, so a rank would get an empty batch; "
        "give drop_last=True, a larger batch_size or more samples"
    )


def mixed(*numbers: int) -> int:
    """Return a 32-bit seed: a hash of the numbers, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")


# Loader ---------------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def prepare_dataloader(
    dataset: Dataset[T],
    registry: ProcessGroupRegistry,
    batch_size: int,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    *,
    seed_samples: bool = True,
    **loader_kwargs: Any,
) -> ShardedDataLoader[T]:
    """Return a torch DataLoader for this rank's batches of the dataset.

    Ranks that differ only along model-parallel, pipeline, ``cp`` or ``context`` axes have the same *data coordinate*, and
    get the same batches. Each sample is used once per epoch, on one data coordinate (with ``drop_last`` at most once). All
    ranks have the same number of batches, and no batch is empty.

        loader = prepare_dataloader(dataset, registry, batch_size=32, shuffle=True)

    Random draws in loading, for example a random crop, use the CPU generators of torch, Python and NumPy. By default
    these draws depend only on the seed, the epoch and the index of the sample. They are therefore the same on all ranks
    that get the sample, on every topology, with any number of workers, and after a checkpoint is loaded. The generators
    are restored afterwards. Draws in a ``collate_fn``, or in a dataset that loads complete batches (``__getitems__``),
    depend on all indices of the batch.

    Every rank of the world must call this function.

    Args:
        dataset: A map-style dataset with a length, the same on every rank.
        registry: Provides the topology and the process group of all ranks. The samples are distributed over the
            data-parallel axes except ``cp`` and ``context``. Without such axes, every rank gets all samples.
        batch_size: Number of samples per batch of one data coordinate. The size of the global batch is this number
            times the number of data coordinates.
        shuffle: True: use a new random order in every epoch. False: use the order of the dataset. Default: False.
        drop_last: True: skip the last step of an epoch if it has fewer samples than a global batch. False: keep it as a
            smaller step. Default: False.
        seed: Seed of the orders and of the random draws, the same on every rank. Default: 0.
        seed_samples: True: seed the generators before each sample, as described above, which takes time. False: random
            draws use the generators of the process, or of torch's workers, whose seeds differ between data coordinates.
            Pass False if loading draws no random numbers. Default: True.
        **loader_kwargs: Arguments of torch's DataLoader: ``num_workers``, ``pin_memory``, ``collate_fn``, ...
    Returns:
        The loader; one iteration over it is one epoch.
    Raises:
        TypeError: On every rank: the dataset is iterable or has no length, or torch's DataLoader does not know one of
            ``loader_kwargs``, or rejects its type.
        ValueError: On every rank: a batch would be empty; ``batch_size`` is not an integer >= 1; ``seed`` is not an
            integer; ``sampler`` or ``batch_sampler`` is given; torch's DataLoader rejects an argument; or the length of
            the dataset, or an argument that is not in ``loader_kwargs``, differs between ranks.
    Collectives: two object all-gathers over the world in this call, or none with one rank; none in iteration.
    Host synchronization: yes in this call, except with one rank; none in iteration.
    """

    def share() -> ShardedDataLoader[T]:
        samples = _length_of(dataset, registry.topology.sample_axes)
        if chosen := sorted({"sampler", "batch_sampler"} & loader_kwargs.keys()):
            raise ValueError(
                f"{chosen[0]}= is given, but prepare_dataloader makes its own sampler; leave the argument out"
            )
        axes = registry.topology.sample_axes
        rank, ranks = (registry.rank(*axes), registry.size(*axes)) if axes else (0, 1)
        sampler = ShardedBatchSampler(samples, batch_size, rank, ranks, shuffle=shuffle, drop_last=drop_last, seed=seed)
        return ShardedDataLoader(dataset, sampler, seed_samples, **loader_kwargs)

    with track_call("prepare_dataloader", registry):
        loader = on_all_ranks(share, registry)
        arguments = f"{batch_size=}, {shuffle=}, {drop_last=}, {seed=}, {seed_samples=}"
        _compare_arguments(f"{loader.state_dict()['samples']} samples, {arguments}", registry)
    return loader


def _compare_arguments(local: str, registry: ProcessGroupRegistry) -> None:
    for rank, remote in enumerate(gather_objects(local, registry)):
        if remote != local:
            raise ValueError(
                f"rank {registry.global_rank} has {local}, but rank {rank} has {remote}; give the same dataset and "
                "arguments on all ranks"
            )


class ShardedDataLoader(DataLoader[T]):
    """DataLoader of torch whose position can be saved; `prepare_dataloader` returns it.

        for images, labels in loader:       # one epoch; after `load_state_dict` the rest of the saved epoch
            ...
            state = loader.state_dict()

    Leaving a ``for`` loop early ends the epoch: the next loop is the next epoch. ``len(loader)`` is the number of batches
    of a full epoch. ``loader.dataset`` has the attributes of the original dataset.

    Args:
        dataset: A map-style dataset.
        sampler: Batch sampler of this data coordinate.
        seed_samples: True: random draws in loading depend only on the seed, the epoch and the indices of the samples,
            as in `prepare_dataloader`. False: the generators are not seeded. Default: True.
        **loader_kwargs: Arguments of torch's DataLoader.
    """

    def __init__(
        self, dataset: Dataset[T], sampler: ShardedBatchSampler, seed_samples: bool = True, **loader_kwargs: Any
    ) -> None:
        # Without this generator, torch would draw a seed for its workers from the global generator in every epoch. The
        # model uses the global generator too.
        workers_seed = mixed(sampler.seed, sampler.rank)
        loader_kwargs.setdefault("generator", torch.Generator().manual_seed(workers_seed))
        if seed_samples:
            dataset = SeededDataset(dataset)
            if loader_kwargs.get("collate_fn") is not None:
                loader_kwargs["collate_fn"] = SeededCollate(loader_kwargs["collate_fn"])
        super().__init__(dataset, batch_sampler=sampler, **loader_kwargs)
        self._sampler = sampler
        # Two (epoch, number of samples) pairs: the current position, and the start of the next iteration.
        self._now = self._next = (0, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, position = self._now = self._next
        self._next = (epoch + 1, 0)
        self._sampler.epoch, self._sampler.position = epoch, position
        _, *stops = self._sampler.bounds_from(position)
        for batch, stop in zip(super().__iter__(), stops, strict=True):
            self._now = (epoch, stop) if stop < stops[-1] else self._next
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the current position, and the arguments that determine the order of samples.

        Returns:
            A dict with ``"epoch"``; ``"position"``, the number of samples of the epoch that were returned on all data
            coordinates together (prefetched batches do not count); and ``"samples"``, ``"shuffle"`` and ``"seed"``.
            After the last batch of an epoch, the epoch is the next one, and the position is 0.
        """
        return {"epoch": self._now[0], "position": self._now[1], **self._order()}

    def state_after(self, epoch: int, batches: int) -> dict[str, int]:
        """Return the state that `state_dict` returns after ``batches`` batches of an epoch.

        Use it if the training loop counts the batches itself.

        Args:
            epoch: Number of the epoch, from 0.
            batches: Number of batches of the epoch that are done, less than ``len(loader)``. For the end of an epoch,
                pass the next epoch and 0.
        Raises:
            ValueError: ``batches`` is not in 0..len(loader)-1.
        """
        _, *stops = self._sampler.bounds_from(0)
        if not 0 <= batches < max(len(stops), 1):
            raise ValueError(
                f"batches={batches} is out of range for an epoch with len(loader)={len(stops)}; give a number from 0 to "
                f"{max(len(stops), 1) - 1}, or for the end of an epoch the next epoch and batches=0"
            )
        return {"epoch": epoch, "position": stops[batches - 1] if batches else 0, **self._order()}

    def _order(self) -> dict[str, int]:
        sampler = self._sampler
        return {"samples": sampler.samples, "shuffle": sampler.shuffle, "seed": sampler.seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Set the position to a saved one. The next iteration has the remaining samples of the saved epoch, each once.

        With ``drop_last``, remaining samples that do not fill a step are skipped. If they fill no step, the next
        iteration is the next epoch.

        The global batch size is ``batch_size`` times the number of data coordinates. If the global batch size and
        ``drop_last`` are unchanged, the remaining steps have the same samples as in the saved run. Only the boundary
        between the last two steps may move, if the number of data coordinates has changed. If the global batch size or
        ``drop_last`` has changed, the remaining samples are divided into new steps. If the state is from the end of an
        epoch, all arguments may differ from the saved run.

        Args:
            state_dict: A result of `state_dict`.
        Raises:
            ValueError: Keys are missing; or the epoch or the position is not an integer. For a state from the middle of
                an epoch also: epoch or position is out of range; the number of samples, ``shuffle`` or (with shuffling)
                ``seed`` differs from the saved run; or a batch of the remaining samples would be empty. After an error the
                loader is unchanged.
        """
        if missing := sorted({"epoch", "position", *self._order()} - state_dict.keys()):
            raise ValueError(
                f"{dict(state_dict)} is not a state of this loader, because the keys {', '.join(map(repr, missing))} are "
                "missing; give the result of loader.state_dict()"
            )
        epoch, position = state_dict["epoch"], state_dict["position"]
        for name in ("epoch", "position"):
            if type(state_dict[name]) is not int:
                raise wrong(f"{name} of the loader's state", state_dict[name], "an integer")
        if position:
            for name, value in self._order().items():
                if (saved := state_dict[name]) == value or (name == "seed" and not self._sampler.shuffle):
                    continue
                wanted = f"{name}={saved}"
                change = f"the loader had {wanted} and has {name}={value} now"
                if name == "samples":
                    wanted, change = "the same dataset", f"the dataset had {saved} samples and has {value} now"
                raise ValueError(
                    f"the state was saved in epoch {epoch} after {position} samples, but {change}, so samples would be "
                    f"skipped or repeated. Build the loader with {wanted}, or begin the next epoch: "
                    f"load_state_dict({{**state, 'epoch': {epoch + 1}, 'position': 0}})"
                )
            if epoch < 0 or not 0 < position < self._sampler.samples:
                samples = self._sampler.samples
                raise ValueError(
                    f"epoch {epoch}, position {position} is out of range for an epoch of {samples} samples; give the state "
                    "of a loader over this dataset"
                )
            sampler = self._sampler
            if sampler.drop_last and sampler.samples - position < sampler.batch_size * sampler.ranks:
                epoch, position = epoch + 1, 0  # drop_last skips the remaining samples
            sampler.bounds_from(position)
        self._now = self._next = (epoch, position)


class Fetched(list[Any]):
    """List of the loaded samples of a batch, with the seed for random draws in ``collate_fn``."""

    def __init__(self, samples: Sequence[Any], seed: int) -> None:
        super().__init__(samples)
        self.seed = seed


class SeededDataset(Dataset[T]):
    """Wrapper of a dataset that seeds the CPU generators before a sample is loaded, and restores them afterwards.

    Only `__getitems__`, which torch's loader calls once per batch, seeds the generators; indexing the dataset does not.
    If the wrapped dataset loads complete batches, the generators are seeded once per batch. Other attributes are those
    of the wrapped dataset.
    """

    def __init__(self, wrapped: Dataset[T]) -> None:
        self.wrapped = wrapped

    def __len__(self) -> int:
        return len(cast(Sized, self.wrapped))

    def __getitem__(self, index: int) -> T:
        return self.wrapped[index]

    def __getitems__(self, batch: Batch) -> Fetched:
        whole_seed, dataset = mixed(batch.seed, batch.epoch, *batch), cast(Any, self.wrapped)
        with cpu_random_state_kept():
            if _loads_whole_batches(dataset):
                seed_cpu_generators(whole_seed)
                return Fetched(dataset.__getitems__(list(batch)), whole_seed)
            samples = []
            for index in batch:
                seed_cpu_generators(mixed(batch.seed, batch.epoch, index))
                samples.append(dataset[index])
        return Fetched(samples, whole_seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "wrapped":  # pickle looks up attributes before `wrapped` is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wrapped, name)


class SeededCollate:
    """Wrapper of a collate function: it seeds the CPU generators before the call, and restores them afterwards."""

    def __init__(self, wrapped: Callable[[list[Any]], Any]) -> None:
        self.wrapped = wrapped

    def __call__(self, fetched: Fetched) -> Any:
        with cpu_random_state_kept():
            seed_cpu_generators(fetched.seed)
            return self.wrapped(list(fetched))


def _length_of(dataset: object, sample_axes: tuple[str, ...]) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        problem = "is an iterable dataset" if isinstance(dataset, Sized) else "has no length"
        select = (
            "select each rank's samples by registry.rank(*registry.topology.sample_axes)"
            if sample_axes
            else "give all ranks the same samples"
        )
        raise TypeError(
            f"{type(dataset).__name__} {problem}, but prepare_dataloader needs a length and samples by index; "
            f"give a map-style dataset, or use an iterable dataset with torch's DataLoader, and {select}"
        )
    return len(dataset)


def _loads_whole_batches(dataset: object) -> bool:
    while isinstance(dataset, Subset):  # a Subset has __getitems__ even if its dataset loads single samples
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
