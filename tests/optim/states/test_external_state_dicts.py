"""State dicts used by other code: trainers that create states before loading, DCP, the state of another rank."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from fully_sharded import adamw, data, sharded_net
from meshstep.amp import Bf16, Mode
from meshstep.optim import ParallelOptimizer, Sharded, TorchStates
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from world import World

FSDP, ZERO, SPLIT, REPLICAS = "fully_shard", "ZeRO", "a declared split", "replicas"


class Built:
    """A model and its optimizer with layout ``kind``: `fully_shard`, ZeRO-1, declared shards, or replicas."""

    def __init__(self, kind: str, registry: ProcessGroupRegistry, precision: Mode = "fp32") -> None:
        self.kind = kind
        options: dict[str, Any] = {}
        if kind == FSDP:
            self.model: nn.Module = sharded_net(registry, torch.bfloat16 if precision == "bf16" else torch.float32)
        else:
            # With the same seed, the shards of both ranks would be equal.
            torch.manual_seed(4 + (registry.global_rank if kind == SPLIT else 0))
            self.model = nn.Linear(6, 4)
            if precision == "bf16":
                Bf16().prepare(self.model, registry)
            for name, param in self.model.named_parameters():
                annotate(param, P("tensor") if kind == SPLIT else P(), name)
            options = {"states": Sharded("data")} if kind == ZERO else {}
        self.optimizer = ParallelOptimizer(adamw(self.model.parameters()), registry, precision=precision, **options)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            x = data(step).to(next(self.model.parameters()).dtype)
            if self.kind == FSDP:
                loss = self.model(x).sum()
            else:
                loss = self.model(torch.cat([x, x[:, :1]], 1)).square().mean().float()
            self.optimizer.backward(loss)
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def axes_of(kind: str) -> dict[str, int]:
    return {"tensor": 2} if kind == SPLIT else {"data": 2}


def initialized(kind: str, precision: Mode) -> None:
    with ProcessGroupRegistry(Topology(roles=None, **axes_of(kind))) as registry:
        one = Built(kind, registry, precision)
        one.train(0, 4)
        saved = copy.deepcopy(one.optimizer.state_dict())
        weights = {name: value.clone() for name, value in one.model.state_dict().items()}
        expected = one.train(4, 7)

        # Act like a trainer that loads into the existing tensors of a state dict, and therefore needs all of them.
        other = Built(kind, registry, precision)
        before = [param.detach().clone() for group in other.optimizer.param_groups for param in group["params"]]
        rates = [group["lr"] for group in other.optimizer.param_groups]
        for group in other.optimizer.param_groups:
            group["lr"] = 0.0
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        other.optimizer.step()
        other.optimizer.zero_grad()
        for group, rate in zip(other.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        after = [param.detach() for group in other.optimizer.param_groups for param in group["params"]]
        assert all(map(torch.equal, before, after))
        made = other.optimizer.state_dict()
        assert made["state"].keys() == saved["state"].keys()
        for position, state in made["state"].items():
            assert state.keys() == saved["state"][position].keys()
            for key, value in state.items():
                value.copy_(saved["state"][position][key])
        made["meshstep"] = saved["meshstep"]
        other.model.load_state_dict(weights)
        other.optimizer.load_state_dict(made)
        assert other.train(4, 7) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [FSDP, ZERO, SPLIT, REPLICAS])
def test_states_created_by_step_with_zero_gradients_can_be_filled_and_loaded(
    world: World, kind: str, precision: Mode
) -> None:
    world.run(2, initialized, kind, precision)


def cleared_by_the_model(precision: Mode) -> None:
    """Clear gradients through the model after clipping; the step must not use them."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        built = Built(FSDP, registry, precision)
        built.train(0, 1)
        x = data(1).to(next(built.model.parameters()).dtype)
        built.optimizer.backward(built.model(x).sum())
        built.optimizer.clip_grad_by_norm(1.0)
        built.model.zero_grad()
        built.optimizer._window.close()
        stats = built.optimizer.step()
        assert stats is not None
        assert float(stats.total_norm) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_cleared_by_model_zero_grad_after_clipping_are_not_used(world: World, precision: Mode) -> None:
    world.run(2, cleared_by_the_model, precision)


