"""LoRA on experts: each rank has other experts, as modules of its own or in one parameter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import ALPHA, MAX_NORM, R, Weights, optimizer_of
from meshstep.parallel import (
    LoRA,
    P,
    ProcessGroupRegistry,
    Topology,
    add_lora,
    copy_to,
    declare,
    load_adapter,
    reduce_from,
    save_adapter,
    spec_of,
    unshard,
)
from torch import Tensor, nn
from world import World

EXPERTS, WIDTH, STEPS = 4, 6, 10


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((WIDTH, 8), (8, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(x)))
        return output


class Experts(nn.Module):
    """All experts compute all tokens, and the router weights their outputs. Each rank has some of the experts.

    Args:
        registry: The process groups. None: one process has all experts.
    """

    def __init__(self, registry: ProcessGroupRegistry | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        full, self.registry = [Expert() for _ in range(EXPERTS)], registry
        self.router = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)
        ranks, rank = (1, 0) if registry is None else (registry.size("expert"), registry.rank("expert"))
        count = EXPERTS // ranks
        self.first = rank * count
        self.experts = nn.ModuleList(full[self.first : self.first + count])
        if registry is not None:
            declare(self, {"experts.*": P("expert"), "*": P()})

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        if self.registry is not None:
            x, scores = (copy_to(tensor, self.registry, "expert") for tensor in (x, scores))
        output = sum(scores[:, self.first + i, None] * expert(x) for i, expert in enumerate(self.experts))
        assert isinstance(output, Tensor)
        return output if self.registry is None else reduce_from(output, self.registry, "expert")


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    result: Tensor = (model(x) - torch.ones(WIDTH, dtype=torch.float64)).square().mean()
    return result


def full_factors(model: nn.Module, registry: ProcessGroupRegistry) -> Weights:
    """Return the full factors by the names of the dense model."""
    ranks, found = registry.size("expert"), Weights()
    for name, param in model.named_parameters():
        if "lora_" in name:
            _, number, rest = name.split(".", 2)
            full = unshard(param.detach(), spec_of(param), registry)
            for rank, part in enumerate(full.chunk(ranks)):
                found[f"experts.{rank * (EXPERTS // ranks) + int(number)}.{rest}"] = part
    return found


def randomize(model: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Set B to random values that depend on the number of the expert in the dense model."""
    for name, module in model.named_modules():
        if isinstance(module, LoRA):
            _, number, layer = name.split(".")
            at = registry.rank("expert") * (EXPERTS // registry.size("expert")) + int(number)
            generator = torch.Generator().manual_seed(at + 10 * len(layer))
            module.lora_B.data.normal_(0, 0.3, generator=generator)


def adapted(ranks: int, registry: ProcessGroupRegistry, options: dict[str, Any], zero: bool = False) -> nn.Module:
    model = Experts(registry)
    add_lora(model, ["up", "down"], R, ALPHA, registry, seed=4, expert_axes="expert", **options)
    if not zero:
        randomize(model, registry)
    return model


def trained(
    ranks: int, options: dict[str, Any], steps: int = STEPS, start: int = 0, folder: str = "", zero: bool = False
) -> tuple[Weights, list[float], Weights]:
    """Train some steps. From step ``start`` > 0 on, continue from the adapter in ``folder``; save an adapter there."""
    with ProcessGroupRegistry(Topology(expert=ranks, roles={"expert": "model"})) as registry:
        model = adapted(ranks, registry, options, zero)
        first = full_factors(model, registry)
        optimizer, norms = optimizer_of(model, registry), []
        if start:
            load_adapter(folder, model, registry)
        for step in range(start, start + steps):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model, step))
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
        if folder and not start:
            save_adapter(folder, model, registry)
        return first, norms, full_factors(model, registry)


def test_initial_factors_of_experts_do_not_depend_on_the_number_of_ranks(world: World) -> None:
    starts = [first for ranks in (1, 2, 4) for first, _, _ in world.run(ranks, trained, ranks, {}, 0, 0, "", True)]
    assert len(starts[0]) == EXPERTS * 2 * 2
    for start in starts:
        assert start.keys() == starts[0].keys()
        assert all(torch.equal(value, starts[0][name]) for name, value in start.items())
    first, second = (starts[0][f"experts.{number}.up.lora_A"] for number in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["LoRA", "rsLoRA", "DoRA"])
def test_lora_on_separate_experts_trains_like_one_process(world: World, options: dict[str, Any]) -> None:
    ((_, expected_norms, expected),) = world.run(1, trained, 1, options)
    assert min(expected_norms) > MAX_NORM, "every step should clip"
    for ranks in (2, 4):
        for _, norms, weights in world.run(ranks, trained, ranks, options):
            assert norms == pytest.approx(expected_norms, rel=1e-12)
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


# Files ----------------------------------------------------------------------------------------------------------------


def loaded(ranks: int, folder: str) -> tuple[Weights, Tensor]:
    with ProcessGroupRegistry(Topology(expert=ranks, roles={"expert": "model"})) as registry:
        model = adapted(ranks, registry, {}, zero=True)
        load_adapter(folder, model, registry)
        return full_factors(model, registry), loss_of(model).detach()


def test_experts_are_saved_with_the_numbers_of_the_dense_model(world: World, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors (the extra 'lora')")
    folder = str(tmp_path / "adapter")
    _, _, expected = world.run(2, trained, 2, {}, 3, 0, folder)[0]
    losses = []
    for ranks in (1, 2, 4):
        for found, loss in world.run(ranks, loaded, ranks, folder):
            losses.append(loss)
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
    peft: Any = pytest.importorskip("peft", reason="needs peft (the extra 'interop')")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(Experts(None), folder)
    torch.testing.assert_close(torch.stack(losses), loss_of(model).detach().expand(len(losses)), rtol=1e-12, atol=0)


def saved_without_list(folder: str) -> str:
    with ProcessGroupRegistry(Topology(expert=2, roles={"expert": "model"})) as registry:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        declare(model, {"*": P("expert")})
        add_lora(model, ["0"], R, ALPHA, registry, expert_axes="expert")
        with pytest.raises(ValueError, match=r".") as error:
            save_adapter(folder, model, registry)
        return str(error.value)


def test_expert_without_number_in_its_name_is_an_error(world: World, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors (the extra 'lora')")
    for text in world.run(2, saved_without_list, str(tmp_path)):
        assert text.startswith("0 has different experts along expert, but its name has no number of an expert; put")
