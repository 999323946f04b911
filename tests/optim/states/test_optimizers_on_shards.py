"""Optimizers on sharded parameters: elementwise ones are accepted, other ones rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import Axes, Split
from meshstep.amp import Bf16, Mode
from meshstep.optim import HalfStates, ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from third_party import SignDescent, TrustRatio, under_the_name
from torch import nn
from world import World

MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]),
    "Adafactor": torch.optim.Adafactor,
    "SOAP": under_the_name("pytorch_optimizer", "SOAP"),
    "TrustRatio": TrustRatio,
    "a subclass with its own step": type("MyAdam", (torch.optim.Adam,), {"step": lambda self, closure=None: None}),
    "a name of another library": under_the_name("my_research", "Lion"),
    "caution": lambda params: under_the_name("timm", "Adan")(params, caution=True),
    "norm clipping": lambda params: under_the_name("pytorch_optimizer", "Adan")(params, max_grad_norm=1.0),
    "said not to be": lambda params: said(torch.optim.AdamW(params), False),
    "Prodigy": under_the_name("prodigyopt", "Prodigy"),
    "8-bit": under_the_name("torchao", "AdamW8bit"),
    "4-bit": under_the_name("torchao", "Adam4bit"),
    "8-bit floating point": under_the_name("torchao", "AdamWFp8"),
    "8-bit, paged": under_the_name("bitsandbytes", "PagedAdamW8bit"),
    "8-bit, by an option": lambda params: under_the_name("bitsandbytes", "AdamW")(params, optim_bits=8),
    "8-bit, a subclass": type("MyAdamW", (under_the_name("torchao", "AdamW8bit"),), {}),
    # Optimizers that are accepted on shards follow: elementwise ones, and others that the user declares elementwise.
    "AdamW": torch.optim.AdamW,
    "a subclass of AdamW": type("MyAdamW", (torch.optim.AdamW,), {}),
    "Lion": under_the_name("lion_pytorch", "Lion"),
    "Tiger": under_the_name("pytorch_optimizer", "Tiger"),
    "Adan": lambda params: under_the_name("pytorch_optimizer", "Adan")(params, max_grad_norm=0.0),
    "schedule-free": under_the_name("schedulefree", "AdamWScheduleFree"),
    "32-bit states": lambda params: under_the_name("bitsandbytes", "AdamW")(params, optim_bits=32),
    "32-bit states, paged": under_the_name("bitsandbytes", "PagedAdamW32bit"),
    "8-bit, accepted": lambda params: said(under_the_name("torchao", "AdamW8bit")(params), True),
    "said to be": lambda params: said(under_the_name("my_research", "Lion")(params), True),
}
WHOLE = list(MAKE)[:16]
PIECES = list(MAKE)[16:]
QUANTIZED = [kind for kind in WHOLE if kind.startswith(("8-bit", "4-bit"))]


def said(optimizer: torch.optim.Optimizer, elementwise: bool) -> torch.optim.Optimizer:
    optimizer.elementwise = elementwise  # type: ignore[attr-defined]
    return optimizer


def made(kind: str, where: str) -> str:
    """Return the error of construction, after checking that the optimizer is unchanged in that case."""
    from dtensors import registry_of

    axes = {"split": (("data", 1), ("tensor", 2)), "pipeline": (("pipe", 2),)}.get(where, (("data", 2),))
    with registry_of(axes) as registry:
        dtype = torch.bfloat16 if where == "rounded" else torch.float32
        weight, bias = nn.Parameter(torch.randn(4, 6, dtype=dtype)), nn.Parameter(torch.randn(4, dtype=dtype))
        states: Any = ()
        if where == "rounded":
            annotate(weight, P(), "weight")
            annotate(bias, P(), "bias")
        if where == "split":
            annotate(weight, P(None, "tensor"), "weight")
            annotate(bias, P(), "bias")
        elif where == "DTensor":
            from torch.distributed.tensor import Shard, distribute_tensor

            weight = nn.Parameter(distribute_tensor(weight.detach(), registry.device_mesh("data"), (Shard(0),)))
            annotate(weight, P(), "weight")
        elif where == "sharded":
            states = Sharded("data")
        elif where == "half states":
            states = HalfStates()
        elif where == "frozen":
            weight.requires_grad_(False)
            annotate(weight, P("data"), "weight")
        precision: Mode | Bf16 = Bf16(stochastic_rounding=True) if where == "rounded" else "fp32"
        inner = MAKE[kind]([("weight", weight), ("bias", bias)] if where == "rounded" else [weight, bias])
        try:
            ParallelOptimizer(inner, registry, states=states, precision=precision)
        except ValueError as error:
            held = [param for group in inner.param_groups for param in group["params"]]
            assert held[0] is weight
            return str(error)
        return ""


@pytest.mark.parametrize("where", ["split", "DTensor", "sharded"])
def test_optimizers_not_known_to_be_elementwise_are_rejected_on_shards(world: World, where: str) -> None:
    for kind, texts in zip(WHOLE, world.run_each(made, [(2, (kind, where)) for kind in WHOLE]), strict=True):
        for text in texts:
            # The step size of Prodigy is a sum over all elements, so neither this attribute nor whole() would help.
            assert ("optimizer.elementwise = True" in text) == (kind != "Prodigy"), kind
            assert ("weight (P(" in text) == (where != "sharded"), kind
    (texts,) = world.run_each(made, [(2, ("norm clipping", where))])
    assert "max_grad_norm=1.0 is not elementwise (with max_grad_norm=0.0 it is)" in texts[0]


@pytest.mark.parametrize("where", ["split", "DTensor", "sharded"])
def test_optimizers_with_quantized_states_are_rejected_on_shards(world: World, where: str) -> None:
    for kind, texts in zip(QUANTIZED, world.run_each(made, [(2, (kind, where)) for kind in QUANTIZED]), strict=True):
        name = "optim_bits=8" if kind == "8-bit, by an option" else "8bit" if "8-bit" in kind else "4bit"
        for text in texts:
            assert "quantizes its states" in text, kind
            assert (name if kind != "8-bit floating point" else "AdamWFp8") in text, kind
            assert "Step full tensors with meshstep.optim.whole.whole(optimizer)" in text, kind
            assert "accept the difference with optimizer.elementwise = True" in text, kind


@pytest.mark.parametrize("where", ["split", "DTensor", "sharded"])
def test_optimizers_known_or_declared_elementwise_are_accepted_on_shards(world: World, where: str) -> None:
    found = world.run_each(made, [(2, (kind, where)) for kind in PIECES])
    assert dict(zip(PIECES, found, strict=True)) == {kind: ["", ""] for kind in PIECES}


@pytest.mark.parametrize("where", ["replicas", "frozen", "pipeline", "half states", "rounded"])
def test_optimizers_that_step_each_tensor_alone_are_accepted_on_full_tensors(world: World, where: str) -> None:
    alone = ("Prodigy", "norm clipping") if where in ("pipeline", "half states", "rounded") else ("Prodigy",)
    kinds = [kind for kind in MAKE if kind not in (*alone, "Muon")]
    found = world.run_each(made, [(2, (kind, where)) for kind in kinds])
    assert dict(zip(kinds, found, strict=True)) == {kind: ["", ""] for kind in kinds}


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("pipeline", "ranks hold different parameters, but Prodigy estimates"),
        ("half states", "HalfStates updates parameters in several calls of the optimizer's step(), but Prodigy"),
        ("rounded", "stochastic rounding updates parameters in several calls of the optimizer's step(), but Prodigy"),
        (
            "split",
            "weight (P(None, 'tensor')) is sharded, but Prodigy estimates its step size from all parameters together",
        ),
        ("sharded", "Sharded gives the optimizer 1-dim shards of parameters, but Prodigy estimates its step size"),
        ("replicas", ""),
    ],
)
def test_prodigy_is_accepted_only_if_it_steps_all_parameters_together(world: World, where: str, says: str) -> None:
    for text in world.run(2, made, "Prodigy", where):
        assert text.startswith(says)
        assert bool(text) == bool(says)


@pytest.mark.parametrize("where", ["pipeline", "half states", "rounded"])
def test_adan_with_max_grad_norm_is_rejected_if_it_steps_only_some_parameters_at_once(world: World, where: str) -> None:
    """Adan and LAMB clip by the norm of the gradients that they get, which may be those of one stage or one bucket."""
    for text in world.run(2, made, "norm clipping", where):
        assert "Adan with max_grad_norm=1.0 clips by the norm of all of its gradients" in text


def added() -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        whole, split = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        annotate(whole, P(), "whole")
        annotate(split, P("tensor"), "split")
        optimizer = ParallelOptimizer(TrustRatio([whole]), registry)
        with pytest.raises(
            ValueError, match=r"split \(P\('tensor'\)\) is sharded.*TrustRatio is not known to be elementwise"
        ) as caught:
            optimizer.add_param_group({"params": [split]})
        assert len(optimizer.param_groups) == 1
        return str(caught.value)


def test_added_param_group_with_shards_is_rejected_for_non_elementwise_optimizer(world: World) -> None:
    world.run(2, added)


def trained(axes: Axes, kind: type[SignDescent]) -> dict[str, Any]:
    """Return the full parameters after five steps, with the optimizer declared elementwise."""
    registry = ProcessGroupRegistry(Topology(roles=None, **dict(axes)))
    with registry:
        model = Split(axes, registry)
        inner = kind(model.parameters())
        optimizer = ParallelOptimizer(said(inner, True), registry, max_norm=0.5)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            optimizer.backward(model(x).square().mean())
            optimizer.step()
        return {name: model.full(name).detach() for name in model.specs}


def apart(world: World, kind: type[SignDescent]) -> float:
    (dense,), split = world.run(1, trained, (), kind), world.run(2, trained, (("tensor", 2),), kind)[0]
    return max(float((split[name] - dense[name]).abs().max() / dense[name].abs().max()) for name in dense)


def test_shards_match_dense_steps_of_sign_descent_but_not_of_trust_ratio(world: World) -> None:
    """An optimizer that uses norms of its tensors gives other results on shards, so such optimizers are rejected."""
    assert apart(world, SignDescent) < 1e-6
    assert apart(world, TrustRatio) > 1e-3
