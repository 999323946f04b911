"""Host synchronizations of measured steps on fake CUDA tensors, which have no elements; see `fake_cuda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import Log, fake_cuda
from gathered_objects import objects_gathered_by, said_by_all
from meshstep.optim import NoiseScale, ParallelOptimizer, Sharded, SpectralNorms, Telemetry
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.testing import fake_world
from set_gradients import setting_gradients
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

SHAPES: dict[str, tuple[int, ...]] = {"weight": (8, 6), "bias": (8,), "gain": (5,), "table": (7, 4)}
WITHOUT_GRADIENT = {1: "gain", 3: "bias"}  # by step, counted from 0

pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor is deprecated:UserWarning"),
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA for the fake GPU"),
]


def logs_of(telemetry: dict[str, Any], dtypes: dict[str, torch.dtype], **options: Any) -> list[Log]:
    """Return the logs of measured steps; the parameters with a gradient differ between steps."""
    logs = []
    with fake_world(4), objects_gathered_by(said_by_all), fake_cuda() as logging:
        registry = ProcessGroupRegistry(Topology(data=4))
        model = nn.ParameterDict(
            {
                name: nn.Parameter(torch.ones(shape, device="cuda", dtype=dtypes.get(name)))
                for name, shape in SHAPES.items()
            }
        )
        for name, param in model.items():
            annotate(param, P(), name)
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = ParallelOptimizer(adamw, registry, check_replicas=False, max_norm=1.0, **options)
        measured = Telemetry(optimizer, every=1, **telemetry)
        for step in range(6):
            with logging() as log:
                with setting_gradients(optimizer):
                    for name, param in model.items():
                        if WITHOUT_GRADIENT.get(step) != name:
                            param.grad = torch.ones_like(param, dtype=getattr(param, "grad_dtype", None) or param.dtype)
                optimizer.step()
            optimizer.zero_grad()
            assert measured.last is not None
            assert measured.last.values.is_cuda
            logs.append(log)
    return logs


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtypes", "options", "sharded"),
    [
        ({}, {}, False),
        ({}, {"states": Sharded("data")}, True),
        (dict.fromkeys(SHAPES, torch.bfloat16), {"precision": "bf16"}, False),
        ({"bias": torch.bfloat16, "table": torch.bfloat16}, {}, False),
    ],
    ids=["fp32", "ZeRO-1", "masters", "two dtypes"],
)
@pytest.mark.parametrize("telemetry", [{}, {"noise": NoiseScale()}, {"spectral": SpectralNorms()}], ids=repr)
def test_measured_cuda_steps_after_second_need_no_host_synchronization(
    dtypes: dict[str, torch.dtype], options: dict[str, Any], sharded: bool, telemetry: dict[str, Any]
) -> None:
    if sharded:
        # Spectral norms need different shards, but all simulated ranks report the same shard.
        telemetry = {key: value for key, value in telemetry.items() if key != "spectral"}
    logs = logs_of(telemetry, dtypes, **options)
    assert logs[-1].launches
    # The second step compares master weights with the model's weights, once.
    assert all("amp/casting.py" in wait for wait in logs[1].waits)
    assert bool(logs[1].waits) == ("precision" in options)
    assert [log.waits for log in logs[2:]] == [[]] * 4


def test_host_synchronization_in_measurement_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Telemetry._figures

    def read(self: Telemetry, rows: Tensor, *others: Any) -> Any:
        assert float(rows.sum()) >= 0
        return figures(self, rows, *others)

    monkeypatch.setattr(Telemetry, "_figures", read)
    with pytest.raises(DataDependentOutputException):
        logs_of({}, {})
