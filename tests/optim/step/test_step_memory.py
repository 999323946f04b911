"""Host synchronizations, operators and allocated memory of a step after the second."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from loops import using
from meshstep.amp import Bf16, NaiveFp16, Precision, TorchFp16, precision_of
from meshstep.optim import ByValue, Clip, ParallelOptimizer, PerParameter
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from probes import MadeMemory, no_host_reads
from torch import nn

PRECISIONS: dict[str, Precision] = {
    "fp32": precision_of("fp32"),
    "bf16": Bf16(),
    "bf16, half gradients": Bf16(main_grads=False),
    "fp16": TorchFp16(),
    "fp16_naive": NaiveFp16(),
}


def memory_of_a_step(width: int, precision: str, clip: float | Clip | None) -> tuple[int, int]:
    """Return the number of operators of the fourth step and the bytes that they allocate, for three square layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    mode = PRECISIONS[precision]
    mode.prepare(model)
    declare(model, {"*": P()})
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3, fused=True)
    optimizer = ParallelOptimizer(adamw, ProcessGroupRegistry(Topology()), max_norm=clip, precision=mode)
    x = torch.randn(4, width).to(next(model.parameters()).dtype)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward(model(x).float().square().mean())
        # The second step reads whether master weights equal the model's weights.
        with nullcontext() if step == 1 and mode.masters else no_host_reads(), MadeMemory() as made:
            optimizer.step()
    return made.operators, made.bytes


RULES: list[float | Clip | None] = [None, 0.3, ByValue(0.01), PerParameter(0.1)]
# A rule that changes gradients converts them to float32 first; main gradients avoid this.
WRITES_TO_HALF = [("bf16, half gradients", clip) for clip in RULES if isinstance(clip, Clip)]


@pytest.mark.parametrize(
    ("precision", "clip"), [case for case in product(PRECISIONS, RULES) if case not in WRITES_TO_HALF]
)
def test_operators_and_memory_of_step_do_not_grow_with_model_width(precision: str, clip: float | Clip | None) -> None:
    with using("auto"):  # overrides the environment variable
        small, large = (memory_of_a_step(width, precision, clip) for width in (32, 128))
    assert small == large
    operators, made = large
    assert operators <= 60
    assert made <= (640 if isinstance(clip, PerParameter) else 160)


def test_torch_kernels_allocate_temporaries_as_large_as_gradients() -> None:
    """Negative control for the memory probe."""
    with using("torch"):
        _, made = memory_of_a_step(32, "fp32", 0.3)
    assert made > 3 * 32 * 32 * 8  # float64 copies of the weight gradients
