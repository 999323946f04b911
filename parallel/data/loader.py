"""A DataLoader that shares a dataset out over the data axes and gives all who work on the same samples the same batch.

    loader = prepare_dataloader(dataset, registry, batch_size=32, shuffle=True)
    for epoch in range(epochs):
        for images, labels in loader:  # another order in every epoch; there is no set_epoch to forget
            loss_sum = cross_entropy(model(images), labels, reduction="sum")
            optimizer.backward(loss_sum, weight=len(labels))

The sum and its weight make the last step of an epoch exact, where batches are smaller and differ by one between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from ..mesh.agreement import gather_objects, on_all_ranks
from ..mesh.call_tracker import in_call
from ..mesh.random_state import cpu_random_state_kept, seed_cpu_generators
from ..mesh.registry import ProcessGroupRegistry
from ..mesh.value_checks import wrong

# Which samples each data coordinate takes in each step of each epoch. Pure arithmetic; no process ---------------------

# In each step the D coordinates take the next ``batch_size * D`` samples of the epoch's order, the first coordinate the
# first ``batch_size`` of them and so on: a step's samples are the same for every D as long as the product is. The last
# step has what is left, in D parts whose sizes differ by at most one. Nothing is padded and no sample comes twice.


class Batch(list[int]):
    """Indices of samples, with what seeds the random draws in loading them; picklable, for workers."""

    def __init__(self, indices: Sequence[int], seed: int, epoch: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch


class ShardedBatchSampler(Sampler[Batch]):
    """The batches of one data coordinate, the same number on all coordinates, none of them empty.

    Args:
        samples: Number of samples N.
        batch_size: B, on each coordinate.
        rank: This coordinate, 0..ranks-1.
        ranks: Number of data coordinates D.
        shuffle: Another order in every epoch.
        drop_last: Leave out a last step of less than B * D samples.
        seed: Of the orders.
    Raises:
        ValueError: batch_size or seed is out of range; or a batch would be empty: N < D, or B = 1 and D does not divide
            N; with drop_last, N < B * D.

    Attributes:
        epoch, position: Where the next iteration begins: in which epoch, after how many samples of its order.
    """

    def __init__(
        self, samples: int, batch_size: int, rank: int, ranks: int, *, shuffle: bool, drop_last: bool, seed: int
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
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
        """[steps + 1]: where in an epoch's order the steps begin and the last one ends, of what is left after ``position``
        samples. Of ``bounds`` it is a part where the position is one of them.

        Raises:
            ValueError: A batch would be empty.
        """
        left = step_bounds(self.samples - position, self.batch_size, self.ranks, self.drop_last)
        return [position + bound for bound in left]

    def order(self, epoch: int) -> Tensor:
        """[N] int64: the samples in the order of an epoch, the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(mixed(self.seed, epoch)))


def step_bounds(samples: int, batch_size: int, ranks: int, drop_last: bool) -> list[int]:
    """[steps + 1]: where in an epoch's order each step begins, and where the last one ends.

    A last step of fewer samples than ranks gets as many as it lacks from the step before.

    Raises:
        ValueError: A batch would be empty.
    """
    bounds = list(range(0, samples + 1, batch_size * ranks))
    if bounds[-1] < samples and not drop_last:
        bounds.append(samples)
        if len(bounds) > 2 and batch_size > 1:
            bounds[-2] = min(bounds[-2], samples - ranks)
    last = bounds[-1] - bounds[-2] if len(bounds) > 1 else 0
    if last >= ranks:
        return bounds
    given = f"{samples} samples in batches of {batch_size} on {ranks} data coordinates"
    if not last:
        raise ValueError(
            f"{given}{', drop_last=True' * drop_last}: that is no step; give more samples or smaller batches"
        )
    raise ValueError(
        f"{given}: the last step has only {last} samples, and a coordinate's batch would be empty; give drop_last=True, "
        "a larger batch_size or more samples"
    )


