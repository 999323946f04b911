"""The recipes of NEMO_AUTOMODEL.md and VERL.md, in loops with these trainers' order of calls.

The trainers need GPUs, so each loop here repeats the order of calls of one trainer. The model has FSDP2, tensor
parallelism, and experts on another mesh, and is compared with the dense model.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from dtensor_layouts import Net, batch, expert_gradient, experts_on_another_mesh, net
from recipes import recipe
from torch import Tensor
from world import World

MAX_NORM, LR, STEPS = 0.05, 0.1, 2
EXPERT_FACTOR = 4.0  # the loop divides expert gradients by this factor, as Automodel does
Result = tuple[list[float], dict[str, Tensor]]


def loss_of(model: Net, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def set_expert_gradient(model: Net, factor: float) -> None:
    """Set the gradient of the experts, which the forward does not use, to ``factor`` times `expert_gradient`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    experts: Any = model.experts
    grad = factor * expert_gradient()
    sharded = isinstance(experts, DTensor)
    experts.grad = distribute_tensor(grad, experts.device_mesh, experts.placements) if sharded else grad


def full(model: Net) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in model.named_parameters()
    }


def dense() -> Result:
    model = net()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=LR), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch()).backward()
        set_expert_gradient(model, 1.0)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return norms, full(model)


class AutomodelUtils(types.SimpleNamespace):
    """A substitute for Automodel's module, whose functions call each other through the module."""

    def clip_grad_norm(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("the clipping of the recipe should be replaced")

    def scale_grads_and_clip_grad_norm(self, max_grad_norm: float | None, model_parts: list[Net], **given: Any) -> Any:
        for part in model_parts:
            assert part.experts.grad is not None
            part.experts.grad.div_(EXPERT_FACTOR)
        return self.clip_grad_norm(max_grad_norm, model_parts, **given)


def by_automodel() -> Result:
    utils = AutomodelUtils()
    recipe("NEMO_AUTOMODEL.md")["take_over_clipping"](utils)
    model = net()
    ranks = experts_on_another_mesh(model)
    mine = batch().chunk(ranks)[torch.distributed.get_rank() * ranks // 4]
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=LR), []
    for _ in range(STEPS):
        loss_of(model, mine).backward()
        set_expert_gradient(model, EXPERT_FACTOR)
        norms.append(
            float(
                utils.scale_grads_and_clip_grad_norm(
                    MAX_NORM, [model], norm_type=2.0, pp_enabled=False, foreach=True, num_label_tokens=1
                )
            )
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    taken_over: Any = utils.scale_grads_and_clip_grad_norm
    assert taken_over.__self__.clip_grad_norm(None, [model]) == 0.0
    return norms, full(model)


class Engine:
    """An engine in verl's style: micro-batches of a batch, with a divided loss, and one `optimizer_step`."""

    def __init__(self) -> None:
        self.module: Any = net()
        ranks = experts_on_another_mesh(self.module)
        self.data = batch().chunk(ranks)[torch.distributed.get_rank() * ranks // 4]
        self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=LR)
        self.optimizer_config = types.SimpleNamespace(clip_grad=MAX_NORM)

    def optimizer_step(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad))

    def train_batch(self, poison: float = 1.0) -> float:
        for micro_batch in self.data.chunk(2):
            (poison * loss_of(self.module, micro_batch) / 2).backward()
        set_expert_gradient(self.module, poison)
        norm = self.optimizer_step()
        self.optimizer.zero_grad()
        return norm


def by_verl(optimizer_too: bool) -> Result:
    names = recipe("VERL.md")

    class Engine1(Engine):
        pass

    if not optimizer_too:
        names["take_over_clipping"](Engine1)
    engine = Engine1()
    if optimizer_too:
        names["take_over_optimizer"](engine)
    norms = [engine.train_batch() for _ in range(STEPS)]
    before = full(engine.module)
    assert not torch.isfinite(torch.tensor(engine.train_batch(poison=torch.inf)))
    after = full(engine.module)
    assert all(torch.equal(after[name], weight) for name, weight in before.items()), "the step should be skipped"
    return norms, after


def stock_verl() -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        Engine().train_batch()
    return str(error.value)


def assert_as_dense(found: list[Result]) -> None:
    norms, weights = dense()
    assert min(norms) > MAX_NORM, "every step should clip"
    for own_norms, own_weights in found:
        assert own_norms == pytest.approx(norms, rel=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(own_weights[name], weight, rtol=0, atol=1e-12, msg=name)
    assert all(own_norms == found[0][0] for own_norms, _ in found)


pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def test_nemo_automodel_recipe_clips_after_scaling_expert_gradients_like_dense_model(world: World) -> None:
    assert_as_dense(world.run(4, by_automodel))


@pytest.mark.parametrize("optimizer_too", [False, True], ids=["clipping", "optimizer"])
def test_verl_recipe_clips_like_dense_model_and_skips_infinite_steps(world: World, optimizer_too: bool) -> None:
    assert_as_dense(world.run(4, by_verl, optimizer_too))


def test_torch_clipping_of_verl_loop_raises_for_two_meshes(world: World) -> None:
    assert "mesh" in world.run(4, stock_verl)[0].lower()
