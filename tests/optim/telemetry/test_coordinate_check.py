"""`coordinate_check` with the standard parametrization and with muP, on dense and sharded models."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from meshstep.optim import CoordinateCheck, Trial, coordinate_check
from meshstep.parallel import P, ProcessGroupRegistry, Topology, reduce_from, shard
from torch import Tensor, nn
from world import World

WIDTHS = (32, 64, 128, 256)


class Layer(nn.Module):
    """A linear layer with a weight [out, in]: column-parallel with a sharded output, row-parallel, or replicated."""

    def __init__(self, full: Tensor, spec: P, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.weight, self.registry = nn.Parameter(shard(full, spec, registry)), registry
        self.sums = spec.dim_axes(1) != ()

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        return reduce_from(out, self.registry, "tensor") if self.sums else out


class Net(nn.Module):
    def __init__(self, width: int, registry: ProcessGroupRegistry, mup: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        split = "tensor" in registry.topology.axes

        def normal(*shape: int, std: float) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * std

        rows, columns = (P("tensor"), P(None, "tensor")) if split else (P(), P())
        self.first = Layer(normal(width, 8, std=8**-0.5), rows, registry)
        self.last = Layer(normal(4, width, std=1 / width if mup else width**-0.5), columns, registry)
        # muP divides Adam's learning rate of hidden-to-output weights by the fan-in.
        self.rates = {"first": 0.01, "last": 0.01 / width if mup else 0.01}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


def trial(width: int, registry: ProcessGroupRegistry, mup: bool) -> Trial:
    net = Net(width, registry, mup)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def train() -> None:
        groups = [{"params": [net.get_submodule(name).weight], "lr": rate} for name, rate in net.rates.items()]
        adam = torch.optim.Adam(groups)
        for _ in range(3):
            adam.zero_grad()
            F.mse_loss(net(x), torch.sin(3 * x[:, :4])).backward()
            adam.step()

    return Trial(net, lambda: net(x), train)


def checked(topology: Topology, mup: bool) -> CoordinateCheck:
    with ProcessGroupRegistry(topology) as registry:
        return coordinate_check(partial(trial, registry=registry, mup=mup), WIDTHS, registry)


def test_coordinate_check_finds_growth_in_standard_parametrization_but_not_in_mup(world: World) -> None:
    ((standard,), (mup,)) = world.run_each(checked, [(1, (Topology(), False)), (1, (Topology(), True))])
    assert standard.slopes()["last"] > 0.4
    assert abs(mup.slopes()["last"]) < 0.15
    assert standard.changes.keys() == {"first", "last"}
    assert str(standard).splitlines()[0].split() == ["layer", "32", "64", "128", "256", "slope"]


def test_coordinate_check_of_sharded_model_matches_dense_model(world: World) -> None:
    dense, *rest = world.run_each(checked, [(1, (Topology(), True)), (2, (Topology(tensor=2), True))])
    for check in rest[0]:
        for layer, values in check.changes.items():
            assert values == pytest.approx(dense[0].changes[layer], rel=1e-11)


def test_coordinate_check_rejects_invalid_arguments() -> None:
    registry = ProcessGroupRegistry(Topology())
    build = partial(trial, registry=registry, mup=True)
    with pytest.raises(ValueError, match="give two or more"):
        coordinate_check(build, (64, 64), registry)
    with pytest.raises(ValueError, match="matches no module that returned one floating-point tensor at every width"):
        coordinate_check(build, (32, 64), registry, layers=("attention.*",))


def test_coordinate_check_slope_is_nan_for_zero_or_non_finite_change() -> None:
    no_slope = [(0.0, 1.0), (1.0, math.inf), (math.nan, 1.0), (math.nan, 0.0)]
    check = CoordinateCheck((2, 4), {**{str(pair): pair for pair in no_slope}, "b": (1.0, 2.0)})
    slopes = check.slopes()
    assert slopes.pop("b") == pytest.approx(1)
    assert all(map(math.isnan, slopes.values()))
