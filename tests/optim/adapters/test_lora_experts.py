"""LoRA on experts: separate modules on different ranks, or stacked in one parameter that is sharded over ranks."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import ALPHA, LR, MAX_NORM, R, Weights, full_weights, optimizer_of, step_along
from meshstep.optim import load_checkpoint, save_checkpoint
from meshstep.parallel import (
    GroupedLoRA,
    LoRA,
    P,
    ProcessGroupRegistry,
    Topology,
    add_lora,
    annotate,
    copy_to,
    declare,
    declare_adapters,
    load_adapter,
    reduce_from,
    save_adapter,
    shard,
    spec_of,
    unshard,
)
from meshstep.testing import Proof, prove
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

    Without a registry, one process has all experts.
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


def loss_of(model: Callable[[Tensor], Tensor], step: int = 0) -> Tensor:
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    result: Tensor = (model(x) - torch.ones(WIDTH, dtype=torch.float64)).square().mean()
    return result


def full_factors(model: nn.Module, registry: ProcessGroupRegistry) -> Weights:
    """Return the full LoRA factors, keyed by their names in a model that holds all experts."""
    ranks, found = registry.size("expert"), Weights()
    for name, param in model.named_parameters():
        if "lora_" in name:
            _, number, rest = name.split(".", 2)
            full = unshard(param.detach(), spec_of(param), registry)
            for rank, part in enumerate(full.chunk(ranks)):
                found[f"experts.{rank * (EXPERTS // ranks) + int(number)}.{rest}"] = part
    return found


def randomize(model: nn.Module, registry: ProcessGroupRegistry) -> None:
    """Set each factor B to random values that depend on the layer and on the expert's index in the dense model."""
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
    """Train from step ``start`` on. If ``start`` > 0, first load the adapter in ``folder``. Otherwise save it there
    afterwards, if ``folder`` is not empty.

    Return the initial factors, the gradient norms and the final factors.
    """
    with ProcessGroupRegistry(Topology(expert=ranks, roles={"expert": "model"})) as registry:
        model = adapted(ranks, registry, options, zero)
        first = full_factors(model, registry)
        optimizer = optimizer_of(model, registry)
        if start:
            load_adapter(folder, model, registry)
        norms = [step_along(optimizer, loss_of(model, step)) for step in range(start, start + steps)]
        if folder and not start:
            save_adapter(folder, model, registry)
        return first, norms, full_factors(model, registry)


def test_initial_lora_factors_of_experts_do_not_depend_on_rank_count(world: World) -> None:
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


# Adapter files --------------------------------------------------------------------------------------------------------


def loaded(ranks: int, folder: str) -> tuple[Weights, Tensor]:
    with ProcessGroupRegistry(Topology(expert=ranks, roles={"expert": "model"})) as registry:
        model = adapted(ranks, registry, {}, zero=True)
        load_adapter(folder, model, registry)
        return full_factors(model, registry), loss_of(model).detach()


def test_saved_lora_of_experts_loads_on_other_rank_counts_and_in_peft(world: World, tmp_path: Path) -> None:
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


