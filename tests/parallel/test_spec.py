"""Properties of specs, precedence of the rules of `declare`, and errors."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshstep.parallel import P, Topology, annotate, blocks, declare, spec_of
from meshstep.parallel.layout.annotation import annotation_of
from meshstep.testing.strategies import specs, topologies
from torch import nn

GRID = Topology(pipe=2, data=2, row=2, col=2)


@pytest.mark.parametrize(
    ("spec", "distinct", "holders"),
    [
        (P(), ("pipe",), 8),
        (P("row", "col"), ("pipe", "row", "col"), 2),
        (P("col"), ("pipe", "col"), 4),
        (P(("col", "row")), ("pipe", "row", "col"), 2),
        (P("col", owned={"row": 0}), ("pipe", "col"), 2),
        (P(partial="row"), ("pipe",), 8),
        (P("row", None, tied={"pipe": (0, -1)}), ("row",), 8),
        (P("row", None, tied={"pipe": (0,)}), ("row",), 4),
        (P("row", owned={"pipe": 1}), ("row",), 4),
        (P(None, "col", owned={"row": "col"}), ("pipe", "col"), 2),
        (P("row", owned={"pipe": "row"}), ("row",), 4),
    ],
)
def test_spec_has_expected_distinct_axes_and_replication_factor(
    spec: P, distinct: tuple[str, ...], holders: int
) -> None:
    assert spec.distinct_axes(GRID) == distinct
    assert spec.num_replicas(GRID) == holders


@given(data=st.data())
def test_shards_times_replication_factor_is_the_number_of_holding_ranks(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    spec = data.draw(specs(topology, (4, 4), uneven=True))
    ranks = sum(spec.holds(topology.coordinate(rank), topology) for rank in range(topology.world_size))
    pieces = prod(topology.size(axis) for axis in spec.distinct_axes(topology))
    assert pieces * spec.num_replicas(topology) == ranks


def test_equivalent_specs_are_equal() -> None:
    assert P("tensor", None) == P("tensor")
    assert hash(P(("row",), None)) == hash(P("row"))


def test_specs_with_different_owners_differ() -> None:
    assert P("col", owned={"row": 0}) != P("col") != P("col", owned={"row": "col"})
    assert P("col", owned={"row": 0}) != P("col", owned={"row": 1}) != P("col", owned={"row": "col"})


def test_repr_of_spec_is_its_constructor_call() -> None:
    assert repr(P("col", owned={"row": "col"})) == "P('col', owned={'row': 'col'})"
    assert repr(P(None, ("col", "row"), partial="t", tied={"pipe": (0, -1)})) == (
        "P(None, ('col', 'row'), partial='t', tied={'pipe': (0, -1)})"
    )


def test_equivalent_specs_with_blocks_are_equal() -> None:
    assert P(blocks("tensor", 1)) == P("tensor")
    assert P(blocks("tensor", (32, 8, 8))) == P(blocks("tensor", [4, 1, 1])) != P("tensor")
    assert P(blocks(("a", "b"), 2)) == P((blocks("a", 2), blocks("b", 2)))


def test_repr_of_spec_with_blocks_is_its_constructor_call() -> None:
    spec = P((blocks("tensor", 2), "data"), blocks("row", (4, 1, 1)), owned={"col": 0})
    assert repr(spec) == "P((blocks('tensor', 2), 'data'), blocks('row', (4, 1, 1)), owned={'col': 0})"
    assert eval(repr(spec)) == spec
    assert spec.dim_axes(0) == ("tensor", "data")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: blocks("a", 0), r"blocks\('a', 0\): sizes must be positive integers; give a number of equal blocks"),
        (lambda: blocks("a", ()), "give a number of equal blocks"),
        (lambda: blocks("a", (2, 0)), "give a number of equal blocks"),
        (lambda: blocks("a", 1.5), "give a number of equal blocks"),  # type: ignore[arg-type]
        (lambda: P(blocks("a", 2), "a"), "named twice"),
        (lambda: P("a", "a"), "named twice"),
        (lambda: P("a", partial="a"), "named twice"),
        (lambda: P(partial=3), r"partial=3\): give the name of a mesh axis"),  # type: ignore[arg-type]
        (lambda: P(partial=("a", 3)), r"partial=\('a', 3\)\): give the name of a mesh axis"),  # type: ignore[arg-type]
        (lambda: P(partial=blocks("a", 2)), r"partial=Blocks.*give the name of a mesh axis"),  # type: ignore[arg-type]
        (lambda: P(partial=(("a", "b"),)), r"give the name of a mesh axis, or a tuple of names"),  # type: ignore[arg-type]
        (lambda: P("a", owned={"a": 0}), "named twice"),
        (lambda: P("a", owned={"a": "a"}), "named twice"),
        (
            lambda: P("a", owned={"b": "c"}),
            r"owned=\{'b': 'c'\} needs a tensor dim .* sharded over 'c', .* owned=\{'b': 0\}",
        ),
        (lambda: P(owned={"a": "b", "b": 0}), "needs a tensor dim that is sharded over 'b', but there is none"),
        (
            lambda: P("a", owned={"b": "a"}).validate(1, Topology(a=3, b=2), "w"),
            r"w: .* needs size\('b'\) >= size\('a'\) = 3, but 'b' has size 2; use a larger axis as the key",
        ),
        (lambda: P(["a"]), r"P\(...\) has the entry \['a'\]; give the name of a mesh axis"),  # type: ignore[arg-type]
        (lambda: P(tied={"pipe": ()}), "has no coordinates"),
        (
            lambda: P("a", "b").validate(1, Topology(a=2, b=2), "w"),
            "w: .* more entries \\(2\\) than the tensor has dims \\(1\\)",
        ),
        (
            lambda: P("c").validate(1, Topology(a=2, b=2), "w"),
            r"w: .* names axis 'c', but the axes are a, b; add it to the topology \(c=1 if .*\), or name the axis",
        ),
        (
            lambda: P("c").validate(1, Topology(), "w"),
            r"w: .* names axis 'c', but the topology has no axes; add it to the topology \(c=1 if it has one rank\)$",
        ),
        (
            lambda: P(owned={"a": 2}).validate(1, Topology(a=2), "w"),
            "coordinate 2 of 'a', which is out of range; write a number from 0 to 1",
        ),
        (lambda: P(owned={"a": -1}).validate(1, Topology(a=2), "w"), "coordinate -1 of 'a', which is out of range"),
        (lambda: P(tied={"a": (0, -3)}).validate(1, Topology(a=2), "w"), "coordinate -3 of 'a'"),
    ],
)
def test_invalid_specs_raise(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 2), nn.LayerNorm(2)))


def test_most_specific_rule_of_declare_wins() -> None:
    net = model()
    declare(net, {"*": P(), "*weight": P("a"), "1.*weight": P("b"), "1.1.weight": P("c")})
    found = {name: spec_of(param) for name, param in net.named_parameters()}
    assert found == {
        "0.weight": P("a"),
        "0.bias": P(),
        "1.0.weight": P("b"),
        "1.0.bias": P(),
        "1.1.weight": P("c"),
        "1.1.bias": P(),
    }


def test_declare_overrides_annotation_of_a_layer_only_by_full_name() -> None:
    net = model()
    annotate(net[0].weight, P("own"))
    annotate(net[0].bias, P("own"))
    declare(net, {"*": P(), "0.bias": P("mine")})
    assert spec_of(net[0].weight) == P("own")
    assert spec_of(net[0].bias) == P("mine")


def test_declare_keeps_full_shape_only_if_spec_is_unchanged() -> None:
    net = model()
    annotate(net[0].weight, P("a"), full_shape=(11, 4))
    found = []
    for rules in ({"*": P()}, {"0.weight": P("a")}, {"0.weight": P("b")}):
        declare(net, rules)
        annotation = annotation_of(net[0].weight)
        assert annotation is not None
        found.append(annotation.full_shape)
    assert found == [(11, 4), (11, 4), None]


def test_second_declare_overrides_only_default_specs_unless_by_full_name() -> None:
    net = model()
    declare(net, {"*": P(), "0.*": P("a")})
    declare(net, {"1.*weight": P("b"), "0.bias": P("c"), "*": P("d")})
    found = {name: spec_of(param) for name, param in net.named_parameters()}
    assert found == {
        "0.weight": P("a"),
        "0.bias": P("c"),
        "1.0.weight": P("b"),
        "1.0.bias": P(),
        "1.1.weight": P("b"),
        "1.1.bias": P(),
    }
    declare(net, {"0.w*": P("a"), "1.*weight": P("b")})  # repeats earlier specs
    declare(net)
    assert {name: spec_of(param) for name, param in net.named_parameters()} == found


def test_specs_of_submodule_survive_default_rule_of_model() -> None:
    net = model()
    declare(net[1], {"0.*": P("a"), "*": P()})
    declare(net, {"*": P("b")})
    assert [spec_of(param) for param in net.parameters()] == [P("b"), P("b"), P("a"), P("a"), P(), P()]


def test_second_declare_with_conflicting_spec_raises() -> None:
    net = model()
    declare(net, {"*": P(), "0.w*": P("a")})
    message = r"0\.weight was declared P\('a'\) by an earlier rule, but the pattern '\*weight' declares P\('b'\)"
    with pytest.raises(ValueError, match=message):
        declare(net, {"1.*": P("c"), "*weight": P("b")})
    assert spec_of(net[1][0].weight) == P(), "declare changed a spec before it raised"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*": P(), "2.*": P()}, r"rule '2\.\*' matches no parameter .* 0\.weight"),
        ({"0.*": P()}, r"no rule declares the layout of 1\.0\.weight, 1\.0\.bias"),
        ({"*": P("a", "b")}, r"0\.bias: .* more entries \(2\) than the parameter of shape \(6,\)"),
        ({"*": P(), "*bias": P("a"), "bias*": P(), "*.bia?": P(), "*s": P("b")}, "matches no parameter"),
        ({"*": P(), "0.b*": P("a"), "*.bi": P(), "*.b": P()}, "matches no parameter"),
        ({"*": P(), "*.bia?": P("a"), "*bias": P()}, "equally specific and give different layouts"),
    ],
)
def test_invalid_rules_of_declare_raise_and_change_nothing(rules: dict[str, P], message: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=message):
        declare(net, rules)
    for param in net.parameters():
        with pytest.raises(ValueError, match="has no spec"):
            spec_of(param)


def test_spec_of_raises_for_deepcopied_parameter() -> None:
    net = model()
    declare(net, {"*": P()})
    duplicate = copy.deepcopy(net)
    with pytest.raises(ValueError, match="declare again"):
        spec_of(duplicate[0].weight)
