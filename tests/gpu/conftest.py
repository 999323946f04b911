"""A test with the fixture `device` runs on a GPU and also, often at a smaller size, on the CPU of any machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loops import using
from on_gpu import why_no_gpu


@pytest.fixture
def torchs_kernels() -> Iterator[None]:
    """Use torch's kernels on any device, because the CPU substitute of a CUDA graph records torch operators only."""
    with using("torch"):
        yield


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "cpu")])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The GPU, if there is one, and the CPU, for another (often smaller) run of the same test.

    ``-m cuda`` selects the tests on the GPU, ``-m cpu`` those on the CPU.
    """
    if request.param == "cpu":
        torch.set_num_threads(1)  # as in the processes of `on_gpu.ranks`: sums depend on the number of threads
        yield torch.device("cpu")
        return
    if reason := why_no_gpu():
        pytest.skip(reason)
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it
    torch.cuda.empty_cache()
