"""Cost of ZeRO: memory, collectives, and their order during backward."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from arguments import arguments, link_of
from meshstep.amp import precision_of
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.states.sharded import Shards, ZeroBucket
from meshstep.parallel import ProcessGroupRegistry, Topology
from optimizers import adamw
from probes import collectives, no_host_reads
from torch import Tensor, nn
from world import World
from zero_models import ZERO2, pieces, small_buckets, wide_model


def cost(shards: bool, gradients: bool, mode: str) -> dict[str, Any]:
    with ProcessGroupRegistry(Topology(data=4)) as registry:
        model = wide_model()
        precision_of(mode).prepare(model, registry)
        options: dict[str, Any] = {"shard_states": "data", "shard_gradients": gradients} if shards else {}
        optimizer = ParallelOptimizer(
            adamw(model.parameters()), registry, **arguments(precision=mode, max_norm=1.0, **options)
        )
        x = torch.randn(8, 64)
        for step in range(3):
            watched = step == 2  # the first steps do additional work
            with collectives() as seen, no_host_reads() if watched else nullcontext():
                for _ in range(2):
                    optimizer.backward(model(x).float().square().mean())
                gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
                optimizer.step()
            optimizer.zero_grad()
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        masters = [piece.tensor for piece in pieces(optimizer) if piece.tensor.dtype != piece.param.dtype]
        return {
            "collectives": dict(seen),
            "gradients": gradient_bytes,
            "states": sum(v.nbytes for v in states),
            "masters": sum(v.nbytes for v in masters),
        }


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_zero_on_four_ranks_needs_quarter_of_state_memory_and_expected_collectives(world: World, mode: str) -> None:
    whole = world.run(4, cost, False, False, mode)[0]
    numel = sum(param.numel() for param in wide_model().parameters())
    assert whole["states"] == pytest.approx(8 * numel, rel=0.001)
    assert whole["masters"] == (4 * numel if mode == "bf16" else 0)
    assert whole["collectives"] == {"all_reduce": 2}  # one for the gradients, one for the norm
    for gradients in (False, True):
        for found in world.run(4, cost, True, gradients, mode):
            assert found["states"] == pytest.approx(whole["states"] / 4, rel=0.05)
            assert found["masters"] == pytest.approx(whole["masters"] / 4, rel=0.05)
            # The only bucket is reduced once per window, or with ZeRO-2 once per micro-batch. One collective measures
            # the norm.
            reduced = 2 if gradients else 1
            assert found["collectives"] == {
                "reduce_scatter_single": reduced,
                "all_reduce": 1,
                "all_gather_single": 1,
            }
            assert found["gradients"] == (0 if gradients else 4 * numel)


def backward_order(uses_all: bool) -> tuple[list[list[str]], int]:
    """Return the buckets that ZeRO-2 reduces, in order, as parameter names; and how many are reduced during
    backward."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(64 * 128 * 4):
        model = wide_model()
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **arguments(**ZERO2))
        names = {id(param): name for name, param in model.named_parameters()}
        order: list[list[str]] = []
        in_backward: list[int] = []
        original = ZeroBucket.start

        def watched(bucket: Any, summed: bool = False) -> Any:
            order.append([names[id(param)] for param in bucket.params])
            return original(bucket, summed)

        with mock.patch.object(ZeroBucket, "start", watched):
            x = torch.randn(8, 64, requires_grad=True)
            layers = list(model.children())
            hidden = nn.Sequential(*layers[:4])(x)
            if uses_all or registry.coordinate["data"] == 0:
                hidden = nn.Sequential(*layers[4:])(hidden)
            x.register_hook(lambda gradient: in_backward.append(len(order)))
            optimizer.backward(hidden.square().mean())
            optimizer.step()
        return order, in_backward[0]


def test_zero2_reduces_buckets_during_backward_in_same_order_on_all_ranks(world: World) -> None:
    everything = [["2.bias", "4.weight", "4.bias", "5.weight", "5.bias"], ["2.weight"], ["0.bias"], ["0.weight"]]
    for uses_all in (True, False):
        (first, while_running), (second, meanwhile) = world.run(2, backward_order, uses_all)
        assert first == second == everything
        assert while_running >= 2
        # A rank without gradients of the last layers cannot start reductions before its backward ends.
        assert meanwhile == (while_running if uses_all else 0)


def bytes_of_kept_gradients() -> tuple[int, int]:
    """Return the bytes of the storages that hold the gradient slices of ZeRO-2 after backward, and of full gradients."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = wide_model()
        states = Sharded("tensor", gradients=True)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, states=states)
        optimizer.backward(model(torch.randn(8, 64, generator=torch.Generator().manual_seed(0))).square().mean())
        parts = [shard.gradient for bucket in link_of(optimizer, Shards).buckets for shard in bucket.shards]
        storages = [part.untyped_storage() for part in parts if part is not None]
        assert all(param.grad is None for param in model.parameters())
        kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(kept.values()), sum(param.nbytes for param in model.parameters())


def test_sharded_gradients_over_model_axis_do_not_keep_full_gradients_alive(world: World) -> None:
    for kept, full in world.run(2, bytes_of_kept_gradients):
        assert full / 2 <= kept < full * 0.55


def is_freed(gradients: bool) -> bool:
    """Return True if deleting an optimizer frees the transform of `Sharded` without the garbage collector."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = wide_model()
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, states=Sharded("data", gradients=gradients))
        optimizer.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
        transform = weakref.ref(link_of(optimizer, Shards))
        gc.collect()
        gc.disable()
        try:
            del optimizer
            return transform() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("gradients", [False, True])
def test_shards_of_deleted_optimizer_are_freed_immediately(world: World, gradients: bool) -> None:
    assert world.run(2, is_freed, gradients) == [True, True]
