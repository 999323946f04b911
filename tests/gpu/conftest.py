"""Every test here runs on a GPU and, at a smaller size, on the CPU, so that mistakes in a test show on any machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loops import using
from on_gpu import why_no_gpu


@pytest.fixture
def torchs_kernels() -> Iterator[None]:
    """Use torch's kernels on the CPU, because the substitute of a CUDA graph records torch operators."""
    with using("torch"):
        yield


@pytest.fixture(params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The GPU, if there is one, and the CPU, for a smaller run of the same test."""
    if request.param == "cuda" and (reason := why_no_gpu()):
        pytest.skip(reason)
    yield torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    if request.param == "cuda":
        torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it
        torch.cuda.empty_cache()
