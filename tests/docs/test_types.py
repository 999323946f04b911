"""Type checking of a user's project: the type checkers see only the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """\
from collections.abc import Callable

import meshstep
import torch
from meshstep import Booster, CosineAnnealingLR, GradStats, P, ParallelOptimizer, ProcessGroupRegistry, Topology, declare
from meshstep.amp import ApexFp16, precision_of
from meshstep.optim import Bf16Compression, Sharded
from meshstep.parallel import ShardedDataLoader, prepare_dataloader
from torch import Tensor, nn
from typing_extensions import assert_type


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


assert_type(meshstep.__version__, str)
registry = ProcessGroupRegistry(Topology(data=1))
net = Net()
declare(net, {"*": P()})
adam = torch.optim.AdamW(net.parameters())

# A step returns its stats. With accumulation it returns None within a window.
plain = ParallelOptimizer(adam, registry, max_norm=1.0, precision="bf16", states=Sharded("data"))
assert_type(plain.step(), GradStats)
assert_type(plain.clip_grad_by_norm(1.0), GradStats)
told = ParallelOptimizer(adam, registry, accumulation_steps=None, overlap=True, compression=Bf16Compression())
assert_type(told.step().total_norm, Tensor)
windows = ParallelOptimizer(adam, registry, accumulation_steps=4, precision=ApexFp16("O1"))
assert_type(windows.step(), GradStats | None)


def either(optimizer: ParallelOptimizer) -> None:
    assert_type(optimizer.step(), GradStats | None)


either(plain)
either(windows)

# A boosted model is still a Net, a criterion is still called as before.
schedule = CosineAnnealingLR(adam, total_steps=3)
data = torch.utils.data.TensorDataset(torch.ones(2, 4), torch.ones(2, 2))
loader_of_tensors = prepare_dataloader(data, registry, 1)
assert_type(loader_of_tensors, ShardedDataLoader[tuple[Tensor, ...]])
booster = Booster("bf16", registry, "zero1", max_norm=1.0, states=(), check_replicas=False)
model, optimizer, criterion, batches, rates = booster.boost(net, adam, mean_square, loader_of_tensors, schedule)
assert_type(model, Net)
assert_type(model.layer, nn.Linear)
assert_type(optimizer.step(), GradStats)
assert_type(criterion(torch.ones(2), torch.ones(2)), Tensor)
assert_type(batches, ShardedDataLoader[tuple[Tensor, ...]])
assert_type(rates, CosineAnnealingLR)
booster.backward(criterion(model(torch.ones(1, 4)), torch.ones(1, 2)), optimizer)
booster.save("runs", model, optimizer, rates, batches)
evaluated, nothing, _, _, _ = booster.boost(Net())
assert_type(evaluated, Net)
assert_type(nothing, None)
_, in_windows, _, _, _ = Booster(accumulation_steps=4).boost(net, adam)
assert_type(in_windows.step(), GradStats | None)

# A type checker knows the names of the modes. Names from a command line need `precision_of`.
Booster(precision_of(input()))
Booster("bf61")  # type: ignore[call-overload]
Booster(data_parallel="zero3")  # type: ignore[call-overload]
ParallelOptimizer(adam, registry, precision="half")  # type: ignore[call-overload]
ParallelOptimizer(adam, registry, on_nonfinite="ignore")  # type: ignore[call-overload]
ParallelOptimizer(adam, registry, max_grad_norm=1.0)  # type: ignore[call-overload]
ApexFp16("O4")  # type: ignore[arg-type]
Topology(roles={"expert": "dta"}, expert=2)  # type: ignore[dict-item]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder outside this repository with a training script."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "pyrightconfig.json").write_text(
        '{"typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error", "enableTypeIgnoreComments": true}'
    )
    return tmp_path


def checked(project: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_mypy_strict_accepts_user_code(project: Path) -> None:
    pytest.importorskip("mypy")
    # The cache is kept in the repository between runs, so only the first run checks torch.
    cache = str(ROOT / ".mypy_cache" / "of_user_code")
    found = checked(project, "mypy", "--strict", "--cache-dir", cache, "train.py")
    assert found == "Success: no issues found in 1 source file\n"


def test_pyright_accepts_user_code(project: Path) -> None:
    pytest.importorskip("basedpyright")
    found = checked(project, "basedpyright", "--pythonpath", sys.executable, "train.py")
    assert "0 errors, 0 warnings, 0 notes\n" in found, found


def test_parallel_optimizer_can_be_subscripted_at_run_time() -> None:
    from meshstep.optim import GradStats, ParallelOptimizer

    assert ParallelOptimizer[GradStats].__origin__ is ParallelOptimizer  # type: ignore[attr-defined]
