"""LoRA on sharded layers: training, dropout, resuming, merging and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lora_models import (
    DEFAULT,
    LAYERS,
    LAYOUTS,
    MAX_NORM,
    WIDTH,
    Options,
    Weights,
    adapted,
    batch,
    full_weights,
    one_step,
    optimizer_of,
    ranks_of,
    reference,
    trained,
)
from meshstep.optim import load_checkpoint, save_checkpoint
from meshstep.parallel import (
    LoRA,
    P,
    ProcessGroupRegistry,
    Topology,
    VocabParallelEmbedding,
    add_lora,
    declare,
    shard,
    spec_of,
    unshard,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from world import World

CASES = {
    **{
        layout: (layout, Options(blocks=3 if layout in ("tensor", "data and tensor", "grid") else 1))
        for layout in LAYOUTS
    },
    "sequence parallel": ("tensor", Options(sequence_parallel=True)),
    "rsLoRA": ("data and tensor", Options(adapters={"use_rslora": True})),
    "rsLoRA, grid": ("grid", Options(adapters={"use_rslora": True})),
    "rsLoRA, cube": ("cube", Options(adapters={"use_rslora": True}, blocks=1)),
    "DoRA": ("data and tensor", Options(LAYERS, {"use_dora": True})),
    "DoRA, gathered": ("gathered outputs", Options(LAYERS, {"use_dora": True})),
    "DoRA, sequence parallel": ("tensor", Options(LAYERS, {"use_dora": True}, sequence_parallel=True)),
    **{
        f"DoRA, {layout}": (layout, Options(LAYERS, {"use_dora": True}, blocks=3 if layout == "grid" else 1))
        for layout in ("grid", "wide grid", "grids", "cube", "cube tables", "cube of 8")
    },
    "fused blocks of other sizes": ("gathered outputs", Options(blocks=(4, 1, 1))),
    "column layers only": ("tensor", Options(("up",))),
    "row layers only": ("tensor", Options(("down",))),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_lora_on_sharded_layers_trains_like_dense_lora(world: World, case: str) -> None:
    layout, options = CASES[case]
    for first, norms, weights in world.run(ranks_of(layout), trained, layout, options):
        expected_norms, expected = reference(first, options)
        assert min(expected_norms) > MAX_NORM, "every step should clip"
        assert weights.keys() == expected.keys()
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_initial_lora_factors_are_equal_in_different_layouts(world: World) -> None:
    starts = []
    for layout in ("tensor", "grid", "gathered outputs", "wide grid"):
        starts += [first for first, _, _ in world.run(ranks_of(layout), trained, layout, DEFAULT, 0, 0, True)]
    for start in starts:
        assert start.keys() == {f"{layer}.lora_{factor}" for layer in LAYERS for factor in "AB"}
        for name, value in start.items():
            assert torch.equal(value, starts[0][name]), name


def lookup_over_two_axes() -> tuple[Tensor, Tensor]:
    """Return the outputs of an adapted embedding whose vocabulary is sharded over two axes, and the expected outputs."""
    topology = Topology(outer=2, inner=2, aliases={"tensor": ("outer", "inner")})
    with ProcessGroupRegistry(topology) as registry:
        adapted_table = LoRA(VocabParallelEmbedding(16, 4, registry), r=2, alpha=2)
        a, ids = torch.arange(32.0).reshape(2, 16), torch.arange(16)
        with torch.no_grad():
            adapted_table.lora_A.copy_(shard(a, P(None, "tensor"), registry))
        expected = adapted_table.base_layer(ids) + a.t() @ adapted_table.lora_B.t()
        return adapted_table(ids).detach(), expected.detach()


def test_lora_on_embedding_sharded_over_two_axes_adds_product(world: World) -> None:
    for output, expected in world.run(4, lookup_over_two_axes):
        torch.testing.assert_close(output, expected)


# Dropout --------------------------------------------------------------------------------------------------------------

DROPOUTS = {
    "tensor": Options(adapters={"dropout": 0.4}),
    "tensor, sequence parallel": Options(adapters={"dropout": 0.4}, sequence_parallel=True),
    **{
        layout: Options(adapters={"dropout": 0.4}, blocks=3 if layout == "grid" else 1)
        for layout in ("gathered outputs", "grid", "wide grid", "grids", "cube", "cube tables", "cube of 8")
    },
}


def trained_with_dropout(layout: str, options: Options) -> tuple[Weights, list[float], Weights]:
    if layout == "gathered outputs":  # without data ranks: the dropout mask is drawn for all samples
        with mock.patch.dict(LAYOUTS, {layout: LAYOUTS[layout]._replace(topology={"tensor": 2})}):
            return trained(layout, options)
    return trained(layout, options)


@pytest.mark.parametrize("case", DROPOUTS)
def test_sharded_lora_with_dropout_trains_like_one_process(world: World, case: str) -> None:
    layout, options = case.partition(",")[0], DROPOUTS[case]
    ((_, expected_norms, expected),) = world.run(1, trained, "single", options)
    ((_, norms_without, _),) = world.run(1, trained, "single", options._replace(adapters={}))
    assert norms_without != pytest.approx(expected_norms, rel=1e-3)
    ranks = 2 if layout == "gathered outputs" else ranks_of(layout)
    for _, norms, weights in world.run(ranks, trained_with_dropout, layout, options):
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


def gradient_with_seeds(seeds: tuple[int, int]) -> tuple[Tensor, str]:
    """Return the gradient of the replicated factor A, whose input has dropout, and the error of unequal seeds."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model: Any = adapted("tensor", registry, Options(("up",), {"dropout": 0.5}))
        torch.manual_seed(seeds[registry.rank("tensor")])
        try:
            model.up(torch.ones(3, WIDTH, dtype=torch.float64)).square().sum().backward()
        except ValueError as error:
            return torch.zeros(()), str(error)
        return model.up.lora_A.grad, ""