def test_saving_lora_of_expert_without_index_in_its_name_raises(world: World, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors (the extra 'lora')")
    for text in world.run(2, saved_without_list, str(tmp_path)):
        assert text.startswith(
            "0 has experts that differ between ranks along expert, but is in no nn.ModuleList that numbers the experts; put"
        )


# Several experts in one parameter ---------------------------------------------------------------------------------------

GROUPED: dict[str, tuple[dict[str, int], dict[str, P]]] = {
    "single": ({}, {"up": P(), "down": P()}),
    "expert": ({"expert": 4}, {"up": P("expert"), "down": P("expert")}),
    "tensor": ({"tensor": 2}, {"up": P(None, "tensor"), "down": P(None, None, "tensor")}),
    "expert and tensor": (
        {"expert": 2, "tensor": 2},
        {"up": P("expert", "tensor"), "down": P("expert", None, "tensor")},
    ),
}


class Grouped(nn.Module):
    """Parameters of all experts: [experts, out, in], or [experts, in, out] if ``is_transposed``."""

    def __init__(self, specs: dict[str, P], registry: ProcessGroupRegistry, is_transposed: bool) -> None:
        super().__init__()
        self.registry, self.is_transposed = registry, is_transposed
        self.axes = tuple(axis for axis in ("expert", "tensor") if axis in registry.topology.axes)
        generator = torch.Generator().manual_seed(8)
        for name, sizes in (("up", (EXPERTS, 8, WIDTH)), ("down", (EXPERTS, WIDTH, 8))):
            full = torch.randn(sizes, dtype=torch.float64, generator=generator)
            dims = [specs[name].dim_axes(dim) for dim in (0, 1, 2)]
            spec = P(dims[0], dims[2], dims[1]) if is_transposed else specs[name]
            param = nn.Parameter(shard(full.transpose(1, 2) if is_transposed else full, spec, registry))
            self.register_parameter(name, param)
            annotate(param, spec, name)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        tables: list[Any] = [self.up, self.down]
        up, down = (each.transpose(1, 2) if self.is_transposed else each for each in tables)
        if self.axes:
            x, scores = (copy_to(tensor, self.registry, *self.axes) for tensor in (x, scores))
        if "expert" in self.axes:
            scores = scores.narrow(1, self.registry.rank("expert") * len(up), len(up))
        hidden = torch.tanh(torch.einsum("bi,eoi->ebo", x, up))
        output = torch.einsum("be,ebh,eoh->bo", scores, hidden, down)
        return reduce_from(output, self.registry, *self.axes) if self.axes else output


class GroupedModel(nn.Module):
    def __init__(self, layout: str, registry: ProcessGroupRegistry, is_transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)
        self.experts: Any = Grouped(GROUPED[layout][1], registry, is_transposed)
        declare(self, {"*": P()})

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts(x, self.router(x).softmax(-1))
        return output


def grouped_registry(layout: str) -> ProcessGroupRegistry:
    sizes: dict[str, Any] = GROUPED[layout][0]
    return ProcessGroupRegistry(Topology(**sizes, roles={"expert": "model"} if "expert" in sizes else {}))


def grouped_model(layout: str, registry: ProcessGroupRegistry, zero: bool = False, **options: Any) -> GroupedModel:
    model = GroupedModel(layout, registry, options.pop("is_transposed", False))
    add_lora(model, ["experts.up", "experts.down"], R, ALPHA, registry, **options)
    if not zero:
        for name, b in model.experts.lora_B.items():
            full = (EXPERTS, WIDTH if name == "down" else 8, R)
            values = 0.3 * torch.randn(full, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name)))
            b.data.copy_(shard(values, spec_of(b), registry))
    return model


def grouped_run(
    layout: str, options: dict[str, Any], start: int = 0, steps: int = STEPS, folder: str = ""
) -> tuple[Weights, list[float], Weights]:
    with grouped_registry(layout) as registry:
        model = grouped_model(layout, registry, **options)
        first, optimizer = full_weights(model, registry), optimizer_of(model, registry)
        if start:
            load_checkpoint(folder, model, optimizer)
        norms = [step_along(optimizer, loss_of(model, step)) for step in range(start, start + steps)]
        if folder and not start:
            save_checkpoint(folder, model, optimizer)
        return first, norms, full_weights(model, registry)


