"""Booster arguments and combinations that are rejected, data loaders that are accepted, and the move to the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshstep.optim import Booster
from meshstep.optim.recipe.booster import check_contents, check_loader
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from small_models import classifier, dataset
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_lr
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from world import World


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def boost(*_: object, **changes: Any) -> Any:
    """Boost a small model; ``changes`` are arguments of boost or of Booster. Return the result of boost."""
    model = changes.pop("model", None) or classifier()
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    given = {name: changes.pop(name) for name in ("criterion", "dataloader", "lr_scheduler") if name in changes}
    return Booster(**changes).boost(model, optimizer, **given)


def boosted_optimizer() -> torch.optim.Optimizer:
    return boost()[1]  # type: ignore[no-any-return]


def other_schedule() -> Any:
    return torch_lr.StepLR(torch.optim.SGD(classifier().parameters(), lr=0.1), 2)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            ValueError,
            lambda: {"mixed_precision": "half"},
            "mixed_precision='half' is not a precision mode; choose from 'fp32'",
        ),
        (ValueError, lambda: {"data_parallel": "zero3"}, "data_parallel='zero3': give one of 'ddp', 'zero1'"),
        (ValueError, lambda: {"max_norm": -1.0}, "max_norm"),
        (ValueError, lambda: {"accumulation_steps": 0}, "accumulation_steps=0: give a whole number"),
        (
            TypeError,
            lambda: {"precision": "fp16"},
            "precision= is an argument of ParallelOptimizer; for Booster, give mixed_precision",
        ),
        (TypeError, lambda: {"average_data": False}, "for Booster, give data_parallel"),
        (
            TypeError,
            lambda: {"plugin": None},
            "plugin= is an argument of neither Booster nor ParallelOptimizer: write data_parallel=...",
        ),
        (
            TypeError,
            lambda: {"clip": 1.0},
            "clip= is an argument of neither Booster nor ParallelOptimizer: the arguments are accum",
        ),
        (TypeError, lambda: {"comm_hook": bool}, "neither Booster nor ParallelOptimizer: write compression="),
        (ValueError, lambda: {"overlap": True, "data_parallel": "zero1"}, "overlap needs data_parallel=None"),
        (TypeError, lambda: {"dtype": "bf16"}, "neither Booster nor ParallelOptimizer: write mixed_precision="),
        (TypeError, lambda: {"optimizer": boosted_optimizer()}, "optimizer is a ParallelOptimizer; give a plain torch"),
        (
            ValueError,
            lambda: {"optimizer": torch.optim.SGD(classifier().parameters())},
            "4 parameters of the optimizer are not parameters of the model",
        ),
        (
            ValueError,
            lambda: {"lr_scheduler": other_schedule()},
            "StepLR was created with an optimizer of type SGD that is not the given one",
        ),
        (TypeError, lambda: {"lr_scheduler": 3}, "lr_scheduler is a int; give an LRScheduler of torch or meshstep"),
        (ValueError, lambda: {"model": Booster("bf16").boost(classifier())[0]}, "has already been prepared for 'bf16'"),
    ],
)
def test_booster_and_boost_reject_invalid_arguments(
    kind: type[Exception], changes: Callable[[], dict[str, Any]], message: str
) -> None:
    with pytest.raises(kind, match=message):
        boost(**changes())


def test_booster_constructor_with_model_raises_and_suggests_boost() -> None:
    with pytest.raises(TypeError, match=r"model= is an argument of neither .*: write booster.boost\(model, optimizer"):
        Booster(model=classifier())  # type: ignore[call-overload]


def test_boost_leaves_a_rejected_list_of_optimizers_unchanged() -> None:
    model, other = classifier(), classifier()
    first, *rest = model.parameters()
    several = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)]
    for message, changes in (
        ("lr_scheduler was created with one of several optimizers", {"lr_scheduler": torch_lr.StepLR(several[0], 2)}),
        ("4 parameters of the optimizer are not parameters of the model", {"model": other}),
    ):
        with pytest.raises(ValueError, match=message):
            boost(**{"model": model, "optimizer": several, **changes})
        assert [part.param_groups[0]["params"] for part in several] == [[first], rest]
        assert not any("optimizer" in group for part in several for group in part.param_groups)
    with pytest.raises(ValueError, match=r"norm_type=0\.5"):  # from the constructor of ParallelOptimizer
        Booster(norm_type=0.5).boost(model, several)
    assert not any("optimizer" in group for part in several for group in part.param_groups)
    with pytest.raises(ValueError, match="the list of optimizers is empty"):
        Booster().boost(model, [])


CUDA = torch.device("cuda", 3)


def adagrad() -> dict[str, Any]:
    model = classifier()
    return {"model": model, "optimizer": torch.optim.Adagrad(model.parameters())}  # Adagrad has state from the start


def without_elements() -> dict[str, Any]:
    model = classifier().to("meta")
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            adagrad,
            r"the model is on cpu, where the optimizer already has a state; call model.to\(registry.device\), which ",
        ),
        (without_elements, r"0.weight is on the meta device and has no elements; call model.to_empty\(device="),
    ],
)
def test_boost_rejects_model_that_cannot_be_moved_to_gpu(changes: Callable[[], dict[str, Any]], message: str) -> None:
    given = changes()
    before = [param.device for param in given["model"].parameters()]
    with mock.patch.object(ProcessGroupRegistry, "device", CUDA), pytest.raises(ValueError, match=message):
        boost(**given)
    assert [param.device for param in given["model"].parameters()] == before


def test_boost_raises_if_moving_model_to_gpu_would_replace_parameters() -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            mock.patch.object(ProcessGroupRegistry, "device", CUDA),
            pytest.raises(
                ValueError, match=r"set_overwrite_module_params_on_conversion is set.*call model.to\(registry.dev"
            ),
        ):
            boost()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_boost_moves_model_to_device_of_registry() -> None:
    class Moved(Exception):
        pass

    def move(model: nn.Module, device: torch.device) -> None:
        raise Moved(device)

    with (
        mock.patch.object(ProcessGroupRegistry, "device", CUDA),
        mock.patch.object(nn.Module, "to", move),
        pytest.raises(Moved, match=r"type='cuda', index=3|cuda:3"),
    ):
        boost()


def test_boosting_schedule_without_optimizer_is_rejected() -> None:
    with pytest.raises(ValueError, match="lr_scheduler is given without its optimizer"):
        Booster().boost(classifier(), None, lr_scheduler=other_schedule())  # type: ignore[call-overload]


def test_backward_and_no_sync_reject_objects_not_returned_by_boost() -> None:
    model = classifier()
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster()
    booster.boost(model, sgd)
    with pytest.raises(TypeError, match="optimizer is a SGD; give the optimizer that boost returned"):
        booster.backward(model(torch.ones(1, 6)).sum(), sgd)
    with pytest.raises(ValueError, match="an optimizer that boost returned, or the model"):
        booster.no_sync(classifier())


def test_booster_under_torchrun_without_init_distributed_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"torchrun started 4 processes.*call meshstep\.parallel\.init_distributed"):
        Booster()


def first_words(
    axes: dict[str, int], how: str, data_parallel: Any, roles: dict[str, Any] | None = None
) -> tuple[str, bool]:
    """Boost with the mistake ``how``. Return the error, and whether the parameters are unchanged."""
    with ProcessGroupRegistry(Topology(roles=roles, **axes)) as registry:
        model = classifier()
        before = [param.clone() for param in model.parameters()]
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader: Any = None
        if how == "split":
            annotate(model[0].weight, P("data"), "0.weight")  # type: ignore[index]
        elif how == "stepped":
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            before = [param.clone() for param in model.parameters()]
        elif how == "wrapped":
            model = nn.parallel.DistributedDataParallel(model)
        elif how == "shuffled":
            loader = DataLoader(dataset(), batch_size=4, shuffle=True)
        elif how == "world":
            loader = DataLoader(dataset(), batch_size=4, sampler=DistributedSampler(dataset()))
        elif how == "rank 1" and dist.get_rank() == 1:
            optimizer = torch.optim.SGD(classifier().parameters(), lr=0.1)
        try:
            Booster("bf16", registry, data_parallel).boost(model, optimizer, None, loader)
        except ValueError as error:
            return str(error), all(map(torch.equal, before, model.parameters()))
        return "no error", False


WRONG: list[tuple[dict[str, int], str, Any, str]] = [
    ({"tensor": 2}, "", "ddp", "data_parallel='ddp' needs a data axis.*name an axis 'data'"),
    ({"tensor": 2}, "", None, "no spec for 0.weight, 0.bias.*say how each parameter is laid out"),
    ({"data": 2}, "split", "ddp", r"0.weight, P\('data'\), contains the data axis 'data' .*; give data_parallel=None"),
    ({"data": 2}, "split", "fsdp", "assumes that every parameter is replicated over the data axes"),
    ({"data": 2}, "stepped", "fsdp", "has states of the old parameters; call boost before the optimizer's first step"),
    (
        {"data": 2},
        "wrapped",
        "ddp",
        "the model contains a DistributedDataParallel, which is already data parallel; give the bare model",
    ),
    (
        {"data": 2},
        "shuffled",
        None,
        r"the loader's RandomSampler doesn't divide its samples between the 2 data coordinates \(.*\); create the loader w",
    ),
    ({"tensor": 2}, "world", None, "DistributedSampler has rank [01] of 2, but this rank has data coordinate 0 of 1"),
    ({"data": 2}, "rank 1", "ddp", "parameters of the optimizer are not parameters of the model"),
]


@pytest.mark.parametrize(("axes", "how", "data_parallel", "message"), WRONG, ids=lambda item: str(item)[:20])
def test_boost_rejects_unsupported_combination_on_every_rank(
    axes: dict[str, int], how: str, data_parallel: Any, message: str, world: World
) -> None:
    """The parameters of the model stay unchanged."""
    for text, untouched in world.run(2, first_words, axes, how, data_parallel):
        assert re.search(message, text), text
        assert untouched


def one_sampler_a_rank() -> Tensor:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        sampler: Any = DistributedSampler(dataset(), shuffle=False)
        model = classifier()
        loader = DataLoader(dataset(), batch_size=4, sampler=sampler)
        _, _, _, loader, _ = Booster("fp32", registry).boost(model, torch.optim.SGD(model.parameters()), None, loader)
        return torch.cat([x for x, _ in loader])


def test_boost_accepts_distributed_sampler_over_data_axes(world: World) -> None:
    assert len(torch.cat(world.run(2, one_sampler_a_rank)).unique(dim=0)) == 48


class Evens:
    """A user-defined batch sampler that yields every second sample, starting at number ``rank``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index, index + 2] for index in range(self.rank, 48, 4)])