def test_lora_dropout_gradients_are_equal_on_replicas_and_unequal_seeds_raise(world: World) -> None:
    (first, error), (second, _) = world.run(2, gradient_with_seeds, (7, 7))
    assert not error
    assert torch.equal(first, second)
    for _, text in world.run(2, gradient_with_seeds, (7, 8)):
        assert text.startswith("up: dropout needs the same masks on all ranks along tensor, but the states of torch's")


def test_lora_dropout_zeroes_inputs_of_factors_and_repeats_masks_in_activation_checkpointing() -> None:
    torch.manual_seed(0)  # without a seed, sums that cancel to nearly 0 may differ by more than rtol
    base, x = nn.Linear(4, 3, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    layer = LoRA(base, 2, 6.0, dropout=0.5)
    nn.init.normal_(layer.lora_B)
    torch.manual_seed(1)
    output = layer(x)
    torch.manual_seed(1)
    kept = torch.empty(5, 4, dtype=torch.bool).bernoulli_(0.5)
    expected = base(x) + 3.0 * (x * kept / 0.5) @ layer.lora_A.t() @ layer.lora_B.t()
    torch.testing.assert_close(output, expected, rtol=1e-14, atol=1e-14)
    gradients = []
    runs: list[Any] = [layer, lambda x: checkpoint(layer, x, use_reentrant=False)]
    for run in runs:
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(run(x).square().sum(), [layer.lora_A, layer.lora_B]))
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
    layer.eval()
    torch.testing.assert_close(layer(x), base(x) + 3.0 * x @ layer.lora_A.t() @ layer.lora_B.t(), rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match=r"dropout=1\.0 must be at least 0 and below 1"):
        LoRA(base, 2, 6.0, dropout=1.0)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def run_part(
    layout: str, options: Options, folder: str, start: int, steps: int
) -> tuple[Weights, list[float], Weights]:
    """Train some steps, from the checkpoint in ``folder`` unless ``start`` is 0, and save a checkpoint there."""
    with ProcessGroupRegistry(Topology(**LAYOUTS[layout].topology)) as registry:
        model = adapted(layout, registry, options)
        first = full_weights(model, registry)
        optimizer = optimizer_of(model, registry)
        trainable_only = "use_dora" in options.adapters  # base weights of 1-D layers do not fit 2-D layers
        if start:
            load_checkpoint(folder, model, optimizer, trainable_only=trainable_only)
        norms = [one_step(layout, model, optimizer, step) for step in range(start, start + steps)]
        save_checkpoint(folder, model, optimizer, trainable_only=trainable_only)
        return first, norms, full_weights(model, registry)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after", "adapters"),
    [
        ("tensor", "data and tensor", {}),
        ("data and tensor", "gathered outputs", {"use_rslora": True}),
        ("grid", "wide grid", {}),
        ("tensor", "grid", {"use_dora": True}),
        ("grid", "cube tables", {"use_dora": True}),
    ],
)
def test_lora_training_resumes_on_another_layout(
    world: World, tmp_path: Path, before: str, after: str, adapters: dict[str, Any]
) -> None:
    folder, options = str(tmp_path / "saved"), Options(adapters=adapters, blocks=1)
    first, norms, _ = world.run(ranks_of(before), run_part, before, options, folder, 0, 5)[0]
    _, more, weights = world.run(ranks_of(after), run_part, after, options, folder, 5, 5)[0]
    expected_norms, expected = reference(first, options)
    assert [*norms, *more] == pytest.approx(expected_norms, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


# Merging --------------------------------------------------------------------------------------------------------------


def merged(layout: str, options: Options, dtype: torch.dtype) -> tuple[Weights, Weights, Weights, float]:
    """Return the full base weights before, while and after the adapters are merged, and the change of the loss by merging.

    The loss is compared for float64 only; otherwise the change is 0.
    """
    with ProcessGroupRegistry(Topology(**LAYOUTS[layout].topology)) as registry:
        model = adapted(layout, registry, options)
        ids, targets = batch(0)
        before = LAYOUTS[layout].loss(model, ids, targets, registry)
        adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoRA)}
        for adapter in adapters.values():
            adapter.base_layer.to(dtype)

        def weights() -> Weights:
            found = {}
            for name, adapter in adapters.items():
                weight: Any = adapter.base_layer.weight
                spec = P(None, "output", owned={"input": "output"}) if weight is None else spec_of(weight)
                found[name] = unshard(None if weight is None else weight.detach(), spec, registry)
            return found

        states = [weights()]
        for adapter in adapters.values():
            adapter.merge()
        states.append(weights())
        change = 0.0
        if dtype == torch.float64:
            change = float((LAYOUTS[layout].loss(model, ids, targets, registry) - before).abs())
        for adapter in adapters.values():
            adapter.unmerge()
        return (*states, weights(), change)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "adapters"),
    [
        (layout, adapters)
        for layout in ("data and tensor", "grid", "cube", "cube tables")
        for adapters in ({}, {"use_dora": True})
    ],
)
def test_merged_lora_weights_equal_dense_merge_and_unmerge_restores_weights(
    world: World, layout: str, adapters: dict[str, Any], dtype: torch.dtype
) -> None:
    options = Options(LAYERS, adapters, blocks=1)
    first = world.run(ranks_of(layout), trained, layout, options, 0)[0][0]
    for before, during, after, change in world.run(ranks_of(layout), merged, layout, options, dtype):
        assert change < 1e-12
        for name in options.names:
            weight = before[name].double()
            is_out_in = name == "head" or (name != "embed" and layout == "data and tensor")
            dense = 2.0 * first[f"{name}.lora_B"] @ first[f"{name}.lora_A"]
            dense = (weight if is_out_in else weight.t()) + dense
            if adapters:
                magnitude = first[f"{name}.lora_magnitude_vector"]
                dense = dense * (magnitude / dense.norm(dim=1)).unsqueeze(1)
            dense = dense if is_out_in else dense.t()
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(during[name].double(), dense, rtol=ulp, atol=1e-14)
            torch.testing.assert_close(after[name].double(), weight, rtol=2 * ulp, atol=8 * ulp)


