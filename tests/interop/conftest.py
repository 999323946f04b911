from __future__ import annotations

import multiprocessing.forkserver
import os
from pathlib import Path

import pytest
from world import PRELOAD

# Modules of third-party packages that the ranks of these tests import; each import takes seconds.
THIRD_PARTY = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "deepspeed",
    "peft",
    "transformers.trainer",
)


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> None:
    """Import the modules of `PRELOAD` and `THIRD_PARTY` once, in the process from which ranks are forked."""
    context = multiprocessing.get_context("forkserver")
    # With the default threshold, garbage collection takes a quarter of the time of these imports.
    context.set_forkserver_preload(["rare_collections", *PRELOAD, *THIRD_PARTY])
    harness = Path(__file__).parents[1] / "harness"  # the server process has no `sys.path` of pytest
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches for accelerators and prints messages
        patched.setenv("PYTHONPATH", str(harness), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