def mixed(*numbers: int) -> int:
    """A 32-bit seed that depends on all the numbers, and on nothing else: the same in every process."""
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
    """A torch DataLoader over this data coordinate's share of the dataset; its tensor and pipeline peers have the same.

    Each sample comes once in an epoch, on one data coordinate; all ranks have the same number of batches, none of them
    empty (see `batch_sampler` for who gets which). What is random in loading (a crop, a flip; by the CPU generators of
    torch, Python and numpy) depends on the seed, the epoch and the sample's index alone: it is the same on all peers, on
    every topology, with any number of workers and after a resume, and leaves the generators as they were. Draws of a
    ``collate_fn``, or of a dataset that loads whole batches (``__getitems__``), depend on the batch's indices instead.

    Args:
        dataset: Map-style, with a length; the same on every rank.
        registry: Its data axes share the samples, but for ``cp``, along which a sample is split; without any, every rank
            gets all.
        batch_size: Samples in a batch of one data coordinate; the global batch is D times as large.
        shuffle: Another order in every epoch.
        drop_last: Leave out an epoch's last step where it has less than a global batch.
        seed: Of the orders and random draws; the same on every rank.
        seed_samples: Seed the generators for every sample, as said above, which takes 16 us; a dataset that loads whole
            batches costs that once a batch. False: what is random in loading draws from the generators as they are, or from
            those of torch's workers, which differ between data coordinates; give it where nothing is random in loading.
        **loader_kwargs: For torch's DataLoader: ``num_workers``, ``pin_memory``, ``collate_fn``, ...
    Raises:
        TypeError: The dataset has no length.
        ValueError: A batch would be empty: fewer samples than data coordinates, or batches of 1 that do not come out
            even; an argument is out of range; ranks disagree. On every rank.
    Collectives: here, object all-gathers over the world, so every rank must call it; none in iterating. Host reads: none.
    """

    def share() -> ShardedBatchSampler:
        samples = _checked_length(dataset)
        if chosen := sorted({"sampler", "batch_sampler"} & loader_kwargs.keys()):
            raise ValueError(f"{chosen[0]} is given, but prepare_dataloader chooses the samples; leave it out")
        axes = registry.topology.sample_axes
        rank, ranks = (registry.rank(*axes), registry.size(*axes)) if axes else (0, 1)
        return ShardedBatchSampler(samples, batch_size, rank, ranks, shuffle=shuffle, drop_last=drop_last, seed=seed)

    with in_call(registry, "prepare_dataloader"):
        arguments = f"{batch_size=}, {shuffle=}, {drop_last=}, {seed=}, {seed_samples=}"
        sampler = _agreed(share, arguments, registry)
    return ShardedDataLoader(dataset, sampler, seed_samples, **loader_kwargs)


def _agreed(
    share: Callable[[], ShardedBatchSampler], arguments: str, registry: ProcessGroupRegistry
) -> ShardedBatchSampler:
    sampler = on_all_ranks(share, registry)
    here = f"{sampler.samples} samples, {arguments}"
    for rank, there in enumerate(gather_objects(here, registry)):
        if there != here:
            raise ValueError(
                f"rank {registry.global_rank} shares out {here}; rank {rank} shares out {there}: give every rank the same "
                "dataset and arguments"
            )
    return sampler