def test_add_lora_rejects_second_adapter_and_unknown_target_without_changes() -> None:
    registry = ProcessGroupRegistry(Topology())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    declare(model, {"*": P()})
    add_lora(model, "0", r=2, alpha=2, registry=registry)
    model[1].requires_grad_(True)
    with pytest.raises(ValueError, match="target '0': 0 has a LoRA adapter already; leave this layer out of targets"):
        add_lora(model, ["1", "0"], r=2, alpha=2, registry=registry)
    with pytest.raises(ValueError, match="target 'up' is the name of no module of Sequential; its modules are 0, "):
        add_lora(model, ["1", "up"], r=2, alpha=2, registry=registry)
    assert isinstance(model[1], nn.Linear)
    assert model[1].weight.requires_grad


def test_add_lora_that_fails_at_a_later_layer_changes_nothing() -> None:
    """Adding fails at `norm`. The adapter of `experts` has registered hooks by then."""
    registry = ProcessGroupRegistry(Topology())
    model: Any = nn.Module()
    model.experts = nn.Module()
    model.experts.up = nn.Parameter(torch.ones(2, 3, 4))
    declare(model, {"*": P()})
    model.first, model.norm = nn.Linear(4, 4), nn.LayerNorm(4)
    declare(model.first, {"*": P()})
    model.first.bias.requires_grad_(False)
    before = {name: param.requires_grad for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match="norm"):
        add_lora(model, ["experts.up", "first", "norm"], r=2, alpha=2, registry=registry)
    assert {name: param.requires_grad for name, param in model.named_parameters()} == before
    assert type(model.first) is nn.Linear
    assert type(model.experts) is nn.Module
    assert not model.experts._forward_pre_hooks
    assert not model.experts._forward_hooks
    adapters = add_lora(model, ["experts.up", "first"], r=2, alpha=2, registry=registry)
    assert [*adapters] == ["experts", "first"]
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        "experts.lora_A.up", "experts.lora_B.up", "first.lora_A", "first.lora_B"
    }  # fmt: skip


