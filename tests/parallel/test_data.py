"""prepare_dataloader: samples per rank, epochs, seeds, resuming, and rejected arguments."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any
from unittest import mock

import meshstep.parallel.data as loader_module
import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from meshstep.parallel import ProcessGroupRegistry, ShardedDataLoader, Topology, prepare_dataloader
from meshstep.parallel.data import Batch, ShardedBatchSampler, step_bounds
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from world import World

Indices = list[list[int]]


class Numbers(Dataset[Tensor]):
    """Sample i is [i, three random draws]."""

    classes = ("even", "odd")

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, float(torch.rand(())), random.random(), numpy.random.rand()], dtype=torch.float64)


class WholeBatches(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def one_process(samples: int = 20, batch_size: int = 4, **options: Any) -> ShardedDataLoader[Tensor]:
    return prepare_dataloader(Numbers(samples), ProcessGroupRegistry(Topology()), batch_size, **options)


def indices(epoch: DataLoader[Any] | list[Tensor]) -> Indices:
    return [[int(index) for index in batch[:, 0]] for batch in epoch]


def jittered(samples: list[Tensor]) -> Tensor:
    """Collate samples and add a random number, as a collate function with MixUp does."""
    return torch.stack(samples) + torch.rand(())


def numpy_state() -> list[int]:
    state = numpy.random.get_state(legacy=False)["state"]
    return [state["pos"], *state["key"].tolist()]


# Samples per rank ----------------------------------------------------------------------------------------------------


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 7),
    drop=st.booleans(),
    shuffle=st.booleans(),
)
@example(samples=25, batch_size=3, ranks=4, drop=False, shuffle=True)  # 1 sample is left for 4 ranks
def test_sampler_gives_ranks_disjoint_samples_in_equally_many_batches(
    samples: int, batch_size: int, ranks: int, drop: bool, shuffle: bool
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop, "seed": 3}
    whole = samples // (batch_size * ranks)
    rest = samples - whole * batch_size * ranks
    possible = whole > 0 if drop or not rest else rest >= ranks or (whole > 0 and batch_size > 1)
    if not possible:
        with pytest.raises(
            ValueError, match=rf"{samples} samples? with batch_size={batch_size} and data-par.* {ranks}"
        ):
            ShardedBatchSampler(samples, batch_size, 0, ranks, **options)
        return
    shares = [list(ShardedBatchSampler(samples, batch_size, rank, ranks, **options)) for rank in range(ranks)]
    steps = list(zip(*shares, strict=True))  # strict: the same number of batches on all ranks
    assert len(steps) == whole + bool(rest and not drop)
    sizes = [[len(batch) for batch in step] for step in steps]
    assert min(map(min, sizes)) >= 1
    assert all(max(row) - min(row) <= 1 and max(row) <= batch_size for row in sizes)
    assert all(row == [batch_size] * ranks for row in sizes[: max(whole - (0 < rest < ranks and not drop), 0)])
    seen = [index for step in steps for batch in step for index in batch]
    assert len(seen) == len(set(seen)) == (whole * batch_size * ranks if drop else samples)
    if not shuffle:
        assert seen == list(range(len(seen))), "samples are not in order of step and data rank"


def test_loader_in_one_process_yields_batches_of_torch_data_loader() -> None:
    for samples, batch_size, drop in [(20, 4, False), (21, 4, False), (21, 4, True), (3, 8, False)]:
        torchs: DataLoader[Tensor] = DataLoader(Numbers(samples), batch_size, drop_last=drop)
        mine = one_process(samples, batch_size, drop_last=drop)
        assert indices(mine) == indices(torchs)
        assert len(mine) == len(torchs)


def test_global_batch_is_independent_of_the_number_of_ranks() -> None:
    def steps(batch_size: int, ranks: int) -> Indices:
        shares = [
            ShardedBatchSampler(103, batch_size, rank, ranks, shuffle=True, drop_last=False, seed=1)
            for rank in range(ranks)
        ]
        return [list(chain.from_iterable(step)) for step in zip(*shares, strict=True)]

    assert steps(12, 1) == steps(6, 2) == steps(4, 3) == steps(3, 4)


def epochs_on_ranks(topology: Topology, samples: int, batch_size: int, options: dict[str, Any]) -> list[list[Tensor]]:
    """Return two epochs, after seeding the global generators differently on each rank."""
    with ProcessGroupRegistry(topology) as registry:
        torch.manual_seed(registry.global_rank)
        random.seed(registry.global_rank)
        loader = prepare_dataloader(Numbers(samples), registry, batch_size, **options)
        return [list(loader), list(loader)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_data_ranks_split_samples_and_tensor_ranks_see_equal_batches(world: World, drop_last: bool) -> None:
    topology = Topology(data=2, tensor=2)
    options = {"shuffle": True, "drop_last": drop_last, "seed": 5, "collate_fn": jittered}
    ranks = world.run(4, epochs_on_ranks, topology, 23, 4, options)
    for left, right in ((0, 1), (2, 3)):
        for epoch in (0, 1):
            same = zip(ranks[left][epoch], ranks[right][epoch], strict=True)
            assert all(torch.equal(*pair) for pair in same), (
                "ranks of one data coordinate differ in samples or random draws"
            )
    whole = {}
    for epoch in (0, 1):
        shares = [indices(ranks[rank][epoch]) for rank in (0, 2)]
        sizes = [[len(batch) for batch in share] for share in shares]
        assert sizes == ([[4, 4], [4, 4]] if drop_last else [[4, 4, 4], [4, 4, 3]])
        whole[epoch] = [index for step in zip(*shares, strict=True) for batch in step for index in batch]
        assert len(set(whole[epoch])) == len(whole[epoch]) == (16 if drop_last else 23)
    assert whole[0] != whole[1], "the second epoch has the order of the first"
    alone = one_process(23, 8, shuffle=True, drop_last=drop_last, seed=5)
    assert whole[0] == list(chain.from_iterable(indices(alone))), "the order depends on the topology"


def test_context_parallel_ranks_see_the_same_samples(world: World) -> None:
    ranks = world.run(4, epochs_on_ranks, Topology(dp=2, cp=2), 16, 4, {"shuffle": True})
    for left, right in ((0, 1), (2, 3)):
        assert torch.equal(torch.cat(ranks[left][0]), torch.cat(ranks[right][0]))
    assert sorted(chain.from_iterable(indices(ranks[0][0]) + indices(ranks[2][0]))) == list(range(16))


def test_random_draws_of_samples_do_not_depend_on_the_topology(world: World) -> None:
    options = {"shuffle": True, "seed": 2}
    split = world.run(4, epochs_on_ranks, Topology(replica=2, data=2), 18, 2, options)
    alone = one_process(18, 8, shuffle=True, seed=2)
    for epoch in (0, 1):
        steps = [torch.cat(step) for step in zip(*(share[epoch] for share in split), strict=True)]
        assert torch.equal(torch.cat(steps), torch.cat(list(alone)))


# Epochs, seeds and resume --------------------------------------------------------------------------------------------


def test_sample_order_differs_per_epoch_and_repeats_with_an_equal_seed() -> None:
    first, again, other = (one_process(shuffle=True, seed=seed) for seed in (7, 7, 8))
    orders = [indices(first) for _ in range(3)]
    assert orders == [indices(again) for _ in range(3)]
    assert len({str(order) for order in orders} | {str(indices(other))}) == 4


def test_random_draws_change_per_epoch_and_preserve_global_generators() -> None:
    loader = one_process(collate_fn=jittered)
    before = torch.get_rng_state(), random.getstate(), numpy_state()
    first, second = torch.cat(list(loader)), torch.cat(list(loader))
    assert not (first == second).any()
    assert len(first[:, 1:].unique()) == first[:, 1:].numel(), "samples share their draws"
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy_state() == before[2]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # since Python 3.12, in a process with threads
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")  # on a single core
def test_worker_processes_load_the_same_samples_as_the_main_process() -> None:
    options: dict[str, Any] = {"shuffle": True, "collate_fn": jittered}
    expected, workers = one_process(**options), one_process(**options, num_workers=2, persistent_workers=True)
    for _ in range(2):
        epoch = torch.cat(list(expected))
        assert torch.equal(torch.cat(list(workers)), epoch)


@pytest.mark.parametrize("batches", [0, 3, 5, 8, 10])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_resumed_loader_continues_bitwise_identically(batches: int, num_workers: int) -> None:
    if num_workers and batches != 8:
        return

    def endless(loader: ShardedDataLoader[Tensor]) -> Iterator[Tensor]:
        while True:
            yield from loader

    loader = one_process(shuffle=True, num_workers=num_workers)
    stream = endless(loader)
    for _ in range(batches):
        next(stream)
    state = json.loads(json.dumps(loader.state_dict()))
    order = {"samples": 20, "shuffle": True, "seed": 0}
    assert state == {"epoch": batches // 5, "position": batches % 5 * 4, **order}
    resumed = one_process(shuffle=True)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    rest = endless(resumed)
    for _ in range(9):
        assert torch.equal(next(rest), next(stream))


def samplers(ranks: int, batch_size: int, **options: Any) -> list[ShardedBatchSampler]:
    return [ShardedBatchSampler(batch_size=batch_size, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


def shared_out(samplers: list[ShardedBatchSampler]) -> Indices:
    return [list(chain.from_iterable(step)) for step in zip(*samplers, strict=True)]


@given(
    samples=st.integers(8, 120),
    before=st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()),
    after=st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()),
    steps=st.integers(1, 30),
)
@example(samples=23, before=(2, 4, False), after=(3, 2, False), steps=2)
@example(samples=24, before=(2, 4, False), after=(4, 2, False), steps=2)  # the same global batch
def test_resumed_sampler_with_other_batch_size_and_ranks_yields_remaining_samples_once(
    samples: int, before: tuple[int, int, bool], after: tuple[int, int, bool], steps: int
) -> None:
    def share(ranks: int, batch_size: int, drop: bool) -> list[ShardedBatchSampler]:
        return samplers(ranks, batch_size, samples=samples, shuffle=True, drop_last=drop, seed=4)

    try:
        first, second = share(*before), share(*after)
        whole = shared_out(first)
        position = first[0].bounds[min(steps, len(whole) - 1)]
        for sampler in second:
            sampler.position = position
        rest = shared_out(second)
    except ValueError:
        return  # a batch would be empty, which other tests cover
    seen = list(chain.from_iterable(whole[: min(steps, len(whole) - 1)])) + list(chain.from_iterable(rest))
    order = first[0].order(0).tolist()
    assert seen == order[: len(seen)]
    dropped = samples - len(seen)
    assert dropped < after[0] * after[1] if after[2] else dropped == 0
    if before == after:
        assert rest == whole[min(steps, len(whole) - 1) :]


@pytest.mark.parametrize(("batch_size", "drop_last", "sizes"), [(3, False, [3, 3, 3, 3]), (5, True, [5, 5])])
def test_resumed_loader_with_other_batch_size_continues_saved_order(
    batch_size: int, drop_last: bool, sizes: list[int]
) -> None:
    loader, whole = one_process(shuffle=True), one_process(shuffle=True)
    order = list(chain.from_iterable(indices(whole)))
    iterator = iter(loader)
    next(iterator), next(iterator)
    other = one_process(batch_size=batch_size, shuffle=True, drop_last=drop_last)
    other.load_state_dict(loader.state_dict())
    rest = indices(other)
    assert [len(batch) for batch in rest] == sizes
    assert list(chain.from_iterable(rest)) == order[8 : 8 + sum(sizes)]
    assert other.state_dict()["epoch"] == 1
    assert other.state_dict()["position"] == 0


def test_loader_resume_starts_next_epoch_if_drop_last_drops_all_remaining_samples() -> None:
    loader = one_process(10)
    iterator = iter(loader)
    next(iterator), next(iterator)
    other = one_process(10, drop_last=True)
    other.load_state_dict(loader.state_dict())
    assert (other.state_dict()["epoch"], other.state_dict()["position"]) == (1, 0)
    assert len(list(other)) == 2


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (
            21,
            {"shuffle": True},
            "after 4 samples, but the dataset had 20 samples and has 21 now, .* Build the loader with the same dataset",
        ),
        (
            20,
            {"shuffle": True, "seed": 1},
            "but the loader had seed=0 and has seed=1 now, .* Build the loader with seed=0, or",
        ),
        (20, {}, "but the loader had shuffle=True and has shuffle=False now"),
    ],
)
def test_loader_resume_with_other_sample_order_is_rejected_only_within_an_epoch(
    samples: int, options: dict[str, Any], message: str
) -> None:
    loader = one_process(shuffle=True)
    next(iter(loader))
    other = one_process(samples, **options)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message) as error:
        other.load_state_dict(loader.state_dict())
    assert "begin the next epoch: load_state_dict({**state, 'epoch': 1, 'position': 0})" in str(error.value)
    assert other.state_dict() == before
    other.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 0})
    assert other.state_dict()["epoch"] == 1


def test_loader_without_shuffling_resumes_within_an_epoch_with_another_seed() -> None:
    loader = one_process()
    next(iter(loader))
    other = one_process(seed=1)
    other.load_state_dict(loader.state_dict())
    assert list(chain.from_iterable(indices(other))) == [*range(4, 20)]


def test_loader_with_seed_samples_false_skips_seeding() -> None:
    with mock.patch.object(loader_module, "seed_cpu_generators") as seed:
        plain = one_process(seed_samples=False, shuffle=True)
        assert sorted(chain.from_iterable(indices(plain))) == list(range(20))
        list(one_process(seed_samples=False, collate_fn=jittered))
        assert seed.call_count == 0
        list(one_process())
        assert seed.call_count == 20
        seed.reset_mock()
        list(prepare_dataloader(WholeBatches(20), ProcessGroupRegistry(Topology()), 4))
        assert seed.call_count == 5
    assert isinstance(one_process(seed_samples=False).dataset, Numbers)
    torch.manual_seed(1)
    first = torch.cat(list(one_process(seed_samples=False)))
    torch.manual_seed(1)
    assert torch.equal(torch.cat(list(one_process(seed_samples=False)))[:, :2], first[:, :2]), (
        "draws ignore the seed of torch"
    )


def test_loader_loop_after_early_break_starts_next_epoch() -> None:
    loader, reference = one_process(shuffle=True), one_process(shuffle=True)
    next(iter(loader))
    first, second = indices(reference), indices(reference)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 4)
    assert indices(loader) == second != first


def test_loader_supports_getitems_datasets_and_subsets() -> None:
    registry = ProcessGroupRegistry(Topology())
    order = [7, 1, 4, 9, 2]
    subset = prepare_dataloader(Subset(Numbers(10), order), registry, 2)
    assert indices(subset) == [[7, 1], [4, 9], [2]]
    by_five = prepare_dataloader(Subset(Numbers(10), order), registry, 5)
    subset.load_state_dict({**subset.state_dict(), "epoch": 0, "position": 0})
    assert torch.equal(torch.cat(list(subset)), torch.cat(list(by_five))), "draws depend on the batches"
    for make in (lambda: WholeBatches(10), lambda: Subset(WholeBatches(10), range(10))):
        first, again = (torch.cat(list(prepare_dataloader(make(), registry, 4))) for _ in range(2))
        assert torch.equal(first, again)
        assert first[:, 0].tolist() == list(range(10))


def test_loader_dataset_forwards_attributes_and_can_be_pickled() -> None:
    dataset = one_process().dataset
    assert len(dataset) == 20  # type: ignore[arg-type]
    assert dataset.classes == ("even", "odd")  # type: ignore[attr-defined]
    assert dataset[3][0] == 3
    copy = pickle.loads(pickle.dumps(dataset))  # as for a spawned worker
    batch = pickle.loads(pickle.dumps(Batch([3, 4], seed=1, epoch=2)))
    assert torch.equal(torch.stack(copy.__getitems__(batch)), torch.stack(dataset.__getitems__(batch)))  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="targets"):
        _ = dataset.targets  # type: ignore[attr-defined]


# Errors --------------------------------------------------------------------------------------------------------------


def test_batch_sizes_that_leave_an_empty_batch_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"5 samples with batch_size=1 and data-parallel size 2: .* fewer samples .1. .*drop_last=True"
    ):
        step_bounds(5, 1, 2, False)
    with pytest.raises(
        ValueError,
        match=r"3 samples with batch_size=4 and data-parallel size 4: there are fewer samples than data-parallel ranks",
    ):
        step_bounds(3, 4, 4, False)
    with pytest.raises(
        ValueError,
        match=r"7 samples with batch_size=4 and data-parallel size 2, drop_last=True: an epoch would have no step",
    ):
        step_bounds(7, 4, 2, True)
    with pytest.raises(ValueError, match="an epoch would have no step"):
        one_process(0)
    sampler = ShardedBatchSampler(5, 2, 0, 2, shuffle=False, drop_last=False, seed=0)
    advice = "give drop_last=True, use fewer data-parallel ranks, or begin the next epoch"
    with pytest.raises(ValueError, match=rf"after 4 samples of an epoch: 1 sample with .* an empty batch; {advice}"):
        sampler.bounds_from(4)
    state = {"epoch": 0, "position": 4, "samples": 5, "shuffle": False, "seed": 0}
    for ranks, drop_last, epoch in ((2, True, 1), (1, False, 0)):
        sampler = ShardedBatchSampler(5, 2, 0, ranks, shuffle=False, drop_last=drop_last, seed=0)
        loader: ShardedDataLoader[Any] = ShardedDataLoader(range(5), sampler)  # type: ignore[arg-type]
        loader.load_state_dict(state)
        assert loader.state_dict()["epoch"] == epoch


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_loader_rejects_bad_arguments() -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        one_process(batch_size=0)
    with pytest.raises(ValueError, match="seed=None: give a whole number, the same on every rank"):
        one_process(seed=None)
    with pytest.raises(ValueError, match="sampler= is given, but prepare_dataloader makes its own"):
        one_process(sampler=[1, 2])
    with pytest.raises(TypeError, match=r"Stream has no length, but prepare_dataloader needs .*registry\.rank"):
        prepare_dataloader(Stream(), ProcessGroupRegistry(Topology(data=1)), 2)
    with pytest.raises(TypeError, match=r"Stream has no length, .* give all ranks the same samples"):
        prepare_dataloader(Stream(), ProcessGroupRegistry(Topology(tensor=1)), 2)
    with pytest.raises(ValueError, match="epoch 1, position 20 is out of range for an epoch of 20 samples"):
        one_process().load_state_dict({**one_process().state_dict(), "epoch": 1, "position": 20})
    with pytest.raises(
        ValueError, match="is not a state of this loader, because the keys 'samples', 'seed', 'shuffle' are missing"
    ):
        one_process().load_state_dict({"epoch": 1, "position": 7})


def disagreeing(kind: str) -> str:
    rank = torch.distributed.get_rank()
    samples, batch_size = (20 + rank if kind == "samples" else 20), (4 - 4 * rank if kind == "batch" else 4)
    with (
        ProcessGroupRegistry(Topology(data=2)) as registry,
        pytest.raises(ValueError, match=r"samples|batch_size") as error,
    ):
        prepare_dataloader(Numbers(samples), registry, batch_size)
    return str(error.value)


def test_loader_arguments_that_differ_between_ranks_raise_on_all_ranks(world: World) -> None:
    for message in world.run(2, disagreeing, "samples"):
        assert "20 samples" in message
        assert "21 samples" in message
    assert all("batch_size=0" in message for message in world.run(2, disagreeing, "batch"))


def test_loader_state_after_n_batches_equals_state_dict_after_iterating_n_batches() -> None:
    loader = one_process()
    states = [loader.state_after(1, 0)]
    loader.load_state_dict(states[0])
    for batches, _ in enumerate(loader, start=1):
        if batches < len(loader):
            states.append(loader.state_after(1, batches))
            assert loader.state_dict() == states[-1]
    assert len({state["position"] for state in states}) == len(loader)
    with pytest.raises(ValueError, match="or for the end of an epoch the next epoch and batches=0"):
        loader.state_after(0, len(loader))
