"""`prove` on adapters: DoRA, merged adapters, and specs that do not fit the base layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lora_models import LAYERS, LAYOUTS, Options, adapted, batch, full_weights, ranks_of
from meshstep.parallel import (
    LoRA,
    P,
    ProcessGroupRegistry,
    Topology,
    blocks,
    declare,
    declare_adapters,
    load_adapter,
    save_adapter,
    shard,
    spec_of,
    stop_gradient,
)
from meshstep.testing import Proof, infer, prove
from torch import Tensor, nn
from world import World

DORA = Options(LAYERS, {"use_dora": True}, blocks=1)
Model = Callable[[nn.Module], Tensor]


def loss_fn(layout: str, registry: ProcessGroupRegistry) -> Model:
    ids, targets = batch(0)
    if "data" in registry.topology.axes:
        ids, targets = (shard(full, P("data"), registry) for full in (ids, targets))
    return lambda model: LAYOUTS[layout].loss(model, ids, targets, registry)


# DoRA -----------------------------------------------------------------------------------------------------------------


def proved_dora(layout: str, mistake: str = "") -> Proof:
    """Return the proof of a model with DoRA and a planted mistake: "detached norm", "gradient not summed" or none ("")."""
    with ProcessGroupRegistry(Topology(**LAYOUTS[layout].topology)) as registry:
        model = adapted(layout, registry, DORA)
        planted: dict[str, dict[str, Any]] = {
            "": {},
            "detached norm": {"meshstep.parallel.adapters.lora.stop_gradient": torch.detach},
            "gradient not summed": {"meshstep.parallel.adapters.adapter_layout.copy_to": lambda x, *_: x},
        }
        for name, function in planted[mistake].items():
            mock.patch(name, function).start()
        try:
            return prove(model, loss_fn(layout, registry), registry)
        finally:
            mock.patch.stopall()


@pytest.mark.parametrize("layout", ["tensor", "data and tensor", "grid", "cube tables"])
def test_prove_accepts_dora(world: World, layout: str) -> None:
    factors = ("lora_A", "lora_B", "lora_magnitude_vector")
    for proof in world.run(ranks_of(layout), proved_dora, layout):
        assert {*proof.proved} == {f"{name}.{factor}" for name in DORA.names for factor in factors}, proof
        assert proof.is_correct, proof


@pytest.mark.long
def test_prove_rejects_dora_with_detached_norm_or_missing_sum(world: World) -> None:
    for proof in world.run(2, proved_dora, "tensor", "detached norm"):
        assert {"up.lora_B", "down.lora_B"} <= {finding.name for finding in proof.findings}, proof
    for proof in world.run(2, proved_dora, "tensor", "gradient not summed"):
        causes = {finding.name: (finding.cause, finding.axes) for finding in proof.findings}
        assert causes["up.lora_A"] == ("a sum is missing", ("tensor",)), proof


class Scaled(nn.Module):
    """A module that divides by the norm of its weight, which counts as constant in backward."""

    def __init__(self, calls: Callable[[], int] = lambda: 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.calls = nn.Parameter(torch.randn(3, dtype=torch.float64)), calls
        declare(self, {"*": P()})

    def forward(self) -> Tensor:
        norms = [stop_gradient(self.weight.norm()) for _ in range(self.calls())]
        return (self.weight**3).sum() / sum(norms)


def test_prove_accepts_stop_gradient_which_detaches_outside_prove() -> None:
    registry = ProcessGroupRegistry(Topology())
    model = Scaled()
    assert prove(model, lambda model: model(), registry).proved == ("weight",)
    norm = stop_gradient(2 * model.weight.norm())
    assert torch.equal(norm, 2 * model.weight.norm())
    assert not norm.requires_grad


def test_prove_rejects_forward_with_more_stop_gradient_calls_than_first() -> None:
    registry = ProcessGroupRegistry(Topology())
    counts = iter([1, *[2] * 100])
    with pytest.raises(
        ValueError,
        match=r"a later forward called stop_gradient more often than the first \(calls in the first forward: 1\)",
    ):
        prove(Scaled(lambda: next(counts)), lambda model: model(), registry)


# Merged adapters ------------------------------------------------------------------------------------------------------


def merged_errors() -> list[str]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model: Any = adapted("tensor", registry, Options(("up", "down"), blocks=1))
        model.up.merge()
        found = []
        for check in (prove, infer):
            with pytest.raises(ValueError, match=r".") as error:
                check(model, loss_fn("tensor", registry), registry)
            found.append(str(error.value))
        model.up.unmerge()
        assert prove(model, loss_fn("tensor", registry), registry).is_correct
        return found


def test_prove_and_infer_reject_merged_adapter_and_name_it(world: World) -> None:
    for texts in world.run(2, merged_errors):
        for text in texts:
            assert text.startswith("the adapter of up is merged, so its factors take no part in the forward")
            assert text.endswith("call unmerge() first")


# Specs that do not fit the base layer ---------------------------------------------------------------------------------


def misdeclared(folder: str, name: str, spec: P) -> tuple[bool, list[str], bool]:
    """Return whether `prove` accepts a wrong spec, the errors of merge, save and load, and True if no weight changed."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model: Any = adapted("tensor", registry, DORA)
        save_adapter(folder, model)
        for adapter in (module for module in model.modules() if isinstance(module, LoRA)):
            adapter.merge()
            adapter.unmerge()
        before, weight = full_weights(model, registry), model.up.base_layer.weight.detach().clone()
        declare(model, {name: spec})
        accepts = prove(model, loss_fn("tensor", registry), registry).is_correct
        found = []
        layer: Any = model.get_submodule(name.partition(".")[0])
        for call in (layer.merge, lambda: save_adapter(folder, model), lambda: load_adapter(folder, model)):
            with pytest.raises(ValueError, match=r".") as error:
                call()
            found.append(str(error.value))
        declare_adapters(model)  # as the errors advise
        save_adapter(folder, model)
        after = full_weights(model, registry)
        unchanged = all(torch.equal(before[each], after[each]) for each in before)
        return accepts, found, unchanged and torch.equal(weight, model.up.base_layer.weight)