def test_second_add_lora_call_keeps_factors_of_earlier_adapters_trainable() -> None:
    """The second call also adapts the module that contains an adapted layer. All other parameters are frozen."""
    registry = ProcessGroupRegistry(Topology())
    model: Any = nn.Module()
    model.first, model.experts = nn.Embedding(4, 4), nn.Module()
    model.experts.router, model.experts.up = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 3, 4))
    declare(model, {"*": P()})
    add_lora(model, ["first", "router"], r=2, alpha=2, registry=registry, use_dora=True)
    model.first.lora_A.requires_grad_(False)
    add_lora(model, ["experts.up"], r=2, alpha=2, registry=registry)
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        "first.lora_B", "first.lora_magnitude_vector",
        "experts.base_layer.router.lora_A", "experts.base_layer.router.lora_B",
        "experts.base_layer.router.lora_magnitude_vector", "experts.lora_A.up", "experts.lora_B.up",
    }  # fmt: skip


class LikePeft(nn.Module):
    """A layer of PEFT: its factors are in dicts by the name of the adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})


class Saved(nn.Module):
    """A module in PEFT's ``modules_to_save``."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(4, 4)})


class Three(nn.Module):
    """Three layers whose names are those of an adapter. They are one if ``layer`` is frozen."""

    def __init__(self, is_adapter: bool) -> None:
        super().__init__()
        self.layer, self.a, self.b = nn.Linear(4, 4).requires_grad_(not is_adapter), nn.Linear(4, 2), nn.Linear(2, 4)


def test_add_lora_keeps_factors_of_peft_and_own_adapters_trainable() -> None:
    model: Any = nn.Module()
    model.peft, model.head = LikePeft(nn.Linear(4, 4)), Saved(nn.Linear(4, 4))
    model.own, model.other, model.down = Three(True), Three(False), nn.Linear(4, 4)
    with pytest.raises(ValueError, match="target 'peft': peft has a LoRA adapter already"):
        add_lora(model, ["down", "peft"], r=2, alpha=2)
    with pytest.raises(ValueError, match="has a LoRA adapter already; train that adapter"):
        LoRA(model.peft, r=2, alpha=2)
    add_lora(model, ["down"], r=2, alpha=2)
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        "peft.lora_A.default.weight", "peft.lora_B.default.weight",
        "head.modules_to_save.default.weight", "head.modules_to_save.default.bias",
        "own.a.weight", "own.b.weight", "down.lora_A", "down.lora_B",
    }  # fmt: skip
