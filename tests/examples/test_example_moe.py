"""The mixture-of-experts example on several layouts of the experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense import assert_near
from meshstep.optim import sync_gradients
from meshstep.parallel import ProcessGroupRegistry, Topology, spec_of, unshard
from run_example import example, printed_by_example, read_curve, run_example
from world import World

STEPS = 8
COLUMNS = ("loss", "accuracy", "norm", "clip_coef")
FLAGS = ["--verify", "--steps", str(STEPS), "--depth", "1", "--batch-size", "32", "--lr", "1e-2", "--max-norm", "1.05"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    path = tmp_path_factory.mktemp("moe") / "one.csv"
    printed = run_example("train_moe", "--curve", str(path), *FLAGS)
    assert "right" in printed
    assert "0.0% of the choices" not in printed, "no token was dropped, so the capacity is not tested"
    found = read_curve(path, COLUMNS)
    clipped = int((found[:, 3] < 1).sum())
    assert 0 < clipped < STEPS, "the threshold should clip some steps and not others, or it tests nothing"
    assert found[-1, 0] < found[0, 0] - 0.1, "the model should learn"
    return found


@pytest.mark.parametrize(
    ("topology", "flags"),
    [
        ("data=4", []),
        ("data=2,expert=2", ["--experts", "expert"]),
        ("data=2,tensor=2", ["--experts", "data"]),
        ("data=2,tensor=2", ["--experts", "data,tensor"]),
        ("data=2,tensor=2", ["--experts", "tensor"]),
        ("expert=2,tensor=2", ["--experts", "expert", "--zero", "2"]),
        ("edp=2,mid=2,data=edp+mid", ["--experts", "mid", "--zero", "1"]),
        ("edp=2,mid=2,tensor=2,data=edp+mid,expert=mid+tensor", ["--experts", "expert", "--zero", "2"]),
    ],
)
def test_moe_example_on_several_topologies_and_expert_axes_matches_single_process_run(
    world: World, topology: str, flags: list[str], one_process: torch.Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "curve.csv"
    ranks, how = Topology.parse(topology).world_size, ["--curve", str(path), *FLAGS, *flags]
    printed, *others = world.run(ranks, printed_by_example, "train_moe", how, topology)
    assert "right" in printed
    assert not any(others), "only rank 0 reports"
    torch.testing.assert_close(read_curve(path, COLUMNS), one_process, rtol=1e-9, atol=0)


def test_moe_run_resumes_with_experts_on_other_axes(world: World, one_process: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    flags = ["--resume", str(tmp_path / "checkpoints"), "--save-every", "3", *FLAGS]
    # The first run saves after steps 3 and 6; its later steps are discarded.
    world.run(4, printed_by_example, "train_moe", [*flags, "--experts", "data,tensor"], "data=2,tensor=2")
    flags += ["--experts", "mid", "--zero", "2", "--curve", str(path)]
    printed, *_ = world.run(4, printed_by_example, "train_moe", flags, "edp=2,mid=2,data=edp+mid")
    assert "right" in printed
    torch.testing.assert_close(read_curve(path, COLUMNS), one_process, rtol=1e-9, atol=0)


def experts_without_tokens(topology: Topology, axes: tuple[str, ...]) -> list[float]:
    """Assert that sharded and dense mixture have equal gradients if all tokens choose the first two of 4 experts.

    Return the sum of the absolute gradients of each expert weight on this rank.
    """
    moe, layers = example("models.moe"), example("models.layers")
    shape = moe.MixtureShape(experts=4, top_k=2, capacity=2.0)
    with ProcessGroupRegistry(topology) as registry:
        torch.manual_seed(1)
        x = torch.rand(4, 6, 8, dtype=torch.float64)
        torch.manual_seed(0)
        split = moe.Mixture(8, layers.layers_for(registry), shape, registry, axes).double()
        torch.manual_seed(0)
        dense = moe.DenseMixture(8, layers.DenseLayers(), shape).double()
        for mixture in (split, dense):
            with torch.no_grad():
                mixture.router.weight[:2] = torch.tensor([[5.0], [4.0]])
                mixture.router.weight[2:] = 0.0
        samples = x.chunk(registry.size("data"))[registry.rank("data")]
        (split(samples).square().mean() + split.imbalance).backward()
        (dense(x).square().mean() + dense.imbalance).backward()
        sync_gradients(split.experts.parameters(), registry)
        for name, param in split.experts.named_parameters():
            assert param.grad is not None
            expected = dense.experts.get_parameter(name).grad
            assert_near(unshard(param.grad, spec_of(param), registry), expected)
        return [float(weight.grad.abs().sum()) for weight in split.experts.parameters()]


@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor")])
def test_experts_without_tokens_have_zero_gradients(world: World, axes: tuple[str, ...]) -> None:
    """There is no deadlock either, because ranks with idle experts take part in all exchanges."""
    found = world.run(4, experts_without_tokens, Topology(data=2, tensor=2), axes)
    idle = [not any(gradients) for gradients in found]
    assert idle == [rank >= 2 if "data" in axes else rank % 2 == 1 for rank in range(4)]
