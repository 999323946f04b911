"""ZeRO-1 and ZeRO-2: unusual parameters, skipped steps, resuming, and weights changed by other code."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from arguments import arguments, link_of
from meshstep.amp import NaiveFp16
from meshstep.optim import ParallelOptimizer
from meshstep.optim.states.sharded import Shards
from meshstep.parallel import ProcessGroupRegistry, Topology
from optimizers import adamw, stepped
from precision_modes import MODES
from torch import Tensor
from world import World
from zero_models import ZERO1, ZERO2, Odd, difference, inputs, odd_steps, pieces, small_buckets


def train_odd(options: dict[str, Any]) -> dict[str, Tensor]:
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(256):
        model = Odd(registry)
        optimizer = ParallelOptimizer(adamw(model.named_parameters()), registry, **arguments(max_norm=1.0, **options))
        odd_steps(model, optimizer, registry, range(8))
        names = [name for group in optimizer.param_groups for name in group["param_names"]]
        assert len(names) == len(stepped(optimizer))
        if options:
            assert model.expert in {piece.tensor for piece in pieces(optimizer)}
            assert optimizer.plan.counted == sum(p.numel() for p in Odd().parameters())
            assert "shards of parameters over 'data' (optimizer-state sharding)" in str(optimizer.plan)
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_zero_with_scalar_noncontiguous_frozen_or_unused_parameters_matches_replicated_states(world: World) -> None:
    runs = world.run(2, train_odd, {})
    for options in (ZERO1, ZERO2):
        for found, expected in zip(world.run(2, train_odd, options), runs, strict=True):
            assert difference(found, expected) <= 1e-6


def cover(options: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Check the shards of this rank against the model, and return the ranges that they cover."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(256):
        model = Odd(registry, torch.bfloat16)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **arguments(precision="bf16", **options))
        odd_steps(model, optimizer, registry, range(2))
        named = dict(model.named_parameters())
        found = []
        for piece in pieces(optimizer):
            assert piece.param is named[piece.name]
            part = piece.param.detach().reshape(-1)[piece.offset : piece.offset + piece.tensor.numel()]
            assert torch.equal(piece.tensor.detach().reshape(-1).to(torch.bfloat16), part)
            if piece.param.requires_grad:
                assert piece.tensor.dtype == torch.float32
                assert optimizer.state[piece.tensor]["exp_avg"].shape == piece.tensor.shape
                found.append((piece.name, piece.offset, piece.tensor.numel()))
        return found


@pytest.mark.parametrize("options", [{}, ZERO2, {"offload": 0.5}, {**ZERO1, "offload": 0.5}], ids=str)
def test_stepped_tensors_match_model_and_cover_each_parameter(world: World, options: dict[str, Any]) -> None:
    covered = world.run(2, cover, options)
    if "shard_states" not in options:
        covered = covered[:1]
    sizes = {name: param.numel() for name, param in Odd().named_parameters() if name not in ("frozen", "expert")}
    for name, numel in sizes.items():
        spans = sorted((offset, count) for found in covered for n, offset, count in found if n == name)
        assert [offset for offset, _ in spans] == [sum(c for _, c in spans[:i]) for i in range(len(spans))]
        assert sum(count for _, count in spans) == numel


# Steps, states and weights --------------------------------------------------------------------------------------------


def overflow(options: dict[str, Any]) -> tuple[list[float], bool, int]:
    """Run three steps; in the second, one element of the gradient in rank 1's slice is inf.

    Return the skip flags, whether only the second step changed nothing, and the number of skipped steps.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model, mode = Odd(registry, torch.float16), NaiveFp16(init_scale=4.0)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **arguments(precision=mode, **options))
        found, unchanged = [], True
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(inputs(step, registry.coordinate["data"]).half()))
            if step == 1 and registry.coordinate["data"] == 1:
                mine = pieces(optimizer)[-1]
                shards = link_of(optimizer, Shards).buckets[0].shards
                target = shards[-1].gradient if options["shard_gradients"] else mine.param.grad
                assert target is not None
                target.view(-1)[-1] = inf
            before = [param.detach().clone() for param in (*model.parameters(), *stepped(optimizer))]
            stats = optimizer.step()
            assert stats is not None
            found.append(float(stats.found_inf))
            after = [*model.parameters(), *stepped(optimizer)]
            same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            unchanged &= same == (step == 1)
        return found, unchanged, optimizer.skipped_steps


@pytest.mark.parametrize("gradients", [False, True])
def test_overflow_in_gradient_slice_of_one_rank_skips_step_on_all_ranks(world: World, gradients: bool) -> None:
    for found, unchanged, skipped in world.run(2, overflow, {**ZERO1, "shard_gradients": gradients}):
        assert found == [0.0, 1.0, 0.0]
        assert unchanged
        assert skipped == 1


