"""Every test here runs on a GPU, and, smaller, on the CPU: so that what is wrong in it shows on any machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loops import using
from on_gpu import why_no_gpu


@pytest.fixture
def torchs_kernels() -> Iterator[None]:
    """On the CPU as on a GPU: a graph in its place is made of torch's operators, and so the steps beside it are."""
    with using("torch"):
        yield


@pytest.fixture(params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The GPU, where there is one; and the CPU, on which the same test is a rehearsal."""
    if request.param == "cuda" and (reason := why_no_gpu()):
        pytest.skip(reason)
    yield torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    if request.param == "cuda":
        torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it
        torch.cuda.empty_cache()
