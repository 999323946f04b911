"""Fused optimizers on fake CUDA tensors with parameters, gradients and states of several memory formats."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from configurations import MEMORY_FORMATS, laid_out
from fake_cuda import CUDA, check_fused, fake_cuda
from meshstep.optim import ParallelOptimizer
from meshstep.optim.kernels import memory
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

SHAPES = [(6, 4, 2, 2), (7, 5), (13,), (), (0, 3), (4, 1)]
MAKE: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, fused=True),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]


@pytest.mark.long
@pytest.mark.default_cases(45)
@pytest.mark.parametrize("of_gradient", MEMORY_FORMATS)
@pytest.mark.parametrize("of_param", MEMORY_FORMATS)
@pytest.mark.parametrize("name", MAKE)
def test_fused_update_on_fake_cuda_accepts_parameters_and_gradients_in_several_memory_formats(
    name: str, of_param: str, of_gradient: str
) -> None:
    plain = memory.PLAIN | {FakeTensor}  # fake tensors stand for plain ones
    with fake_cuda() as logging, mock.patch.object(memory, "PLAIN", plain):
        model = nn.ParameterList(
            [nn.Parameter(laid_out(torch.empty(shape, device=CUDA), of_param)) for shape in SHAPES]
        )
        declare(model, {"*": P()})
        registry = ProcessGroupRegistry(Topology())
        optimizer = ParallelOptimizer(MAKE[name](list(model)), registry, max_norm=0.7, check_replicas=False)
        with logging() as log:
            for step in range(3):
                if step == 2:  # the user moves the parameters to another memory format, as `model.to` does
                    for param in model:
                        param.data = laid_out(param.data, "permuted" if of_param == "contiguous" else "contiguous")
                with optimizer.window():
                    for param in model:
                        param.grad = laid_out(torch.empty_like(param), of_gradient)
                optimizer.step()
                optimizer.zero_grad()
    assert sum(launch.startswith("aten._fused_") for launch in log.launches) == 3


def test_fake_cuda_rejects_fused_updates_of_unequal_strides() -> None:
    tensors = [torch.ones(4, 3)]
    check_fused((tensors, tensors, [torch.ones(4, 3)]))
    for other in (torch.ones(3, 4).t(), torch.ones(4, 3, 2)[..., 0], torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="same dtype, device, and layout"):
            check_fused((tensors, [other]))