def load_state_of_rank_0(kind: str, through_a_file: bool) -> str:
    """Load the optimizer state of rank 0 on every rank, and return the error message of this rank; "" without an error."""
    with ProcessGroupRegistry(Topology(roles=None, **axes_of(kind))) as registry:
        built = Built(kind, registry)
        built.train(0, 1)
        own = built.optimizer.state_dict()
        if through_a_file:
            file = io.BytesIO()
            torch.save(own, file)
            file.seek(0)
            own = torch.load(file, weights_only=True)
        built.optimizer.load_state_dict(own)
        given: list[Any] = [own]
        torch.distributed.broadcast_object_list(given, src=0)
        before = [
            value.clone() for s in built.optimizer.state.values() for value in s.values() if isinstance(value, Tensor)
        ]
        try:
            built.optimizer.load_state_dict(given[0])
        except ValueError as error:
            after = [value for s in built.optimizer.state.values() for value in s.values() if isinstance(value, Tensor)]
            assert all(map(torch.equal, before, after))
            return str(error)
        return ""


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize(("kind", "axis"), [(FSDP, "data"), (ZERO, "data"), (SPLIT, "tensor")])
def test_loading_sharded_state_of_another_rank_is_rejected_on_all_ranks(
    world: World, kind: str, axis: str, through_a_file: bool
) -> None:
    for text in world.run(2, load_state_of_rank_0, kind, through_a_file):
        assert f"saved at mesh coordinate {axis} 0 of 2, but this rank has mesh coordinate {axis} 1 of 2" in text
        assert "load on every rank the state that the same rank saved, or use save_checkpoint" in text


def test_replica_can_load_state_of_another_replica(world: World) -> None:
    assert world.run(2, load_state_of_rank_0, REPLICAS, True) == ["", ""]


def whole_in_a_split(path: str) -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        saved = torch.load(path, weights_only=True)
        with pytest.raises(ValueError, match=r"mesh coordinate none \(unsharded parameters") as caught:
            Built(SPLIT, registry).optimizer.load_state_dict(saved)
        return str(caught.value)


def save_whole(path: str) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        built = Built(REPLICAS, registry)
        built.train(0, 1)
        torch.save(built.optimizer.state_dict(), path)


def test_state_of_unsharded_parameters_is_rejected_by_sharded_model(world: World, tmp_path: Any) -> None:
    world.run(1, save_whole, str(tmp_path / "state.pt"))
    for text in world.run(2, whole_in_a_split, str(tmp_path / "state.pt")):
        assert "continue on the mesh and with the layouts of the saved run, or use save_checkpoint" in text


def through_dcp(kind: str, path: str) -> str:
    with ProcessGroupRegistry(Topology(roles=None, **axes_of(kind))) as registry:
        built = Built(kind, registry)
        built.train(0, 1)
        try:
            save({"optim": built.optimizer.state_dict()}, checkpoint_id=path)
        except CheckpointException as error:
            return str(error)
        return ""


@pytest.mark.parametrize("kind", [FSDP, ZERO, SPLIT])
def test_saving_rank_dependent_state_dict_with_dcp_is_rejected(world: World, tmp_path: Any, kind: str) -> None:
    for text in world.run(2, through_dcp, kind, str(tmp_path)):
        assert "use meshstep.optim.save_checkpoint" in text


def test_state_dict_of_replicas_can_be_saved_with_dcp(world: World, tmp_path: Any) -> None:
    assert world.run(2, through_dcp, REPLICAS, str(tmp_path)) == ["", ""]


def asked_by_torch(kind: str, precision: Mode) -> str:
    with ProcessGroupRegistry(Topology(roles=None, **axes_of(kind))) as registry:
        built = Built(kind, registry, precision)
        built.train(0, 1)
        try:
            get_optimizer_state_dict(built.model, built.optimizer)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(("kind", "precision"), [(FSDP, "fp32"), (ZERO, "fp32"), (SPLIT, "fp32"), (REPLICAS, "bf16")])
def test_get_optimizer_state_dict_rejects_sharding_and_master_weights(world: World, kind: str, precision: Mode) -> None:
    for text in world.run(2, asked_by_torch, kind, precision):
        assert "pass these functions meshstep.optim.TorchStates(optimizer), or use save_checkpoint" in text


def test_get_optimizer_state_dict_accepts_replicas_without_master_weights(world: World) -> None:
    assert world.run(2, asked_by_torch, REPLICAS, "fp32") == ["", ""]


def test_get_optimizer_state_dict_before_first_step_requires_torch_states() -> None:
    model = nn.Linear(3, 2)
    registry = ProcessGroupRegistry(Topology())
    optimizer = ParallelOptimizer(torch.optim.AdamW(model.parameters()), registry, accumulation_steps=2)
    with pytest.raises(ValueError, match=r"has no states yet.*TorchStates"):
        get_optimizer_state_dict(model, optimizer)
    made: Any = get_optimizer_state_dict(model, TorchStates(optimizer))["state"]
    keys = ["exp_avg", "exp_avg_sq", "step"]
    assert {name: list(state) for name, state in made.items()} == {"weight": keys, "bias": keys}
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    assert len(get_optimizer_state_dict(model, optimizer)["state"]) == 2
