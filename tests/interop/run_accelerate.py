"""Training loops of accelerate, without meshstep and with the recipe, on two ranks: run_accelerate.py FOLDER MODEL.

MODEL is the folder of a saved model. Each rank writes norms and weights of each run, and the errors of wrong runs, to
FOLDER/<rank>.pt.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "harness"))

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint, take_over_clipping
from meshstep.parallel import ColumnParallelLinear, ProcessGroupRegistry, Topology
from recipes import recipe
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.distributed import DistributedConfig

MAX_NORM, EPOCHS = 0.05, 2
RECIPE = recipe("ACCELERATE.md")
Run = tuple[list[float], list[Tensor]]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def new_accelerator() -> Any:
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def no_data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(1)))


def watched(accelerator: Any, norms: list[float]) -> None:
    clip = accelerator.clip_grad_norm_

    def noted(*args: Any) -> Tensor:
        norm: Tensor = clip(*args)
        norms.append(float(norm))
        return norm

    accelerator.clip_grad_norm_ = noted


def whole(model: nn.Module) -> list[Tensor]:
    return [
        (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
        for param in model.parameters()
    ]


# Replicated, in DistributedDataParallel ---------------------------------------------------------------------------------


def replicated(how: str, folder: Path) -> Run:
    """Train a replicated model; ``resumed`` runs only the second epoch, from a checkpoint of the run ``ours``.

    Return norms and full weights.
    """
    accelerator, norms = new_accelerator(), list[float]()
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :3]), batch_size=3)
    if how == "stock":
        model, optimizer, loader = accelerator.prepare(*(lambda m: (m, sgd(m.parameters())))(net()), loader)
    else:
        model, optimizer, loader = RECIPE["set_up"](accelerator, net(), sgd, loader)
    watched(accelerator, norms)
    if how == "resumed":
        accelerator.load_state(str(folder))
    for epoch in range(how == "resumed", EPOCHS):
        RECIPE["train_one_epoch"](accelerator, model, optimizer, loader, MAX_NORM)
        if how == "ours" and epoch == 0:
            accelerator.save_state(str(folder))
    return norms, whole(model)


def other_clips() -> tuple[tuple[list[Tensor], list[Tensor]], tuple[float, float], float]:
    """Clip by value, and by norm with a ``max_norm`` of inf, for which the recipe uses ``max_norm`` of the optimizer.

    Return the gradients after clipping by value, with the recipe and with the stock accelerator. Then, for clipping by
    norm, the returned norm and the norm of the clipped gradients. Last, the norm of the gradients before clipping.
    """
    ours, by_value = gradients("ours")
    ours.clip_grad_value_(by_value, 0.01)
    stock, clamped = gradients("stock")
    stock.clip_grad_value_(clamped, 0.01)
    again, by_inf = gradients("ours")
    before = norm_of(by_inf)
    returned = float(again.clip_grad_norm_(by_inf, math.inf))
    return ([grad_of(p) for p in by_value], [grad_of(p) for p in clamped]), (returned, norm_of(by_inf)), before


def gradients(how: str) -> tuple[Any, list[nn.Parameter]]:
    accelerator = new_accelerator()
    if how == "stock":
        model = accelerator.prepare(net())
    else:
        model, optimizer, _ = RECIPE["set_up"](accelerator, net(), sgd, no_data())
        optimizer.optimizer.max_norm = MAX_NORM
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(accelerator.process_index))
    F.mse_loss(model(x), x[:, :3]).backward()
    return accelerator, [*model.parameters()]


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def norm_of(params: list[nn.Parameter]) -> float:
    return float(nn.utils.get_total_norm([grad_of(param) for param in params]))


# Sharded by Transformers ------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A wrapper that takes tokens and returns logits, as ``train_one_epoch`` needs; it shares the parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def split(how: str, path: str, folder: Path) -> Run:
    accelerator, norms = new_accelerator(), list[float]()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(fsdp_size=2), dtype=torch.float32
    )
    if how == "stock":
        optimizer = accelerator.prepare(sgd(model.parameters()))
    else:
        model, optimizer = RECIPE["set_up_split"](accelerator, model, sgd)
    watched(accelerator, norms)
    if how == "resumed":
        load_checkpoint(folder, model, optimizer.optimizer)
    for epoch in range(how == "resumed", EPOCHS):
        RECIPE["train_one_epoch"](
            accelerator, Loss(model), optimizer, token_batches(epoch, accelerator.process_index), MAX_NORM
        )
        if how == "ours" and epoch == 0:
            save_checkpoint(folder, model, optimizer.optimizer)
    return norms, whole(model)


def token_batches(epoch: int, rank: int) -> Sequence[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, 64, (4, 4, 8), generator=torch.Generator().manual_seed(epoch))
    return [(batch[rank::2], 10 * F.one_hot(batch[rank::2], 64).float()) for batch in tokens]


# Clipping by accelerate's own function and by meshstep -------------------------------------------------------------------


def two_meshes(how: str) -> tuple[float, float, list[Tensor]]:
    """Clip DTensors on two meshes and a plain parameter.

    Return the norm that the clip function returned, the dense norm, and the clipped full gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    accelerator, model = new_accelerator(), nn.Module()
    fsdp = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    experts = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
    grads = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    placed: list[Any] = [(fsdp, [Shard(0)]), (experts, [Replicate(), Shard(0)]), None]
    for number, (grad, where) in enumerate(zip(grads, placed, strict=True)):
        value, own = (x if where is None else distribute_tensor(x, *where) for x in (torch.ones(4, 6), grad.clone()))
        param = nn.Parameter(value)
        param.grad = own
        model.register_parameter(f"weight{number}", param)
    if how == "stock":
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    else:
        norm = RECIPE["clip_with_own_optimizer"](accelerator, model, MAX_NORM)
    clipped = [grad_of(param) for param in model.parameters()]
    full = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in clipped]
    return float(norm), float(nn.utils.get_total_norm(grads)), full


