"""Bytes sent by a step of full-tensor optimizers, beyond those for gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from home_runs import soap
from measured import MAKES
from meshstep.optim import ParallelOptimizer
from meshstep.optim.step.wrapped_optimizer import own_calls
from meshstep.parallel import ProcessGroupRegistry
from planted import LAYOUTS, Layout, Planted, run_step
from whole_runs import Make, muon
from world import World


@contextmanager
def sent() -> Iterator[dict[str, int]]:
    """Count bytes per collective: sent from this rank for all-to-all, size of the tensor for all-reduce."""
    found = {"all_to_all_single": 0, "all_reduce": 0}

    def counting(name: str, which: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += args[which].numel() * args[which].itemsize
            return function(*args, **kwargs)

        return counted

    with (
        mock.patch.object(dist, "all_to_all_single", counting("all_to_all_single", 1, dist.all_to_all_single)),
        mock.patch.object(dist, "all_reduce", counting("all_reduce", 0, dist.all_reduce)),
    ):
        yield found


def bytes_of(layout: Layout, makes: list[Make]) -> list[dict[str, int]]:
    found = []
    with ProcessGroupRegistry(layout.topology) as registry:
        for make in makes:
            model = Planted(layout, registry.global_rank, torch.float32)
            inner = make(model.named_parameters())
            optimizer = ParallelOptimizer(inner, registry)
            run_step(model, optimizer, 0)
            optimizer.step()
            with sent() as counted, own_calls:
                inner.step()
            found.append(counted)
    return found


def test_full_tensor_optimizers_send_only_missing_shards_updates_norms_and_means(world: World) -> None:
    """On ``tensor=2`` in float32, `down` [4, 8], a stack [4, 2, 3] and a bias [8] are sharded. The two blocks of
    `up` [8, 4] are each on one rank; `table` [6, 4] is replicated."""
    norms, means = ["LAMB", "LARS", "StableAdamW"], ["Adafactor", "CAME"]
    makes = [muon, soap, *(MAKES[name] for name in (*norms, *means))]
    by_rank = world.run(2, bytes_of, LAYOUTS["tensor"], makes)
    sent_there, sent_back = (32 + 24) // 2, (32 + 24) // 2 + 24  # elements on both ranks
    for index in (0, 1):
        assert sum(rank[index]["all_to_all_single"] for rank in by_rank) == 4 * (sent_there + sent_back)
        assert all(rank[index]["all_reduce"] == 0 for rank in by_rank)
    rows_and_columns = (8 + 4) + (4 + 8) + 4 * (2 + 3)
    tensors = 4
    in_float64 = {
        "LAMB": 2 * tensors,
        "LARS": 2 * tensors,
        "StableAdamW": tensors,
        "Adafactor": tensors + rows_and_columns + tensors,
        "CAME": rows_and_columns + 3 * rows_and_columns + 1,
    }
    for rank in by_rank:
        measured = {name: rank[2 + index] for index, name in enumerate((*norms, *means))}
        assert measured == {name: {"all_to_all_single": 0, "all_reduce": 8 * n} for name, n in in_float64.items()}