def resume(mode: str, options: dict[str, Any]) -> bool:
    """Return whether six steps equal three steps, a reload into new objects, and three more steps, bitwise."""
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    with ProcessGroupRegistry(Topology(data=2)) as registry:

        def make() -> tuple[Odd, ParallelOptimizer]:
            model = Odd(registry, dtype)
            return model, ParallelOptimizer(
                adamw(model.parameters()), registry, **arguments(precision=MODES[mode], **options)
            )

        model, optimizer = make()
        odd_steps(model, optimizer, registry, range(3))
        saved_model = {key: value.clone() for key, value in model.state_dict().items()}
        saved = torch.utils._pytree.tree_map(
            lambda value: value.clone() if isinstance(value, Tensor) else value, optimizer.state_dict()
        )
        odd_steps(model, optimizer, registry, range(3, 6))
        other, again = make()
        odd_steps(other, again, registry, range(1))
        other.load_state_dict(saved_model)
        again.load_state_dict(saved)
        odd_steps(other, again, registry, range(3, 6))
        return all(
            torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        )


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16 stochastic"])
@pytest.mark.parametrize("options", [ZERO1, {**ZERO2, "offload": 0.5}], ids=str)
def test_zero1_and_zero2_resume_bitwise_identically(world: World, mode: str, options: dict[str, Any]) -> None:
    assert world.run(2, resume, mode, options) == [True, True]


def restored_model(mode: str) -> bool:
    """Load only the optimizer state. Return whether its master weights were copied to the model on all ranks."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = Odd(registry, torch.bfloat16)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **arguments(precision=mode, **ZERO1))
        odd_steps(model, optimizer, registry, range(2))
        state = torch.utils._pytree.tree_map(
            lambda value: value.clone() if isinstance(value, Tensor) else value, optimizer.state_dict()
        )
        before = [param.detach().clone() for param in model.parameters()]
        odd_steps(model, optimizer, registry, range(2, 4))
        optimizer.load_state_dict(state)
        return all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_loaded_master_weights_are_copied_to_model_on_all_ranks(world: World) -> None:
    assert world.run(2, restored_model, "bf16") == [True, True]


def late(options: dict[str, Any]) -> dict[str, Tensor]:
    """Wrap an optimizer that has already stepped, and add a param group later.

    Return the parameters, and the gradient norm of each.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = Odd(registry)
        first = [param for name, param in model.named_parameters() if not name.startswith("head")]
        inner = adamw(first)
        model(inputs(0, 0)).backward()
        inner.step()
        inner.zero_grad()
        optimizer = ParallelOptimizer(inner, registry, **arguments(max_norm=1.0, per_parameter_norms=True, **options))
        odd_steps(model, optimizer, registry, range(2))
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-3, "max_norm": 0.5})
        with pytest.raises(ValueError, match=r"in another group already|in more than one parameter group"):
            optimizer.add_param_group({"params": [model.head.bias]})
        odd_steps(model, optimizer, registry, range(2, 5))
        assert optimizer.last_stats is not None
        norms = optimizer.last_stats.parameter_norms
        assert len(norms) == len(list(model.parameters()))
        return {name: p.detach().clone() for name, p in model.named_parameters()} | {
            f"norm of {name}": norm for name, norm in norms.items()
        }


def test_zero_and_offload_match_unsharded_steps_with_existing_states_and_added_groups(world: World) -> None:
    for options in (ZERO1, ZERO2, {"offload": 0.6}, {**ZERO2, "offload": 1.0}):
        for found, expected in zip(world.run(2, late, options), world.run(2, late, {}), strict=True):
            names = {name for name in expected if "frozen" not in name}
            assert difference({n: found[n] for n in names}, {n: expected[n] for n in names}) <= 1e-6


def changed_from_outside(mode: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        dtype = torch.float32 if mode == "fp32" else torch.bfloat16
        model = Odd(registry, dtype)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **arguments(precision=mode, **ZERO1))
        odd_steps(model, optimizer, registry, range(1))
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        odd_steps(model, optimizer, registry, range(1, 2))
        with torch.no_grad():
            for param in model.parameters():
                param.data = param.data + 1  # new values in new memory
                param.mul_(1)
        try:
            odd_steps(model, optimizer, registry, range(2, 3))
        except RuntimeError as error:
            return str(error)
        held = [p.detach().clone() for p in model.parameters()]
        optimizer._chain.write_back()
        assert all(torch.equal(one, other) for one, other in zip(held, model.parameters(), strict=True))
        return f"{float(model.gain.detach()):.1f}"


def test_weights_changed_by_other_code_are_used_in_fp32_and_raise_in_bf16(world: World) -> None:
    assert world.run(2, changed_from_outside, "fp32") == ["2.5", "2.5"]
    for text in world.run(2, changed_from_outside, "bf16"):
        assert "was changed since the last step" in text