def sharded_by_hand() -> tuple[float, float]:
    """Return the norms by accelerate's own clipping and by the recipe, for a layer whose plain parameters are shards."""
    norms = []
    for how in ("stock", "ours"):
        accelerator, registry = new_accelerator(), ProcessGroupRegistry(Topology(tensor=2))
        torch.manual_seed(0)
        layer = ColumnParallelLinear(6, 4, registry)
        if how == "ours":
            take_over_clipping(accelerator, ParallelOptimizer(sgd(layer.parameters()), registry))
        layer(torch.ones(2, 6)).square().sum().backward()
        norms.append(float(accelerator.clip_grad_norm_(layer.parameters(), MAX_NORM)))
        registry.close()
    return norms[0], norms[1]


# Errors -----------------------------------------------------------------------------------------------------------------


def told(wrong: Callable[[], object]) -> str:
    try:
        wrong()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors() -> dict[str, str]:
    accelerator = new_accelerator()
    loader = [(torch.ones(2, 6), torch.ones(2, 3))] * 2
    train = RECIPE["train_one_epoch"]
    found = {}

    registry = ProcessGroupRegistry(Topology(data=2))
    model = accelerator.prepare(net())
    optimizer = accelerator.prepare(ParallelOptimizer(sgd(model.parameters()), registry, data_parallel=model))
    found["clips by itself"] = told(lambda: train(accelerator, model, optimizer, loader, MAX_NORM))

    model, optimizer, _ = RECIPE["set_up"](accelerator, net(), sgd, no_data())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 6)).sum())
        found["in a window"] = told(lambda: accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 6)).sum())
        found["some parameters"] = told(lambda: accelerator.clip_grad_norm_([*model.parameters()][1:], MAX_NORM))

    grid = ProcessGroupRegistry(Topology(tensor=2))
    layer = ColumnParallelLinear(6, 4, grid)
    split_optimizer = ParallelOptimizer(sgd(layer.parameters()), grid)
    found["windows of both"] = told(
        lambda: take_over_clipping(accelerator, ParallelOptimizer(sgd(layer.parameters()), grid, accumulation_steps=2))
    )
    accelerator.scaler = torch.amp.GradScaler("cpu")
    found["a loss scale"] = told(lambda: take_over_clipping(accelerator, split_optimizer))
    accelerator.scaler = None
    take_over_clipping(accelerator, split_optimizer)
    wrapped = accelerator.prepare(layer)
    with accelerator.accumulate(wrapped), accelerator.accumulate(wrapped):
        wrapped(torch.ones(2, 6)).sum().backward()
        found["wrapped later"] = told(lambda: accelerator.clip_grad_norm_(wrapped.parameters(), MAX_NORM))
    found["wrapped before"] = told(lambda: take_over_clipping(accelerator, split_optimizer))
    found["no optimizer of ours"] = told(lambda: take_over_clipping(accelerator, sgd(layer.parameters())))
    found["no accelerator"] = told(lambda: take_over_clipping(layer, split_optimizer))
    return found


def main(folder: Path, path: str) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found = {
        "replicated": {how: replicated(how, folder / "replicated") for how in ("stock", "ours", "resumed")},
        "sharded": {how: split(how, path, folder / "sharded") for how in ("stock", "ours", "resumed")},
        "other clips": other_clips(),
        "two meshes": {how: two_meshes(how) for how in ("stock", "ours")},
        "sharded by hand": sharded_by_hand(),
        "told": errors(),
    }
    torch.save(found, folder / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
