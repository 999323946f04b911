"""`prove` on models of the examples: several layouts, experts, and pipeline schedules of torch.

`prove` accepts these models, and finds one planted mistake in each.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import pytest
import torch
from meshstep.parallel import ProcessGroupRegistry, Topology, declare, vocab_parallel_cross_entropy
from meshstep.testing import Proof, prove
from pipelines import ZBV_RUNS
from run_example import example
from torch import Tensor, nn
from world import World


def _proved(model: nn.Module, loss: Any, registry: ProcessGroupRegistry, broken: str) -> tuple[Proof, Proof]:
    """Return the proofs of the correct model and of the model with one doubled gradient."""
    right = prove(model, loss, registry)
    named = dict(model.named_parameters())
    if broken in named:
        named[broken].register_hook(lambda gradient: gradient * 2)
    return right, prove(model, loss, registry)


def _check(proofs: tuple[Proof, Proof], broken: str) -> None:
    right, wrong = proofs
    assert right.is_correct, right
    assert not right.undecided
    assert [finding.name for finding in wrong.findings] == [broken]
    assert wrong.findings[0].factor == pytest.approx(2.0)


def _digits(topology: Topology, broken: str, experts: tuple[str, ...] | None = None) -> tuple[Proof, Proof]:
    layers, digits, moe = example("models.layers"), example("models.digits"), example("models.moe")
    with ProcessGroupRegistry(topology) as registry:
        torch.manual_seed(0)
        family = layers.layers_for(registry)
        split = example("train_digits").Split(family, registry)
        model: nn.Module
        if experts is None:
            model = digits.DigitsTransformer(family, 16, 4, 1)
        else:
            mixture = partial(moe.Mixture, shape=moe.MixtureShape(4), registry=registry, axes=experts)
            model = digits.MixtureTransformer(family, mixture, 16, 4, 1)
        declare(model)
        generator = torch.Generator().manual_seed(1)
        patches = torch.randn(16, 16, 4, generator=generator)
        labels = torch.randint(10, (16,), generator=generator)
        local = split.local(example("train_digits").Samples(patches, labels))
        return _proved(model, lambda model: family.loss(model(local.patches), local.labels), registry, broken)


@pytest.mark.parametrize(
    "axes",
    [
        "data=2,tensor=2",
        "row=2,col=2",
        "depth=2,row=2,col=2",
        "input=2,weight=2,output=2",
    ],
)
def test_prove_accepts_digits_model_and_finds_a_planted_mistake(world: World, axes: str) -> None:
    topology = Topology.parse(axes)
    _check(world.run(topology.world_size, _digits, topology, "blocks.0.norm1.bias")[0], "blocks.0.norm1.bias")


@pytest.mark.parametrize(
    ("topology", "experts"),
    [
        (Topology(roles={"expert": "data"}, data=2, expert=2), ("expert",)),
        (
            Topology(edp=1, mid=2, tensor=2, aliases={"data": ("edp", "mid"), "expert": ("mid", "tensor")}),
            ("mid", "tensor"),
        ),
        (Topology(data=2, tensor=2), ("data",)),
    ],
    ids=repr,
)
def test_prove_accepts_mixture_of_experts_and_finds_a_planted_mistake(
    world: World, topology: Topology, experts: tuple[str, ...]
) -> None:
    name = "blocks.0.mixture.router.weight"
    _check(world.run(4, _digits, topology, name, experts)[0], name)


def _pipeline(topology: Topology, schedule: str, broken: str) -> tuple[Proof, Proof]:
    lm = example("pipeline_lm")
    with ProcessGroupRegistry(topology) as registry:
        options = argparse.Namespace(width=8, heads=2, depth=4, seed=0)
        kind, per_rank = lm.SCHEDULES[schedule]
        stages = per_rank * registry.size("pipe")
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        part = lm.Part(registry, lm.own_stages(schedule, registry), stages, options)
        torch.set_default_dtype(default)
        group = registry.group("pipe")
        made = [
            lm.PipelineStage(lm.Stage(part, stage, options.depth), stage, stages, registry.device, group=group)
            for stage in part.own
        ]
        inputs = torch.randint(
            200, (4, lm.CONTEXT), generator=torch.Generator().manual_seed(registry.coordinate.get("data", 0))
        )

        def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
            return vocab_parallel_cross_entropy(logits, targets, registry, reduction="sum")

        run = kind(made if per_rank > 1 else made[0], 2, loss_fn=loss_sum, scale_grads=False)

        def loss_fn(part: nn.Module) -> Tensor | None:
            losses: list[Tensor] = []
            first, last = part.own[0] == 0, part.own[-1] == stages - 1  # type: ignore[index]
            run.step(*([inputs] if first else []), **({"target": inputs.roll(-1, 1), "losses": losses} if last else {}))
            return torch.stack(losses).sum().detach() if losses else None

        return _proved(part, loss_fn, registry, broken)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", *(["zbv"] if ZBV_RUNS else [])])
def test_prove_accepts_pipeline_schedules_and_finds_a_planted_mistake(world: World, schedule: str) -> None:
    topology = Topology(pipe=2, tensor=2)
    _check(world.run(4, _pipeline, topology, schedule, "embed.weight")[0], "embed.weight")
