from __future__ import annotations

import multiprocessing.forkserver

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
)


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> None:
    """Import the modules of `PRELOAD` and `THIRD_PARTY` once, in the process from which ranks are forked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *THIRD_PARTY])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches for accelerators and prints messages
        multiprocessing.forkserver.ensure_running()
