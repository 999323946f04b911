"""``train_digits.py --cuda-graph``: an error without a GPU, and the same curve with a CPU substitute of the graph."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cpu_graph import CUDA_OF_THE_CPU
from meshstep.parallel import ProcessGroupRegistry
from run_example import example, start_example

FLAGS = ["--steps", "8", "--max-norm", "0.95", "--topology", "data=1"]


def test_cuda_graph_flag_without_gpu_prints_one_error_line() -> None:
    with mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""):
        done = start_example("train_digits", "--cuda-graph", *FLAGS)
    assert done.returncode == 2
    assert (
        done.stderr
        == "train_digits.py: error: --cuda-graph needs a GPU, and this process has none: leave out --cuda-graph\n"
    )


def curve(flags: list[str]) -> torch.Tensor:
    script = example("train_digits")
    options = script.read_options(1, [*FLAGS, *flags])
    with ProcessGroupRegistry(options.topology) as registry:
        trainer = script.Trainer(options, registry)
        trainer.run()
        return torch.stack(trainer.history)


@pytest.mark.usefixtures("torchs_kernels")  # the CPU graph records torch operators
@pytest.mark.parametrize("flags", [[], ["--precision", "bf16", "--accumulate", "4"], ["--precision", "fp16_naive"]])
def test_train_digits_with_cuda_graph_has_the_losses_of_eager_steps(flags: list[str]) -> None:
    """The losses are equal up to rounding only, because with a graph the learning rate is a float32 tensor."""
    expected = curve(flags)
    with mock.patch.object(example("cuda_graph"), "torch", SimpleNamespace(cuda=CUDA_OF_THE_CPU)):
        found = curve(["--cuda-graph", *flags])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
