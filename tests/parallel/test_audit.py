"""`audit` compares declared layouts with parameters whose true layout is known."""

from __future__ import annotations

import pytest
import torch
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.parallel.interop.audit import Audit, audit
from torch import Tensor, nn
from world import World

# Four elements of one parameter along `tensor`: values on ranks 0 and 1, then gradients on ranks 0 and 1.
RAMP, OTHER, ZEROS = [0.1, 0.2, 0.3, 0.4], [0.5, -0.6, 0.7, 0.8], [0.0] * 4
PIECE, TERM, COPY = (RAMP, OTHER, RAMP, OTHER), (RAMP, RAMP, RAMP, OTHER), (RAMP, RAMP, OTHER, OTHER)
ZERO_PIECE, ZERO_COPY = (ZEROS, ZEROS, RAMP, OTHER), (ZEROS, ZEROS, OTHER, OTHER)
UNUSED = (ZEROS, ZEROS, ZEROS, ZEROS)

Truth = tuple[list[float], list[float], list[float], list[float]]


def audited(truth: Truth, spec: P, dtype: torch.dtype, where: str) -> Audit:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        rank = registry.rank("tensor")
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(truth[rank], dtype=dtype))})
        annotate(model["w"], spec, "w")
        gradient: Tensor = torch.tensor(truth[2 + rank], dtype=dtype) * (1 + registry.rank("data"))
        # Simulate the different rounding of two ranks that compute the same gradient.
        gradient = gradient * (1 + rank * torch.finfo(dtype).eps)
        if where != "none":
            setattr(model["w"], where, gradient)
        return audit(model, registry)


RIGHT = [
    (PIECE, P("tensor")), (TERM, P(partial="tensor")), (COPY, P()),
    (ZERO_PIECE, P("tensor")), (ZERO_COPY, P()), (UNUSED, P()), (UNUSED, P("tensor")), (UNUSED, P(partial="tensor")),
]  # fmt: skip
WRONG = [
    (PIECE, P(), "the values differ"),
    (PIECE, P(partial="tensor"), "the values differ"),
    (TERM, P(), "the gradients differ"),
    (TERM, P("tensor"), "the values are equal and the gradients differ"),
    (COPY, P("tensor"), "the values are equal and so are the gradients"),
    (COPY, P(partial="tensor"), "the gradients are equal"),
    (ZERO_PIECE, P(), "the gradients differ"),
    (ZERO_COPY, P("tensor"), "the values are equal and so are the gradients"),
    (ZERO_COPY, P(partial="tensor"), "the gradients are equal"),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def test_audit_accepts_correct_specs(world: World) -> None:
    cases = [(4, (truth, spec, dtype, "grad")) for truth, spec in RIGHT for dtype in DTYPES]
    for found in world.run_each(audited, cases):
        assert found == [Audit(1, ())] * 4
    assert str(found[0]) == "1 parameters match their declared layouts"


def test_audit_names_parameter_with_wrong_spec(world: World) -> None:
    cases = [
        (truth, spec, dtype, said, where)
        for truth, spec, said in WRONG
        for dtype in DTYPES
        for where in ("grad", "main_grad")
    ]
    results = world.run_each(audited, [(4, (truth, spec, dtype, where)) for truth, spec, dtype, _, where in cases])
    for (_, spec, _, said, _), found in zip(cases, results, strict=True):
        assert found == [found[0]] * 4
        (disagreement,) = found[0].disagreements
        assert (disagreement.name, disagreement.axis, disagreement.found) == ("w", "tensor", said)
        assert str(found[0]).startswith(f"w: declared {spec}, ")


def test_audit_without_gradients_compares_only_values(world: World) -> None:
    found = world.run_each(
        audited,
        [(4, (truth, spec, torch.float32, "none")) for truth, spec in ((PIECE, P()), (COPY, P("tensor")), (TERM, P()))],
    )
    assert [[d.found for d in of_ranks[0].disagreements] for of_ranks in found] == [
        ["the values differ"],
        ["the values are equal"],
        [],
    ]


def drifted() -> Audit:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([0.1, 0.2]) * (1 + registry.global_rank))})
        annotate(model["w"], P(), "w")
        model["w"].grad = torch.tensor([0.1, 0.2]) * (1 + registry.global_rank)
        return audit(model, registry)