DECLARED = {"up.lora_B": P("tensor"), "down.lora_A": P(None, "tensor"), "up.lora_magnitude_vector": P("tensor")}


@pytest.mark.parametrize(
    ("name", "spec", "accepted"),
    [
        ("up.lora_B", P(None, "tensor"), True),
        ("down.lora_A", P("tensor"), True),
        ("up.lora_magnitude_vector", P(), False),
    ],
)
def test_merge_save_and_load_reject_lora_factor_spec_that_contradicts_base_layer(
    world: World, tmp_path: Path, name: str, spec: P, accepted: bool
) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors (the extra 'lora')")
    expected = (
        f"{name} is declared {spec}, but its base layer requires {DECLARED[name]}; call "
        f"declare_adapters(model) after all other declarations, or declare(model, {{{name!r}: {DECLARED[name]}}})"
    )
    for accepts, texts, unchanged in world.run(2, misdeclared, str(tmp_path / "adapter"), name, spec):
        assert accepts == accepted
        assert texts == [expected] * 3
        assert unchanged


def proposed(name: str) -> tuple[P, dict[str, P | None]]:
    """Return the derived spec of a factor, and the specs that `prove` proposes if the factor is declared replicated."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = adapted("tensor", registry, Options(("up", "down")))
        derived = spec_of(model.get_parameter(name))
        declare(model, {name: P()})
        proof = prove(model, loss_fn("tensor", registry), registry)
        return derived, {finding.name: finding.inferred for finding in proof.findings}


@pytest.mark.parametrize(
    ("name", "expected"), [("up.lora_B", P(blocks("tensor", 3))), ("down.lora_A", P(None, "tensor"))]
)
def test_prove_proposes_lora_factor_spec_that_fits_base_layer(world: World, name: str, expected: P) -> None:
    """From the gradients alone, `prove` would propose ``P("tensor")`` without blocks for `up.lora_B`."""
    assert world.run(2, proposed, name) == [(expected, {name: expected})] * 2