class ShardedDataLoader(DataLoader[T]):
    """torch's DataLoader, of which each ``for`` is one epoch, and which knows where it is; see `prepare_dataloader`.

    An epoch that is left early is over: the next ``for`` is the next one. Only after `load_state_dict` the first ``for``
    has just the batches that were left of the saved epoch. ``len`` is the number of batches of a whole epoch.
    ``dataset`` passes attributes on to the dataset given.
    """

    def __init__(
        self, dataset: Dataset[T], sampler: ShardedBatchSampler, seed_samples: bool = True, **loader_kwargs: Any
    ) -> None:
        # Or torch would draw a seed for its workers from the global generator, which is the model's, in every epoch.
        workers_seed = mixed(sampler.seed, sampler.rank)
        loader_kwargs.setdefault("generator", torch.Generator().manual_seed(workers_seed))
        if seed_samples:
            dataset = SeededDataset(dataset)
            if loader_kwargs.get("collate_fn") is not None:
                loader_kwargs["collate_fn"] = SeededCollate(loader_kwargs["collate_fn"])
        super().__init__(dataset, batch_sampler=sampler, **loader_kwargs)
        self._sampler = sampler
        self._now = self._next = (0, 0)  # epoch and samples: handed out so far, and where the next `for` begins

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, position = self._now = self._next
        self._next = (epoch + 1, 0)
        self._sampler.epoch, self._sampler.position = epoch, position
        _, *stops = self._sampler.bounds_from(position)
        for batch, stop in zip(super().__iter__(), stops, strict=True):
            self._now = (epoch, stop) if stop < stops[-1] else self._next
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where it is: the epoch, and how many samples of its order all data coordinates have been handed out together
        (not: prefetched); and what decides that order."""
        return {"epoch": self._now[0], "position": self._now[1], **self._order()}

    def state_after(self, epoch: int, batches: int) -> dict[str, int]:
        """What `state_dict` is after so many batches of an epoch, for a loop that counts steps by itself.

        Raises:
            ValueError: The epoch has fewer batches.
        """
        _, *stops = self._sampler.bounds_from(0)
        if not 0 <= batches < max(len(stops), 1):
            raise ValueError(
                f"batches={batches}: an epoch has {len(stops)}; give less; the end of an epoch is the next one at 0"
            )
        return {"epoch": epoch, "position": stops[batches - 1] if batches else 0, **self._order()}

    def _order(self) -> dict[str, int]:
        sampler = self._sampler
        return {"samples": sampler.samples, "shuffle": sampler.shuffle, "seed": sampler.seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue with the next ``for``, whose batches are of the samples that are left of the saved epoch, each once.

        As long as ``batch_size`` times the number of data coordinates is the same these are the batches that were to come;
        else, or with another ``drop_last``, what is left is shared out anew. Between two epochs everything may change.

        Raises:
            ValueError: In the middle of an epoch, whose order this loader does not have: another number of samples,
                ``shuffle`` or ``seed``; or a batch of what is left would be empty. Nothing is changed then.
        """
        if missing := sorted({"epoch", "position", *self._order()} - state_dict.keys()):
            raise ValueError(
                f"{dict(state_dict)} is no state of this loader: it has no {', '.join(missing)}; give what its "
                "state_dict() returned"
            )
        epoch, position = state_dict["epoch"], state_dict["position"]
        for name in ("epoch", "position"):
            if type(state_dict[name]) is not int:
                raise wrong(f"{name} of the loader's state", state_dict[name], "an integer")
        if position:
            changed = [name for name, value in self._order().items() if state_dict[name] != value]
            if changed:
                name = changed[0]
                raise ValueError(
                    f"the state is of epoch {epoch} after {position} samples in an order of {name}={state_dict[name]}, but "
                    f"here {name}={self._order()[name]}: samples would be skipped or come twice. Build the loader with the "
                    f"{name} it was saved with, or begin the next epoch: load_state_dict({{**state, "
                    f"'epoch': {epoch + 1}, 'position': 0}})"
                )
            if epoch < 0 or not 0 < position < self._sampler.samples:
                samples = self._sampler.samples
                raise ValueError(
                    f"epoch {epoch}, position {position} is not within an epoch of {samples} samples; give the state of a "
                    "loader over this dataset"
                )
            sampler = self._sampler
            if sampler.drop_last and sampler.samples - position < sampler.batch_size * sampler.ranks:
                epoch, position = epoch + 1, 0  # what is left is left out
            sampler.bounds_from(position)
        self._now = self._next = (epoch, position)


class Fetched(list[Any]):
    """The samples of a batch, and the seed of what is drawn in collating them."""

    def __init__(self, samples: Sequence[Any], seed: int) -> None:
        super().__init__(samples)
        self.seed = seed


class SeededDataset(Dataset[T]):
    """A dataset whose random draws in loading a `Batch` follow from it; attributes are those of the dataset wrapped."""

    def __init__(self, wrapped: Dataset[T]) -> None:
        self.wrapped = wrapped

    def __len__(self) -> int:
        return len(self.wrapped)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> T:
        return self.wrapped[index]

    def __getitems__(self, batch: Batch) -> Fetched:
        whole_seed = mixed(batch.seed, batch.epoch, *batch)
        with cpu_random_state_kept():
            if _loads_whole_batches(self.wrapped):
                seed_cpu_generators(whole_seed)
                return Fetched(self.wrapped.__getitems__(list(batch)), whole_seed)  # type: ignore[attr-defined]
            samples = []
            for index in batch:
                seed_cpu_generators(mixed(batch.seed, batch.epoch, index))
                samples.append(self.wrapped[index])
        return Fetched(samples, whole_seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "wrapped":  # pickle asks before there is anything to pass on to
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class SeededCollate:
    """A collate function whose random draws follow from the batch."""

    def __init__(self, wrapped: Callable[[list[Any]], Any]) -> None:
        self.wrapped = wrapped

    def __call__(self, fetched: Fetched) -> Any:
        with cpu_random_state_kept():
            seed_cpu_generators(fetched.seed)
            return self.wrapped(list(fetched))


def _checked_length(dataset: object) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"{type(dataset).__name__} has no length to share out; give a map-style dataset, or let an iterable one choose "
            "its samples by registry.rank(*registry.topology.sample_axes) and put it into torch's DataLoader"
        )
    return len(dataset)


def _loads_whole_batches(dataset: object) -> bool:
    while isinstance(dataset, Subset):  # has __getitems__ always, and passes it on to what has it
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
