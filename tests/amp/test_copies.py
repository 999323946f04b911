"""Copies of many tensors: values, and the number of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_cuda import fake_cuda
from meshstep.amp import MasterWeights
from meshstep.amp.casting import copy_each_, float32_of
from torch import Tensor, nn

LAST = torch.channels_last
SHAPES = ((3,), (4, 5), (2, 3, 5, 5), (4, 3, 1, 1), (), (0, 2))


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, last: bool = False) -> Tensor:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype)
    return tensor.to(memory_format=LAST) if last and tensor.dim() == 4 else tensor


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [(False, False), (True, False), (False, True), (True, True)])
def test_tensor_copies_equal_their_cast_sources_in_several_memory_formats(
    to: torch.dtype, last: tuple[bool, bool]
) -> None:
    sources = [filled(shape, last=last[0]) for shape in SHAPES] + [filled((6, 4)).t(), filled((3, 2), torch.float64)]
    targets = [torch.full_like(filled(tuple(s.shape), last=last[1]), -1.0, dtype=to) for s in sources]
    copy_each_(targets, sources)
    assert all(map(torch.equal, targets, [source.to(to) for source in sources]))
    for index, copy in float32_of(dict(enumerate(targets))).items():
        assert copy.dtype == torch.float32
        assert copy.stride() == targets[index].stride()
        assert torch.equal(copy, targets[index].float())


needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"
)


def kernels_of_copies(change: Callable[[list[Tensor]], None], copy: Callable[..., object] = copy_each_) -> int:
    """Return the number of kernels of a copy of 100 tensors, after ``change`` has modified the list of sources."""
    with fake_cuda() as logging:
        targets = [torch.ones(8, 4, 3, 3, device="cuda") for _ in range(100)]
        sources = [torch.ones(8, 4, 3, 3, device="cuda", dtype=torch.float32) for _ in range(100)]
        change(sources)
        with logging() as log:
            copy(targets, sources)
        return int(log.kernels)


@needs_cuda_build
def test_copy_each_adds_one_kernel_for_a_tensor_with_different_strides_or_dtype() -> None:
    def with_last(tensors: list[Tensor]) -> None:
        tensors[3] = tensors[3].to(memory_format=LAST)

    def with_half(tensors: list[Tensor]) -> None:
        tensors[3] = tensors[3].half()

    assert kernels_of_copies(lambda tensors: None) == kernels_of_copies(lambda tensors: None, torch._foreach_copy_) == 2
    assert kernels_of_copies(with_last) == 3
    assert kernels_of_copies(with_half) == 3
    for change in (with_last, with_half):
        assert kernels_of_copies(change, torch._foreach_copy_) == 100  # for comparison: one kernel per tensor


@needs_cuda_build
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_master_weights_collect_casts_all_gradients_in_one_kernel() -> None:
    """`DistributedDataParallel` leaves gradients in the dtype of the parameters, here bfloat16."""

    def collected(count: int) -> list[str]:
        with fake_cuda() as logging:
            params = [nn.Parameter(torch.ones(4, 3, device="cuda", dtype=torch.bfloat16)) for _ in range(count)]
            masters = MasterWeights(torch.optim.SGD(params, lr=0.1), main_grads=False)
            for param in params:
                param.grad = torch.ones_like(param)
            with logging() as log:
                masters.collect()
            assert {master.grad.dtype for _, master in masters.pairs if master.grad is not None} == {torch.float32}
            return list[str](log.launches)

    assert collected(2) == collected(50) == ["aten._foreach_copy_.default"]
