"""State dicts with an invalid value, loaded into Monitor, Telemetry and data loaders."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from meshstep.optim import Monitor, ParallelOptimizer, SpectralNorms, Telemetry
from meshstep.optim.telemetry.gradient_noise import RunningScale
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, prepare_dataloader
from torch import Tensor, nn


def telemetry() -> Telemetry:
    torch.manual_seed(2)
    model = nn.ModuleDict({"up": nn.Linear(4, 3)})
    declare(model, {"*": P()})
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), ProcessGroupRegistry(Topology(data=1)))
    return Telemetry(optimizer, every=1, spectral=SpectralNorms(iterations=2))


def values(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.tolist()
    return {key: values(value) for key, value in state.items()} if isinstance(state, dict) else state


@pytest.mark.parametrize("wrong", ["x", math.nan, -1, True, 10**400, None, [1], 2.5])
@pytest.mark.parametrize("name", ["step", "skipped_steps"])
def test_monitor_rejects_wrong_count_in_state(name: str, wrong: Any) -> None:
    monitor = Monitor(ProcessGroupRegistry(Topology()))
    before = monitor.state_dict()
    with pytest.raises(ValueError, match="is not the state of a Monitor"):
        monitor.load_state_dict({**before, name: wrong})
    assert monitor.state_dict() == before


NAN = torch.full((3,), math.nan, dtype=torch.float64)


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        (("step",), "5", "step is '5'; expected an integer from 0"),
        (("step",), math.nan, "step is nan; expected an integer from 0"),
        (("spectral",), {"up": "x"}, r"spectral\['up'\] is 'x'; expected a tensor of finite floats"),
        (("spectral",), {"up": NAN}, r"spectral\['up'\] contains NaN or infinity; all values must be finite"),
    ],
)
def test_telemetry_rejects_wrong_value_in_state(path: tuple[str, ...], wrong: Any, said: str) -> None:
    found = telemetry()
    state: dict[str, Any] = copy.deepcopy(found.state_dict())
    before = values(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = wrong
    state["step"] = wrong if path == ("step",) else 7
    with pytest.raises(ValueError, match=said):
        found.load_state_dict(state)
    assert values(found.state_dict()) == before


@pytest.mark.parametrize("wrong", [{"means": NAN}, {"means": torch.ones(2)}, {"means": [1.0]}, {}, [1]])
def test_noise_scale_rejects_wrong_means_in_state(wrong: Any) -> None:
    running = RunningScale(0.9, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"noise.* (expected|has no means|contains NaN or infinity)"):
        running.load_state_dict(wrong)
    assert running.means.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("wrong", ["x", math.nan, True, None, [1], 2.5])
def test_data_loader_rejects_wrong_position_in_state(wrong: Any) -> None:
    dataset = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    loader = prepare_dataloader(dataset, ProcessGroupRegistry(Topology(data=1)), 2)
    before = loader.state_dict()
    for name in ("epoch", "position"):
        with pytest.raises(ValueError, match=f"{name} of the loader's state is .*; expected an integer"):
            loader.load_state_dict({**before, name: wrong})
    assert loader.state_dict() == before