def test_audit_compares_values_but_not_gradients_along_data_axis(world: World) -> None:
    (disagreement,) = world.run(2, drifted)[0].disagreements
    assert (disagreement.axis, disagreement.found) == ("data", "the values differ")


def undeclared() -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = nn.Linear(2, 2)
        if registry.global_rank == 0:
            for param in model.parameters():
                annotate(param, P())
        with pytest.raises(ValueError, match="has no spec") as error:
            audit(model, registry)
        return str(error.value)


def test_audit_raises_on_every_rank_for_undeclared_parameter(world: World) -> None:
    assert all("shape (2, 2)" in text for text in world.run(2, undeclared))


def audited_by_alias() -> Audit:
    with ProcessGroupRegistry(Topology(row=2, col=2, aliases={"grid": ("row", "col")})) as registry:
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(RAMP) + registry.global_rank)})
        annotate(model["w"], P("grid"), "w")
        return audit(model, registry)


def test_audit_accepts_parameter_sharded_over_an_axis_alias(world: World) -> None:
    assert world.run(4, audited_by_alias) == [Audit(1, ())] * 4


# Values of one parameter on each of three pipeline stages, named `w`, `w` and `v`. None: the stage lacks the parameter.
Stages = tuple[list[float] | None, list[float] | None, list[float] | None]
ENDS = P(tied={"pipe": (0, -1)})


def audited_stages(values: Stages, spec: P, summed: bool = False, also: list[float] | None = None) -> Audit:
    with ProcessGroupRegistry(Topology(pipe=3, data=2)) as registry:
        stage, model = registry.rank("pipe"), nn.ParameterDict()
        own = values[stage]
        if own is not None:
            name = "v" if stage == 2 else "w"
            model[name] = nn.Parameter(torch.tensor(own))
            annotate(model[name], spec)
            model[name].grad = torch.tensor(OTHER) * (1 if summed else 1 + stage)
        if also is not None and stage == 0:
            model["also"] = nn.Parameter(torch.tensor(also))
            annotate(model["also"], P())
        return audit(model, registry)


@pytest.mark.default_cases(4)
@pytest.mark.parametrize(
    ("values", "summed", "said"),
    [
        ((RAMP, None, RAMP), False, None),
        ((RAMP, None, OTHER), False, "the values differ"),
        ((ZEROS, None, OTHER), False, "the values differ"),
        ((RAMP, None, RAMP), True, "the gradients are equal"),
    ],
    ids=["equal", "stale", "reset", "summed"],
)
def test_audit_compares_tied_parameters_with_different_names_per_stage(
    world: World, values: Stages, summed: bool, said: str | None
) -> None:
    first, *others = world.run(6, audited_stages, values, ENDS, summed)
    assert all(other == first for other in others)
    found = [(wrong.name, wrong.axis, wrong.declared, wrong.found) for wrong in first.disagreements]
    assert found == ([] if said is None else [("w", "pipe", "tied", said)])
    assert (first.parameters, first.hints) == (1, ())
    assert said is None or f"w: declared {ENDS}, tied over 'pipe', but {said}: " in str(first)


@pytest.mark.default_cases(5)
@pytest.mark.parametrize(
    ("values", "also", "named"),
    [
        ((RAMP, OTHER, RAMP), None, "w (pipe=0) and v (pipe=2)"),
        ((RAMP, RAMP, OTHER), None, "w (pipe=0) and w (pipe=1)"),
        ((RAMP, OTHER, None), None, None),
        ((ZEROS, ZEROS, ZEROS), None, None),
        ((RAMP, OTHER, RAMP), RAMP, None),
    ],
    ids=["other names", "one name", "unequal", "constant", "copies on one stage"],
)
def test_audit_hints_at_possible_tie_only_if_two_stages_have_equal_values(
    world: World, values: Stages, also: list[float] | None, named: str | None
) -> None:
    first, *others = world.run(6, audited_stages, values, P(), False, also)
    assert all(other == first for other in others)
    assert not first.disagreements
    assert len(first.hints) == (named is not None)
    if named is not None:
        assert f"parameters with equal values: {named}. If they are one" in first.hints[0]
        assert str(first).endswith(f"match their declared layouts\nnote: {first.hints[0]}")