class Stream(IterableDataset[Tensor]):
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.start, self.start + 8.0))


def loader_of(how: str, registry: ProcessGroupRegistry) -> Any:
    data, rank = dataset(), registry.rank("data")
    if how == "batches of a distributed sampler":
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank)
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))
    if how == "batches of another distributed sampler":
        sampler = DistributedSampler(data, num_replicas=4, rank=registry.global_rank)
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))
    if how == "own batch sampler":
        return DataLoader(data, batch_sampler=Evens(rank))
    if how == "shuffled batches":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False))
    if how == "weighted":
        return DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 48, 48))
    if how == "subset":
        return DataLoader(data, 4, sampler=SubsetRandomSampler(range(10)))
    starts = {"equal streams": 0, "streams": 8 * rank, "streams of all ranks": 8 * registry.global_rank}
    return DataLoader(Stream(starts[how]), 4)


def boosted_with(how: str) -> str:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        model = classifier()
        declare(model, {"*": P()})
        loader = loader_of(how, registry)
        try:
            Booster("fp32", registry).boost(model, torch.optim.SGD(model.parameters()), None, loader)
        except ValueError as error:
            return str(error)
        return "" if how != "streams" or len(list(loader)) == 2 else "samples are lost"


LOADERS = {
    "batches of a distributed sampler": "",
    "batches of another distributed sampler": r"DistributedSampler has rank [0-3] of 4, but this rank has data coordinate",
    "own batch sampler": "",
    "shuffled batches": r"the loader's RandomSampler doesn't divide its samples between the 2 data coordinates \(.*\);",
    "weighted": "the loader's WeightedRandomSampler doesn't divide its samples between the 2 data coordinates",
    "subset": "the loader's SubsetRandomSampler doesn't divide its samples",
    "streams": "",
    "equal streams": "ranks 0 and 2 begin with the same samples, but the ranks have different data coordinates; select",
    "streams of all ranks": "ranks 0 and 1 begin with different samples, but the ranks have the same data coordinate",
}


