"""`prove` and `infer` on tied parameters, parameters owned by stages, stale replicas and context-parallel models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshstep.parallel import P, ProcessGroupRegistry, Topology, all_to_all, declare, gather_objects
from meshstep.testing import InferredLayout, Proof, infer, prove
from proof_models import Drawn, Stage, _ids
from torch import Tensor, nn
from world import World

TIED = P(tied={"pipe": (0, -1)})


class Renamed(Stage):
    """The last stage, where the tied table has the name ``head``."""

    @property
    def table(self) -> Tensor:  # type: ignore[override]
        return self.get_parameter("head")


def staged(kind: str) -> tuple[Proof, InferredLayout, dict[str, bool]]:
    """Return the results of `prove` and `infer` for a pipeline of two stages that share a table, and whether each parameter
    is unchanged."""
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            model: Any = Stage(Drawn("pipe", (("pipe", 2),), 8, 1, 0.0, True, True, 3), registry)
        finally:
            torch.set_default_dtype(torch.float32)
        stage, name = registry.rank("pipe"), "table"
        if "renamed" in kind and stage == 1:
            name, model.head = "head", model.table
            del model.table
            model.__class__ = Renamed
        with torch.no_grad():
            if "stale" in kind and stage == 1:
                model.table.add_(0.01)
            model.inner[0].bias.add_(stage if "equal biases" not in kind else 0)
        inner = P(owned={"pipe": 0 if "by the first" in kind else stage}) if "owned" in kind else P()
        declare(model, {name: P() if "undeclared" in kind else TIED, "inner.*": inner})
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        ids = _ids(registry, 3)
        proof = prove(model, lambda model: model.run(ids), registry)
        layout = infer(model, lambda model: model.run(ids), registry)
        return proof, layout, {name: torch.equal(param, before[name]) for name, param in model.named_parameters()}


def results(world: World, kind: str) -> tuple[Proof, list[InferredLayout]]:
    """Return the proof, which is the same on all ranks, and the inferred layout of each rank."""
    ranks = world.run(2, staged, kind)
    assert all(proof == ranks[0][0] and layout.proof == ranks[0][1].proof for proof, layout, _ in ranks)
    assert all(all(unchanged.values()) for _, _, unchanged in ranks)
    return ranks[0][0], [layout for _, layout, _ in ranks]


@pytest.mark.parametrize("kind", ["", "renamed"])
def test_prove_accepts_tied_parameter_under_one_name_or_two(world: World, kind: str) -> None:
    proof, layouts = results(world, kind)
    assert proof.is_correct, proof
    assert proof.hints == ()
    assert set(proof.proved) == {"table", *(f"inner.0.{k} (pipe={s})" for k in ("weight", "bias") for s in (0, 1))}
    found = P(tied={"pipe": (0, 1)})
    assert [layout.rules["head" if "head" in layout.rules else "table"] for layout in layouts] == [found] * 2
    assert ("head" in layouts[1].rules) == bool(kind)


@pytest.mark.parametrize("kind", ["stale", "renamed, stale"])
def test_prove_reports_tied_parameter_whose_replicas_differ_along_pipe(world: World, kind: str) -> None:
    proof, layouts = results(world, kind)
    for one in (proof, layouts[0].proof):
        (finding,) = one.findings
        assert (finding.name, finding.cause, finding.axes) == ("table", "copies differ", ("pipe",))
        assert "its replicas differ along 'pipe'" in str(one)
    assert all(not {"table", "head"} & set(layout.rules) for layout in layouts)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("undeclared", "table (pipe=0) and table (pipe=1)"),
        ("undeclared, renamed", "table (pipe=0) and head (pipe=1)"),
        ("equal biases", "inner.0.bias (pipe=0) and inner.0.bias (pipe=1)"),
    ],
)
def test_prove_hints_at_possible_tie_if_two_stages_have_equal_values(world: World, kind: str, named: str) -> None:
    proof, layouts = results(world, kind)
    assert proof.is_correct, proof
    (hint,) = proof.hints
    assert f"parameters with equal values: {named}. If they are one parameter, declare it" in hint
    assert str(proof).endswith(f"\nnote: {hint}")
    assert proof.to_json()["hints"] == (hint,)
    assert all(layout.proof.hints == (hint,) and f"# note: {hint}" in str(layout) for layout in layouts)


def test_prove_does_not_find_undeclared_tie_of_unequal_values(world: World) -> None:
    """The tied parameters are undeclared, and have correct gradients but different values. Nothing in the model shows
    that they are one logical parameter."""
    proof, _ = results(world, "undeclared, stale")
    assert (proof.is_correct, proof.hints) == (True, ())


def test_prove_accepts_equally_named_parameters_that_each_stage_owns(world: World) -> None:
    proof, layouts = results(world, "owned, equal biases")
    assert proof.is_correct, proof
    assert {layout.rules["inner.0.bias"] for layout in layouts} == {P()}


def test_prove_names_parameters_on_stage_that_does_not_own_them(world: World) -> None:
    proof, _ = results(world, "owned by the first")
    assert {(finding.name, finding.cause) for finding in proof.findings} == {
        ("inner.0.weight (pipe=1)", "held by others"),
        ("inner.0.bias (pipe=1)", "held by others"),
    }


# Context parallelism -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """An LM with one attention layer. Each rank along ``axis`` processes its own part of each sequence."""

    def __init__(self, registry: ProcessGroupRegistry, axis: str) -> None:
        super().__init__()
        self.registry, self.axis = registry, axis
        self.table, self.qkv, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        index = self.registry.rank(self.axis)
        inputs, targets = (part.chunk(2, 1)[index] for part in (ids[:, :-1], ids[:, 1:]))
        x = self.table(inputs)
        heads = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4)
        heads = all_to_all(heads, self.registry, self.axis, split_dim=3, concat_dim=1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        out = all_to_all(out, self.registry, self.axis, split_dim=1, concat_dim=2)
        return F.cross_entropy(self.head(x + out.flatten(2)).flatten(0, 1), targets.flatten())


def context_parallel(axis: str, kind: str = "") -> tuple[Proof, InferredLayout, dict[str, bool]]:
    sizes: dict[str, Any] = {axis: 2}
    with ProcessGroupRegistry(Topology(**sizes)) as registry:
        torch.manual_seed(5)
        model = Attention(registry, axis)
        ids = torch.randint(11, (3, 9))
        with torch.no_grad():
            if "stale" in kind and registry.global_rank == 1:
                model.head.weight.mul_(1.01)
            if "other" in kind and registry.global_rank == 1:
                model.head.weight.normal_()
            if "doubled" in kind:
                model.head.weight.register_hook(lambda gradient: gradient * 2)
        declare(model, {"*": P()})
        proof = prove(model, lambda model: model(ids), registry)
        layout = infer(model, lambda model: model(ids), registry)
        gathered = gather_objects(layout.proof, registry)
        assert gathered == [layout.proof] * 2
        return proof, layout, {}


def test_infer_finds_replicas_of_context_parallel_model(world: World) -> None:
    for proof, layout, _ in world.run(2, context_parallel, "cp"):
        assert proof.is_correct, proof
        assert layout.proof.is_correct, layout
        assert layout.proof.hints == ()
        assert len(layout.rules) == 5
        assert set(layout.rules.values()) == {P()}


def test_infer_returns_rules_and_advises_role_if_only_axis_role_is_wrong(world: World) -> None:
    """The name `sequence` has no default role, so that the axis is a model axis, along which losses must be equal."""
    for proof, layout, _ in world.run(2, context_parallel, "sequence"):
        assert [finding.name for finding in proof.findings] == ["the forward"]
        (finding,) = layout.proof.findings
        assert (finding.cause, finding.axes) == ("forward differs", ("sequence",))
        assert "build Topology(roles={'sequence': 'data'}, ...)" in str(layout)
        assert len(layout.proof.proved) == 5
        assert len(layout.rules) == 5
        assert set(layout.rules.values()) == {P()}


def test_infer_returns_no_rules_if_another_role_does_not_help(world: World) -> None:
    for _, layout, _ in world.run(2, context_parallel, "sequence", "doubled"):
        assert layout.rules == {}
        assert [finding.name for finding in layout.proof.findings] == ["the forward"]
        assert "build Topology(roles=" not in str(layout)


@pytest.mark.parametrize("kind", ["stale", "other values"])
def test_prove_reports_diverged_replica_along_context_axis_and_infer_shards_it(world: World, kind: str) -> None:
    for proof, layout, _ in world.run(2, context_parallel, "cp", kind):
        (finding,) = proof.findings
        assert (finding.name, finding.cause, finding.axes) == ("head.weight", "copies differ", ("cp",))
        # Without a declaration, ranks with other values may hold shards, like experts.
        assert layout.proof.is_correct
        assert layout.rules["head.weight"].sharded_axes == ("cp",)
        named = any("head.weight (along 'cp')" in hint for hint in layout.proof.hints)
        assert named == (kind == "stale"), layout
