"""Master weights and main gradients: compared with float32, and with saving, accumulation, checkpointing and DDP."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.amp import MasterWeights
from meshstep.parallel import P, annotate, spec_of
from small_models import Mlp, mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from world import World

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DEVICES = pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
HALF = pytest.mark.parametrize("dtype", [F16, BF16])


def inputs(index: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(index)).to(dtype)


def loss_of(model: nn.Module, index: int, dtype: torch.dtype) -> Tensor:
    loss: Tensor = model(inputs(index, dtype).to(next(model.parameters()).device)).float().square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, masters: MasterWeights, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for index in steps:
        loss_of(model, index, dtype).backward()
        masters.collect()
        masters.step(optimizer.step)
        masters.zero_grad()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *masters, *state)]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@HALF
@DEVICES
@pytest.mark.parametrize("main_grads", [True, False])
def test_masters_equal_float32_weights_trained_with_the_same_gradients(
    dtype: torch.dtype, device: str, main_grads: bool
) -> None:
    """The reference is a float32 copy of the weights that gets the same half-precision gradients, cast to float32."""
    model = mlp(dtype).to(device)
    twin = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    reference = torch.optim.AdamW(twin, lr=3e-3, fused=True)
    masters = MasterWeights(optimizer, main_grads=main_grads)
    for index in range(6):
        grads = torch.autograd.grad(loss_of(model, index, dtype), list(model.parameters()))
        for param, grad in zip(twin, grads, strict=True):
            param.grad = grad.float()
        reference.step()
        train(model, optimizer, masters, range(index, index + 1))
        assert_same_bits([master.detach() for _, master in masters.pairs], [param.detach() for param in twin])
        assert_same_bits([param.detach() for param in model.parameters()], [param.detach().to(dtype) for param in twin])


@HALF
def test_main_grads_sum_a_thousand_small_gradients_in_float32(dtype: torch.dtype) -> None:
    def accumulate(weight: nn.Parameter) -> float:
        for _ in range(1000):
            (weight.float() * 1e-3).sum().backward()
        assert weight.grad is not None
        return float(weight.grad.float().mean())

    with_masters = nn.Parameter(torch.ones(5, dtype=dtype))
    masters = MasterWeights(torch.optim.SGD([with_masters], lr=1.0))
    step = float(torch.tensor(1e-3, dtype=dtype))  # gradient of one backward of a half-precision weight
    assert accumulate(with_masters) == pytest.approx(1000 * step, rel=1e-5)
    masters.collect()
    assert masters.pairs[0][1].grad is with_masters.grad

    stalled = accumulate(nn.Parameter(torch.ones(5, dtype=dtype)))
    assert abs(stalled - 1.0) > (0.4 if dtype == BF16 else 0.001), "half-precision gradients should lose small terms"


def test_small_updates_accumulate_in_masters_and_reach_the_model() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    masters = MasterWeights(optimizer)
    for _ in range(1000):
        weight.float().sum().backward()
        masters.collect()
        masters.step(optimizer.step)
        masters.zero_grad()
    assert masters.pairs[0][1].tolist() == pytest.approx([0.0] * 3, abs=1e-4)
    assert weight.tolist() == pytest.approx([0.0] * 3, abs=1e-4)


@HALF
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_main_grads_sum_repeated_backwards_with_activation_checkpointing(
    dtype: torch.dtype, use_reentrant: bool
) -> None:
    model, plain = mlp(dtype), mlp(dtype)
    MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    for index in range(3):
        x = inputs(index, dtype).requires_grad_()
        checkpoint(model, x, use_reentrant=use_reentrant).float().square().mean().backward()
    expected = [torch.zeros_like(param, dtype=F32) for param in plain.parameters()]
    for index in range(3):
        for total, grad in zip(
            expected, torch.autograd.grad(loss_of(plain, index, dtype), list(plain.parameters())), strict=True
        ):
            total += grad.float()
    for param, total in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        assert param.grad.dtype == F32
        assert torch.equal(param.grad, total)


def test_weight_used_twice_has_one_master_and_float32_gradient_sum() -> None:
    model = nn.Linear(4, 4, bias=False, dtype=BF16)
    other = nn.Linear(4, 4, bias=False, dtype=BF16)
    other.weight = model.weight
    optimizer = torch.optim.SGD(nn.ModuleList([model, other]).parameters(), lr=0.5)
    masters = MasterWeights(optimizer)
    assert len(masters.pairs) == 1
    (model.weight.float().sum() * 1.0 + other.weight.float().sum() * 2.0**-10).backward()
    assert model.weight.grad is not None
    assert float(model.weight.grad[0, 0]) == 1 + 2.0**-10


def test_masters_replace_only_trainable_half_precision_parameters() -> None:
    first, norm, last = nn.Linear(3, 4, dtype=BF16), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=BF16)
    model = nn.Sequential(first, norm, last)
    first.bias.requires_grad_(False)
    annotate(last.weight, P("tensor"), "last")
    names = [name for name, _ in model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": list(model[:2].named_parameters())},
        {"params": list(last.named_parameters()), "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    masters = MasterWeights(optimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert optimizer.param_groups[0]["param_names"] == names[:4]
    for (_, param), found in zip(model.named_parameters(), held, strict=True):
        if param.dtype == F32 or not param.requires_grad:
            assert found is param
        else:
            assert found is not param
            assert torch.equal(found, param.float())
    assert spec_of(held[4]) == P("tensor")
    assert masters.state_dict()["masters"].keys() == {0, 4, 5}
    model(torch.ones(5, 3, dtype=BF16)).float().sum().backward()
    masters.collect()
    masters.step(optimizer.step)
    assert torch.equal(last.weight, held[4].to(BF16))


def test_gradient_of_unfrozen_parameter_raises_until_refresh_makes_its_master() -> None:
    model = mlp(BF16)
    model.first.requires_grad_(False)
    annotate(model.first.weight, P(), "first.weight")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    masters = MasterWeights(optimizer)
    train(model, optimizer, masters, range(2))
    model.first.requires_grad_(True)
    loss_of(model, 5, BF16).backward()
    with pytest.raises(
        RuntimeError, match=r"first\.weight has a gradient, but was frozen .* call MasterWeights.refresh\(\)"
    ):
        masters.collect()
    assert masters.refresh() == 2
    assert masters.refresh() == 0
    masters.collect()
    before = model.first.weight.detach().clone()
    masters.step(optimizer.step)
    assert not torch.equal(model.first.weight, before)
    assert list(masters.state_dict()["masters"]) == [0, 1, 2, 3, 4, 5]


def test_existing_optimizer_state_moves_to_masters_and_gradients_become_float32() -> None:
    model = mlp(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for index in range(2):
        loss_of(model, index, BF16).backward()
        optimizer.step()
    before = [dict(optimizer.state[param]) for param in model.parameters()]
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    masters = MasterWeights(optimizer)
    assert len(optimizer.state) == len(masters.pairs)
    for (param, master), old, grad in zip(masters.pairs, before, grads, strict=True):
        assert optimizer.state[master]["exp_avg"].dtype == F32
        assert torch.equal(optimizer.state[master]["exp_avg"], old["exp_avg"].float())
        assert float(optimizer.state[master]["step"]) == 2
        assert param.grad is not None
        assert torch.equal(param.grad, grad.float())
    train(model, optimizer, masters, range(2, 4))


@HALF
def test_training_from_loaded_masters_continues_bitwise_identically(dtype: torch.dtype) -> None:
    def built(seed: int) -> tuple[Mlp, torch.optim.Optimizer, MasterWeights]:
        model = mlp(dtype, seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        return model, optimizer, MasterWeights(optimizer)

    model, optimizer, masters = built(0)
    train(model, optimizer, masters, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "own": masters.state_dict()}, file)
    train(model, optimizer, masters, range(4, 8))

    file.seek(0)
    saved = torch.load(file)
    assert {master.dtype for master in saved["own"]["masters"].values()} == {F32}
    other, other_optimizer, other_masters = built(1)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    other_masters.load_state_dict(saved["own"])
    train(other, other_optimizer, other_masters, range(4, 8))
    assert_same_bits(tensors_of(other, other_optimizer), tensors_of(model, optimizer))


def test_mismatched_master_state_raises_and_changes_nothing() -> None:
    model = mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    before = tensors_of(model, optimizer)
    good = {position: torch.zeros_like(master) for position, master in masters.state_dict()["masters"].items()}
    without_masters = r"no master weights, so it was saved in a precision mode without them.*reload_from_model\(\)"
    with pytest.raises(ValueError, match=without_masters):
        masters.load_state_dict({"state": {}})
    with pytest.raises(ValueError, match=r"the state has 5 master weights, at positions 0, 1, 2, 3, 4, but .* has 6"):
        masters.load_state_dict({"masters": {key: good[key] for key in range(5)}})
    with pytest.raises(
        ValueError, match=r"saved master weight 5 has shape \(9,\), but that of a parameter of shape \(3,\)"
    ):
        masters.load_state_dict({"masters": {**good, 5: torch.zeros(9)}})
    assert_same_bits(tensors_of(model, optimizer), before)
    masters.load_state_dict({"masters": good})
    assert not any(param.any() for param in model.parameters())


def test_master_weights_collect_raises_if_model_weights_were_overwritten() -> None:
    model = mlp(BF16)
    annotate(model.first.weight, P(), "first.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    model.load_state_dict(mlp(BF16, seed=9).state_dict())
    loss_of(model, 0, BF16).backward()
    with pytest.raises(RuntimeError, match=r"first\.weight was changed since the last step.*reload_from_model\(\)"):
        masters.collect()
    masters.reload_from_model()
    masters.collect()
    assert torch.equal(masters.pairs[0][1], mlp(BF16, seed=9).first.weight.float())
    masters.step(optimizer.step)
    # Averaged weights that are swapped in for evaluation and out again are no change: masters keep their low bits.
    low_bits = masters.pairs[0][1].detach().clone()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(mlp(BF16, seed=4).state_dict())
    model.load_state_dict(kept)
    masters.collect()
    assert torch.equal(masters.pairs[0][1], low_bits)


def test_master_weights_collect_accepts_rewritten_equal_weights_with_nan() -> None:
    model = mlp(BF16)
    with torch.no_grad():
        model.first.weight[0, 0] = torch.nan
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert masters.find_overwritten() is None
    masters.collect()


def test_skipped_step_with_masters_changes_nothing() -> None:
    model = mlp(F16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    masters = MasterWeights(optimizer)
    train(model, optimizer, masters, range(3))
    before = tensors_of(model, optimizer)
    loss_of(model, 3, F16).backward()
    masters.collect()
    skipping: Any = optimizer
    skipping.grad_scale, skipping.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    masters.step(optimizer.step)
    assert_same_bits(tensors_of(model, optimizer), before)


def test_zero_grad_clears_gradients_of_parameters_and_masters() -> None:
    model = mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)

    def backward() -> list[Tensor]:
        loss_of(model, 0, BF16).backward()
        masters.collect()
        return [master.grad.clone() for _, master in masters.pairs if master.grad is not None]

    first = backward()
    masters.zero_grad()
    assert all(param.grad is None and master.grad is None for param, master in masters.pairs)
    assert_same_bits(backward(), first)
    masters.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param, _ in masters.pairs)
    assert_same_bits(backward(), first)
    model.zero_grad()
    assert_same_bits(backward(), first)
    # A likely mistake: this clears the gradients of the masters but not the main gradients of the model.
    optimizer.zero_grad()
    loss_of(model, 0, BF16).backward()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) of the ParallelOptimizer or MasterWeights instead"):
        masters.collect()
    masters.zero_grad()
    assert_same_bits(backward(), first)


def test_step_with_masters_leaves_parameters_without_gradient_unchanged() -> None:
    model = mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    model.first(inputs(0, BF16)).float().sum().backward()
    before = model.last.weight.detach().clone()
    masters.collect()
    masters.step(optimizer.step)
    assert torch.equal(model.last.weight, before)
    empty = MasterWeights(torch.optim.SGD([{"params": []}], lr=0.1))
    empty.collect()
    empty.step(lambda: None)
    assert empty.state_dict() == {"masters": {}}


def test_add_param_group_makes_masters() -> None:
    model, head = mlp(BF16), nn.Linear(3, 2, dtype=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(10, 6\) already has a master weight in this optimizer"
    ):
        masters.add_param_group({"params": [*head.parameters(), model.first.weight]})
    assert len(optimizer.param_groups) == 1
    masters.add_param_group({"params": head.parameters(), "lr": 0.5})
    assert len(masters.pairs) == 8
    head(model(inputs(0, BF16))).float().sum().backward()
    masters.collect()
    masters.step(optimizer.step)
    assert torch.equal(head.weight, masters.pairs[6][1].to(BF16))


def test_master_has_spec_and_strides_of_its_parameter() -> None:
    model = nn.Conv2d(3, 4, 3, dtype=BF16).to(memory_format=torch.channels_last)
    annotate(model.weight, P("tensor"), "conv.weight")
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    master = masters.pairs[0][1]
    assert spec_of(master) == P("tensor")
    assert master.stride() == model.weight.stride()


@pytest.mark.parametrize("sparse", [True, False])
def test_masters_accept_dense_and_sparse_embedding_gradients(sparse: bool) -> None:
    embedding = nn.Embedding(9, 4, sparse=sparse, dtype=BF16)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.25)
    masters = MasterWeights(optimizer)
    expected = embedding.weight.detach().float()
    expected[[1, 5]] -= 0.25 * torch.tensor([[4.0], [2.0]])
    for _ in range(2):
        embedding(torch.tensor([1, 1, 5])).float().sum().backward()
    masters.collect()
    masters.step(optimizer.step)
    assert torch.equal(masters.pairs[0][1], expected)


def in_ddp(main_grads: bool) -> tuple[list[float], str]:
    """Train two data replicas under DDP; return the sums of the masters, and the error if there is one."""
    rank = torch.distributed.get_rank()
    model = mlp(BF16)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer, main_grads=main_grads)
    error = ""
    try:
        for index in range(2):
            F.mse_loss(wrapped(inputs(10 * index + rank, BF16)).float(), torch.ones(7, 3)).backward()
            masters.collect()
            masters.step(optimizer.step)
            masters.zero_grad()
    except RuntimeError as problem:
        error = str(problem)
    return [float(master.detach().double().sum()) for _, master in masters.pairs], error


def test_masters_under_ddp_need_main_grads_false(world: World) -> None:
    """If the first assertion fails, DDP supports grad_dtype, and ``main_grads=False`` is no longer needed."""
    assert all("Expected BFloat16, got Float" in error for _, error in world.run(2, in_ddp, True))
    (first, no_error), (second, _) = world.run(2, in_ddp, False)
    assert no_error == ""
    assert first == second
    assert first != [float(param.detach().double().sum()) for param in mlp(BF16).parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adafactor(params),
        lambda params: torch.optim.RMSprop(params, lr=1e-3),
    ],
)
def test_weights_equal_rounded_masters_with_sgd_adafactor_and_rmsprop(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    model = mlp(BF16)
    optimizer = make(model.parameters())
    masters = MasterWeights(optimizer)
    train(model, optimizer, masters, range(3))
    for param, master in masters.pairs:
        assert torch.equal(param, master.to(BF16))


def test_master_weights_compare_weights_only_after_write_by_other_code() -> None:
    model = mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    with mock.patch.object(torch, "equal", side_effect=AssertionError("compared")):
        train(model, optimizer, masters, range(3))
        with torch.no_grad():
            model.first.bias.mul_(1)  # a write by other code makes the next `collect` compare
        with pytest.raises(AssertionError, match="compared"):
            masters.collect()