def grouped_reference(first: Weights, options: dict[str, Any]) -> tuple[list[float], Weights]:
    """Train the LoRA factors in one process: each weight is the dense weight plus the scaled product of its factors."""
    factors = {name: value.clone().requires_grad_() for name, value in first.items()}
    scaling = ALPHA / R**0.5 if options.get("use_rslora") else ALPHA / R
    optimizer, norms = torch.optim.AdamW([*factors.values()], lr=LR, weight_decay=0.1), []
    is_transposed = options.get("is_transposed", False)
    with ProcessGroupRegistry(Topology()) as registry:
        dense = GroupedModel("single", registry, is_transposed)
        for step in range(STEPS):
            weights = {}
            for name in ("up", "down"):
                change = scaling * factors[f"experts.lora_B.{name}"] @ factors[f"experts.lora_A.{name}"]
                change = change.transpose(1, 2) if is_transposed else change
                weights[f"experts.{name}"] = dense.experts.get_parameter(name).detach() + change
            optimizer.zero_grad()
            loss_of(lambda x: torch.func.functional_call(dense, weights, (x,)), step).backward()  # noqa: B023
            norms.append(float(nn.utils.clip_grad_norm_(factors.values(), MAX_NORM)))
            optimizer.step()
    return norms, {name: value.detach() for name, value in factors.items()}


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"is_transposed": True}], ids=["LoRA", "rsLoRA", "in-out"]
)
@pytest.mark.parametrize("layout", ["expert", "tensor", "expert and tensor"])
def test_lora_on_stacked_experts_trains_like_dense_lora(world: World, layout: str, options: dict[str, Any]) -> None:
    ranks = math.prod(GROUPED[layout][0].values())
    for first, norms, weights in world.run(ranks, grouped_run, layout, options):
        expected_norms, expected = grouped_reference(first, options)
        assert min(expected_norms) > MAX_NORM, "every step should clip"
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_lora_training_of_stacked_experts_resumes_on_another_layout(world: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    first, norms, _ = world.run(4, grouped_run, "expert and tensor", {}, 0, 5, folder)[0]
    _, more, weights = world.run(4, grouped_run, "expert", {}, 5, 5, folder)[0]
    expected_norms, expected = grouped_reference(first, {})
    assert [*norms, *more] == pytest.approx(expected_norms, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


def grouped_checks(folder: str) -> tuple[dict[str, P], Weights, Proof, list[Weights], str]:
    """Return the specs, the initial values and the proof of the factors, the base weights before, during and after a
    merge, and the error of merging with a wrong spec."""
    with grouped_registry("expert and tensor") as registry:
        model = grouped_model("expert and tensor", registry, zero=True)
        start, specs = full_weights(model, registry), declare_adapters(model, registry)
        model = grouped_model("expert and tensor", registry)
        proof = prove(model, loss_of, registry)
        if importlib.util.find_spec("safetensors"):
            save_adapter(folder, model, registry)
        states = []
        for change in (model.experts.merge, model.experts.unmerge, lambda: None):
            weights = model.experts.base_layer.named_parameters()
            states.append({name: unshard(param.detach(), spec_of(param), registry) for name, param in weights})
            change()
        declare(model, {"experts.lora_A.up": P("expert", "tensor")})
        with pytest.raises(ValueError, match=r".") as error:
            model.experts.merge()
        return specs, start, proof, states, str(error.value)


def grouped_loaded(layout: str, folder: str) -> Weights:
    with grouped_registry(layout) as registry:
        model = grouped_model(layout, registry, zero=True)
        load_adapter(folder, model, registry)
        return full_weights(model, registry)


def test_lora_of_stacked_experts_works_with_prove_merge_and_save_adapter(world: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "adapter")
    with ProcessGroupRegistry(Topology()) as registry:
        single = full_weights(grouped_model("single", registry, zero=True), registry)
        factors = full_weights(grouped_model("single", registry), registry)
    for specs, start, proof, (before, during, after), error in world.run(4, grouped_checks, folder):
        assert specs == {
            "experts.lora_A.up": P("expert", partial="tensor"),
            "experts.lora_B.up": P("expert", "tensor"),
            "experts.lora_A.down": P("expert", None, "tensor"),
            "experts.lora_B.down": P("expert", partial="tensor"),
        }
        assert all(torch.equal(start[name], value) for name, value in single.items())
        assert {*proof.proved} == {*specs}, proof
        assert proof.is_correct, proof
        for name in ("up", "down"):
            dense = before[name] + ALPHA / R * factors[f"experts.lora_B.{name}"] @ factors[f"experts.lora_A.{name}"]
            torch.testing.assert_close(during[name], dense, rtol=2.3e-16, atol=1e-15)
            torch.testing.assert_close(after[name], before[name], rtol=5e-16, atol=2e-15)
        assert error.startswith("experts.lora_A.up is declared P('expert', 'tensor'), but its base layer requires")
    pytest.importorskip("safetensors", reason="needs safetensors (the extra 'lora')")
    for layout in ("single", "tensor"):
        for found in world.run(math.prod(GROUPED[layout][0].values()), grouped_loaded, layout, folder):
            assert all(torch.equal(found[name], value) for name, value in factors.items())


def test_lora_of_stacked_experts_rejects_unsupported_options_and_targets() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        for key, value in (("use_dora", True), ("dropout", 0.1)):
            options: Any = {key: value}
            with pytest.raises(ValueError, match=f"experts: {key}={value} is not supported on parameters of several"):
                add_lora(GroupedModel("single", registry), "experts.up", R, ALPHA, registry, **options)
        with pytest.raises(ValueError, match="target 'up' is a parameter of the model itself"):
            add_lora(GroupedModel("single", registry).experts, "up", R, ALPHA, registry)
        with pytest.raises(ValueError, match=r"experts\.bias of a Grouped does not exist"):
            GroupedLoRA(GroupedModel("single", registry).experts, ["bias"], R, ALPHA, registry, name="experts")


def test_add_lora_on_grouped_lora_module_raises_and_changes_nothing() -> None:
    registry = ProcessGroupRegistry(Topology())
    model = GroupedLoRA(GroupedModel("single", registry).experts, ["up"], R, ALPHA, registry)
    with pytest.raises(
        ValueError, match="target 'up': the model has LoRA adapters already; name all parameters of this"
    ):
        add_lora(model, "up", R, ALPHA, registry)
    assert type(model.base_layer) is Grouped


def test_second_add_lora_call_for_another_parameter_of_experts_raises_with_remedy() -> None:
    registry = ProcessGroupRegistry(Topology())
    model = GroupedModel("single", registry)
    add_lora(model, "experts.up", R, ALPHA, registry)
    for target in ("experts.down", "down", "*.down"):
        with pytest.raises(
            ValueError, match=": experts has LoRA adapters already; name all parameters of this module in"
        ):
            add_lora(model, target, R, ALPHA, registry)
    adapters = add_lora(GroupedModel("single", registry), ["experts.up", "experts.down"], R, ALPHA, registry)
    assert {*adapters["experts"].lora_A} == {"up", "down"}