def test_boost_accepts_only_loaders_that_distribute_samples_over_data_ranks(world: World) -> None:
    for (how, message), texts in zip(
        LOADERS.items(), world.run_each(boosted_with, [(4, (how,)) for how in LOADERS]), strict=True
    ):
        for text in texts:
            assert re.search(message, text) if message else text == "", (how, texts)


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        ("shuffled batches", "prepare_dataloader(dataset, batch_size, shuffle=True, ...)"),
        ("in order", "prepare_dataloader(dataset, batch_size, shuffle=False, ...)"),
        ("in order", "sampler=DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=False)"),
        ("batches of another distributed sampler", "prepare_dataloader(dataset, batch_size, shuffle=True, ...)"),
        ("subset", "prepare_dataloader(subset, batch_size, shuffle=True, ...)"),
        ("subset", "subset = torch.utils.data.Subset(dataset, indices)"),
        ("weighted", "prepare_dataloader(subset, batch_size, shuffle=False, ...)"),
        ("weighted", "in each epoch, subset = torch.utils.data.Subset(dataset, [*sampler])"),
    ],
)
def test_loader_advice_keeps_the_samples_and_the_order_of_the_given_loader(how: str, advice: str) -> None:
    registry = SimpleNamespace(
        topology=Topology(data=2), size=lambda *_: 2, rank=lambda *_: 0, global_rank=0, coordinate={"data": 0}
    )
    loader = DataLoader(dataset(), 4) if how == "in order" else loader_of(how, registry)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(advice)):
        check_loader(loader, registry)  # type: ignore[arg-type]


def test_loader_advice_on_mesh_without_sample_axes_is_valid() -> None:
    """On such a mesh, ``registry.rank(*registry.topology.sample_axes)`` raises."""
    with ProcessGroupRegistry(Topology(tensor=1)) as registry:
        sampler: Any = DistributedSampler(dataset(), num_replicas=2, rank=1)
        with pytest.raises(
            ValueError,
            match=r"rank 1 of 2, .*sampler=DistributedSampler\(dataset, num_replicas=1, rank=0, shuffle=True\)",
        ):
            check_loader(DataLoader(dataset(), 4, sampler=sampler), registry)
        check_loader(DataLoader(dataset(), 4, sampler=DistributedSampler(dataset(), num_replicas=1, rank=0)), registry)
    with pytest.raises(
        ValueError, match=r"ranks 0 and 1 begin with different samples, .*; give all ranks the same samples"
    ):
        check_contents(["one", "other"], Topology(tensor=2))
