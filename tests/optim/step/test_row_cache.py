"""The row cache of the compiled loops, whose rows are valid only while their tensors are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import is_
from typing import Any

import pytest
import torch
from kernel_steps import MAKE, close
from loops import using
from meshstep.amp import Bf16
from meshstep.optim import ParallelOptimizer
from meshstep.optim.kernels import memory
from meshstep.optim.kernels.memory import Signature
from meshstep.optim.step.c_engine import PointerTable
from meshstep.optim.step.update_request import LowPrecisionOut
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn

STEPS = 3


@pytest.fixture(autouse=True, params=["guards of torch", "Python"])
def _compared_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "Python":
        monkeypatch.setattr(memory, "TensorGuards", None)
    with using("auto"):
        yield


def base() -> Tensor:
    return torch.ones(2, 4, 3, 3)


CHANGES: dict[str, Callable[[], Tensor]] = {
    "dtype": lambda: base().bfloat16(),
    "dtype of as many bytes": lambda: base().int(),
    "device": lambda: base().to("meta"),
    "shape": lambda: torch.ones(4, 2, 3, 3),
    "dims": lambda: torch.ones(8, 9),
    "channels_last": lambda: base().contiguous(memory_format=torch.channels_last),
    "transposed": lambda: base().transpose(2, 3),
    "gaps": lambda: torch.ones(2, 4, 3, 4)[..., :3],
    "negative bit": lambda: torch._neg_view(base()),
    "zeros without memory": lambda: torch._efficientzerotensor(2, 4, 3, 3),
    "class": lambda: nn.Parameter(base()),
    "layout": lambda: base().to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensor_signature_detects_changed_dtype_device_shape_strides_class_or_layout(change: str) -> None:
    signature = Signature([base(), torch.ones(3)])
    assert signature.fits([base(), torch.ones(3)])
    assert signature.fits([torch.ones(3, 4, 3, 3)[1:], torch.ones(3)])  # another address does not matter
    assert not signature.fits([CHANGES[change](), torch.ones(3)])


def test_tensor_signature_does_not_match_another_number_of_tensors() -> None:
    signature = Signature([base()])
    assert not any([signature.fits([]), signature.fits([base(), base()]), signature.fits([None])])
    assert Signature([]).fits([])


def test_pointer_table_contains_only_low_precision_copies_of_current_call() -> None:
    """This holds after calls with equal copies, with copies of other parameters or of another dtype, and with none."""
    params = [torch.ones(4), torch.ones(4)]
    table = PointerTable(params, [[param.data_ptr() for param in params], *[[0, 0]] * 4], None)

    def halves_of(*copies: Tensor | None) -> list[Tensor]:
        given = {param: copy for param, copy in zip(params, copies, strict=True) if copy is not None}
        call = table.call([torch.ones(4)] * 2, LowPrecisionOut(given))
        addresses = [0 if copy is None else copy.data_ptr() for copy in copies]
        assert call.columns.halves is None or call.columns.halves.tolist() == addresses
        return call.halves

    first, second, half = torch.ones(4).bfloat16(), torch.ones(4).bfloat16(), torch.ones(4).half()
    for copies in ([None, None], [first, None], [second, None], [None, second], [first, second], [None, half]):
        expected = [copy for copy in copies if copy is not None]
        found = halves_of(*copies)
        assert len(found) == len(expected)
        assert all(map(is_, found, expected))
    assert halves_of(None, None) == []


def made(param: nn.Parameter, name: str = "AdamW", **options: Any) -> ParallelOptimizer[Any]:
    declare(nn.ParameterList([param]), {"*": P()})
    optimizer: ParallelOptimizer[Any] = ParallelOptimizer(
        MAKE[name]([param]), ProcessGroupRegistry(Topology()), **{"max_norm": 0.7, **options}
    )
    return optimizer


def step(param: nn.Parameter, optimizer: ParallelOptimizer[Any]) -> None:
    dtype = param.grad_dtype or param.dtype
    param.grad = torch.arange(1.0, 1 + param.numel()).view(param.shape).to(dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD, Nesterov", "Adagrad"])
def test_step_of_parameter_changed_to_half_precision_writes_no_memory_beyond_it(name: str, dtype: torch.dtype) -> None:
    """The parameter gets half precision at the same address; stepping it as float32 would access memory beyond its
    end."""
    whole = torch.ones(16)
    param = nn.Parameter(whole[:8])
    optimizer = made(param, name)
    for _ in range(STEPS):
        step(param, optimizer)
    param.grad = None
    param.data = whole.view(dtype)[:8]
    assert param.data_ptr() == whole.data_ptr()
    whole.fill_(1.0)
    param.data.fill_(0.5)
    with suppress(RuntimeError):  # torch's kernels reject float32 states of a half-precision parameter
        step(param, optimizer)
    assert bool((whole[4:] == 1).all())
    close(param.detach().float() < 0.5 + 1e-6, torch.ones(8, dtype=torch.bool))


def test_split_masters_with_changed_weight_strides_match_unchanged_run() -> None:
    """The strides change between two steps."""
    found = []
    for transposed in (True, False):
        param = nn.Parameter(torch.arange(1.0, 13.0).view(3, 4).bfloat16())
        optimizer = made(param, precision=Bf16(split_masters=True))
        for number in range(2 * STEPS):
            if number == STEPS and transposed:
                param.data = param.data.t().contiguous().t()
            step(param, optimizer)
        found.append(param.detach().contiguous())
    assert torch.equal(*found)


def test_gradients_with_changing_strides_and_dtypes_give_steps_of_plain_gradients() -> None:
    """Strides and dtypes of gradients differ between steps, and from those of the parameter."""
    changes: list[Callable[[Tensor], Tensor]] = [
        Tensor.clone,
        Tensor.clone,
        lambda grad: grad.t().contiguous().t(),
        lambda grad: torch.cat([grad, grad], 1)[:, :4],
        lambda grad: torch._neg_view(-grad),
        Tensor.clone,
        Tensor.bfloat16,
        Tensor.bfloat16,
        lambda grad: grad.bfloat16().t().contiguous().t(),
        Tensor.clone,
    ]
    found = []
    for changed in (True, False):
        param = nn.Parameter(torch.arange(12.0).view(3, 4))
        param.grad_dtype = None
        optimizer = made(param)
        for change in changes:
            grad = torch.arange(-6.0, 6.0).view(3, 4)  # exact in bfloat16
            param.grad = change(grad) if changed else grad
            optimizer.step()
        found.append(param.detach())
    close(*found)


@pytest.mark.parametrize("halved", [0, 1])
def test_steps_after_one_gradient_becomes_bfloat16_match_float32_gradients(halved: int) -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        params = [nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.arange(8.0))]
        optimizer = ParallelOptimizer(MAKE["AdamW"](params), ProcessGroupRegistry(Topology()), max_norm=0.7)
        for number in range(2 * STEPS):
            for index, param in enumerate(params):
                param.grad_dtype = None
                grad = torch.arange(-2.0, param.numel() - 2)  # exact in bfloat16
                param.grad = grad.to(dtype) if number >= STEPS and index == halved else grad
            optimizer.step()
        found.append(torch.cat([param.detach() for param in params]))
    close(*found)
