"""Step torch's optimizers with different kernels: models, optimizers, and changes between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from loops import using
from meshstep.optim import ParallelOptimizer
from meshstep.optim.kernels.choice import Kernels
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "Adam, amsgrad, maximize": lambda params: torch.optim.Adam(
        params, lr=0.01, amsgrad=True, maximize=True, fused=True
    ),
    "Adam, tensor rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), weight_decay=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD, Nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD, dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, fused=True),
}
SHAPES = ((4, 3), (2, 3, 2, 2), (17,), (0, 3), ())


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(seed)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES])
    declare(model, {"*": P()})
    return model


def gradients(model: nn.ParameterList, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in model:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def of(model: nn.ParameterList, make: Make, **options: Any) -> ParallelOptimizer:
    return ParallelOptimizer(make(list(model)), ProcessGroupRegistry(Topology()), **{"max_norm": 0.7, **options})


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)


CHANGES: dict[str, Callable[[nn.ParameterList, ParallelOptimizer], object]] = {
    "load optimizer states": lambda model, optimizer: optimizer.load_state_dict(deepcopy(optimizer.state_dict())),
    "replace data of weights": lambda model, optimizer: moved(*model),
    "replace state tensor": lambda model, optimizer: optimizer.state[model[0]].update(
        exp_avg=optimizer.state[model[0]]["exp_avg"].clone() * 2
    ),
    "replace data of state tensor": lambda model, optimizer: moved(optimizer.state[model[2]]["exp_avg_sq"]),
    "change dtype of state": lambda model, optimizer: optimizer.state[model[0]].update(
        step=optimizer.state[model[0]]["step"].double()
    ),
    "change learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.3),
    "add param group": lambda model, optimizer: optimizer.add_param_group({"params": [one_more(model)]}),
    "betas as list and maximize": lambda model, optimizer: optimizer.param_groups[0].update(
        betas=[0.7, 0.95], maximize=True
    ),
    "disable fused": lambda model, optimizer: optimizer.param_groups[0].update(fused=False),
    "register user hook": lambda model, optimizer: optimizer.optimizer.register_step_pre_hook(lambda *args: None),
    "reorder parameters": lambda model, optimizer: optimizer.param_groups[0]["params"].reverse(),
}


def moved(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.clone() * 3


def one_more(model: nn.ParameterList) -> nn.Parameter:
    new = nn.Parameter(torch.ones(3, 2))
    model.append(new)
    declare(model, {"*": P()})
    return new


def changed(change: str, kernels: Sequence[Kernels]) -> list[list[Tensor]]:
    """Return for each kernel set the weights and first moments after four steps, with one change before the third step."""
    found = []
    for chosen in kernels:
        with using(chosen):
            model = model_of()
            optimizer = of(model, MAKE["AdamW"])
            for step in range(4):
                if step == 2:
                    CHANGES[change](model, optimizer)
                gradients(model, step)
                optimizer.step()
            found.append([*(param.detach() for param in model), *(s["exp_avg"] for s in optimizer.state.values())])
    return found
