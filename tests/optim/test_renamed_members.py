"""Former public names and signatures, and their warnings."""

from __future__ import annotations

import dataclasses
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import meshstep
import meshstep.optim
import meshstep.testing
import pytest
import torch
from meshstep.amp import Fp8, MasterWeights
from meshstep.optim import (
    AdaGC,
    ByNorm,
    Clip,
    Flops,
    GradStats,
    Muon,
    NoCompression,
    ParallelOptimizer,
    ParamTransform,
    PlacementContext,
    Position,
    ReductionPlan,
    Sharded,
    Skip,
    SkipSpikes,
    StatePlacement,
    SteppedTensor,
    Telemetry,
)
from meshstep.optim.states.chain import TransformChain
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.mesh.deprecation import _FormerMember
from meshstep.testing import Proof
from torch import nn

# Per package: {former name: new name}.
OBJECTS: dict[str, dict[str, str]] = {
    "optim": {
        "Binding": "PlacementContext",
        "Bucket": "NormBucket",
        "align_copies": "align_replicas",
        "share_weights": "broadcast_weights",
        "Decision": "ClipResult",
        "OfEachParameter": "PerParameterState",
        "Bf16Wire": "Bf16Compression",
        "Exact": "NoCompression",
        "Exchange": "CommHook",
        "Link": "ParamTransform",
        "Piece": "SteppedTensor",
        "Placement": "StatePlacement",
    },
    "testing": {"Inferred": "InferredLayout"},
}
# Per class: {former name: new name}.
MEMBERS: dict[type, dict[str, str]] = {
    AdaGC: {"times": "factor"},
    Clip: {"shown": "reported_coef"},
    Proof: {"untold": "undecided", "right": "is_correct"},
    Fp8: {"leave_out": "exclude", "across_data": "sync_over_data"},
    Muon: {"no_matrices": "adamw_names"},
    Flops: {"per_count": "per_unit"},
    Telemetry: {"left_out": "excluded_params"},
    GradStats: {"disagreed": "ranks_disagree", "parted": "replicas_diverged", "vetoed": "rejected"},
    MasterWeights: {"publish": "write_back"},
    P: {"holders": "num_replicas", "on": "resolve", "cuts": "joint_dim_axes", "together": "joint_axes"},
    ParallelOptimizer: {
        "pieces": "stepped_tensors",
        "vetoed_steps": "rejected_steps",
        "window_ends": "mark_last_micro_batch",
    },
    ParamTransform: {
        "bring": "pull_grads",
        "publish": "write_back",
        "holds_back": "keeps_grad_here",
        "kept": "extra_state",
        "differs": "replica_dependent",
        "divisible": "supports_partial_step",
        "in_parts": "may_step_partially",
        "cut_over": "sharded_over",
    },
    Position: {"CUT": "SHARD"},
    ProcessGroupRegistry: {"meet": "connect"},
    ReductionPlan: {"holders": "num_replicas", "weights": "replica_weights", "cut_over": "sharded_over"},
    Skip: {"most_in_a_row": "max_consecutive"},
    SkipSpikes: {"times": "factor", "then": "inner", "of": "statistic"},
    StatePlacement: {"link": "transform", "draws": "rounds_stochastically"},
    SteppedTensor: {"piece": "tensor"},
    Topology: {
        "atoms": "expand_aliases",
        "on_axes": "expand_coordinate",
        "only_splits_the_batch": "is_batch_only_axis",
        "untold_expert_axes": "expert_axes_without_role",
    },
    TransformChain: {"links": "transforms", "publish": "write_back"},
}

# Per callable, by name: the callable, its positional arguments, and {former argument name: (new name, a value)}.
ARGUMENTS: dict[str, tuple[Callable[..., object], tuple[object, ...], dict[str, tuple[str, Any]]]] = {
    "AdaGC": (AdaGC, (), {"times": ("factor", 1.5)}),
    "Fp8": (Fp8, (), {"leave_out": ("exclude", ("head",)), "across_data": ("sync_over_data", True)}),
    "Flops": (partial(Flops, peak=1e15), (), {"per_count": ("per_unit", 6e9)}),
    "Muon": (Muon, (list(nn.Linear(3, 2).named_parameters()),), {"no_matrices": ("adamw_names", ("head",))}),
    "Muon.for_model": (Muon.for_model, (nn.Linear(3, 2),), {"no_matrices": ("adamw_names", ("head",))}),
    "Proof": (partial(Proof, findings=(), where=None, forwards=1), ((),), {"untold": ("undecided", ("a",))}),
    "ProcessGroupRegistry": (ProcessGroupRegistry, (Topology(),), {"apart": ("exclusive_groups", True)}),
    "Sharded": (Sharded, (), {"exchange": ("compression", NoCompression())}),
    "Skip": (Skip, (), {"most_in_a_row": ("max_consecutive", 3)}),
    "SkipSpikes": (
        SkipSpikes,
        (),
        {"times": ("factor", 3.0), "then": ("inner", ByNorm(1.0)), "of": ("statistic", "mean")},
    ),
}


@contextmanager
def warns_here(*texts: str) -> Iterator[None]:
    """Expect one DeprecationWarning per text, in this order, all at lines of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [(warning.category, str(warning.message)) for warning in caught] == [
        (DeprecationWarning, text) for text in texts
    ]
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}


@contextmanager
def parallel_sgd(**options: Any) -> Iterator[ParallelOptimizer]:
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Linear(3, 2)
        declare(model, {"*": P()})
        yield ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry, **options)


@pytest.mark.parametrize(("package", "old"), [(package, old) for package, names in OBJECTS.items() for old in names])
def test_former_object_name_returns_same_object_and_warns(package: str, old: str) -> None:
    module, new = getattr(meshstep, package), OBJECTS[package][old]
    text = f"meshstep.{package}.{old} is deprecated: write {new} instead"
    with warns_here(text, text):
        assert getattr(module, old) is getattr(module, new)
        assert getattr(meshstep if package != "testing" else module, old) is getattr(module, new)
    with warns_here(text):
        exec(compile(f"from meshstep.{package} import {old}", __file__, "exec"), {"__name__": "user"})
    assert old not in module.__all__


def test_unknown_module_attribute_raises() -> None:
    for module in (meshstep, meshstep.optim):
        with pytest.raises(AttributeError, match=rf"module '{module.__name__}' has no attribute 'Pieces'"):
            module.Pieces  # noqa: B018


def instance_of(owner: type) -> Any:
    methods: frozenset[str] = getattr(owner, "__abstractmethods__", frozenset())
    return object.__new__(type(owner.__name__, (owner,), dict.fromkeys(methods)))


@pytest.mark.parametrize(("owner", "old"), [(owner, old) for owner, names in MEMBERS.items() for old in names])
def test_former_member_name_reads_and_sets_new_member_and_warns(owner: type, old: str) -> None:
    """Members of enums, properties, and fields of dataclasses are not set, only read from the class if it has them."""
    new = MEMBERS[owner][old]
    text = f"{owner.__name__}.{old} is deprecated: write {new} instead"
    if hasattr(owner, new):
        with warns_here(text):
            assert getattr(owner, old) is getattr(owner, new)
    member = owner.__dict__.get(new)
    if issubclass(owner, Enum) or isinstance(member, property | cached_property) or dataclasses.is_dataclass(owner):
        return
    instance, value = instance_of(owner), object()
    with warns_here(text):
        setattr(instance, old, value)
    with warns_here(text):
        assert getattr(instance, old) is getattr(instance, new) is value


def test_every_former_member_name_of_package_is_tested() -> None:
    classes = {
        cls
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "meshstep"
        for cls in vars(module).values()
        if isinstance(cls, type)
    }
    found = {cls: {old for old, member in vars(cls).items() if isinstance(member, _FormerMember)} for cls in classes}
    assert {cls: names for cls, names in found.items() if names} == {cls: {*names} for cls, names in MEMBERS.items()}


@pytest.mark.parametrize(("name", "old"), [(name, old) for name, (*_, olds) in ARGUMENTS.items() for old in olds])
def test_former_argument_name_sets_new_argument_and_warns(name: str, old: str) -> None:
    make, required, olds = ARGUMENTS[name]
    new, value = olds[old]
    with warns_here(f"{name}({old}={value!r}) is deprecated: write {new}={value!r} instead"):
        made = make(*required, **{old: value})
    assert getattr(made, new, value) == value
    with pytest.raises(TypeError, match=f"{new} is given twice, as {new}=.* and as {old}="):
        make(*required, **{old: value, new: value})


def test_step_with_former_argument_last_ends_window_and_warns() -> None:
    with parallel_sgd(accumulation_steps=3) as optimizer:
        step: Any = optimizer.step
        optimizer.backward(sum(param.sum() for group in optimizer.param_groups for param in group["params"]))
        assert step() is None
        with warns_here("ParallelOptimizer.step(last=True) is deprecated: write final=True instead"):
            assert step(last=True) is not None


def test_former_member_names_of_instances_return_new_members_and_warn() -> None:
    with parallel_sgd() as optimizer:
        records = {SteppedTensor: optimizer.stepped_tensors()[0], ReductionPlan: optimizer.plan}
    for owner, record in records.items():
        for old, new in MEMBERS[owner].items():
            with warns_here(f"{owner.__name__}.{old} is deprecated: write {new} instead"):
                assert getattr(record, old) is getattr(record, new)


def test_override_with_former_name_is_called_and_warns_at_class_definition() -> None:
    class Middle(ParamTransform):
        def pull_grads(self, window: Any, averaged: bool) -> Any:
            return "middle"

    texts = [
        "Own.bring is deprecated: write pull_grads instead",
        "Own.differs is deprecated: write replica_dependent instead",
    ]
    with warns_here(*texts):

        class Own(Middle):
            differs = True

            def bring(self, window: Any, averaged: bool) -> Any:
                return f"own, {super().bring(window, averaged)}"  # type: ignore[misc]

    class Last(Own):
        def pull_grads(self, window: Any, averaged: bool) -> Any:
            return f"last, {super().pull_grads(window, averaged)}"

    with warns_here("Both.bring is deprecated: write pull_grads instead"):

        class Both(Own):
            def bring(self, window: Any, averaged: bool) -> Any:
                return f"both, {super().bring(window, averaged)}"

    window: Any = None
    assert Own().pull_grads(window, True) == Own().bring(window, True) == "own, middle"
    assert Last().pull_grads(window, True) == "last, own, middle"
    assert Both().pull_grads(window, True) == "both, own, middle"
    assert Own().replica_dependent


def test_state_placement_with_former_method_names_is_called_in_step_and_warns() -> None:
    calls = []
    with warns_here("Former.bring is deprecated: write pull_grads instead"):

        class Former(ParamTransform):
            def bring(self, window: Any, averaged: bool) -> None:
                calls.append("bring")

    with warns_here("FormerPlacement.link is deprecated: write transform instead"):

        class FormerPlacement(StatePlacement):
            position = Position.STATE

            def check(self, context: Any) -> None: ...

            def link(self, context: Any) -> ParamTransform:
                return Former()

    with parallel_sgd(states=FormerPlacement()) as optimizer:  # type: ignore[abstract]
        optimizer.backward(sum(param.sum() for group in optimizer.param_groups for param in group["params"]))
        optimizer.step()
    assert calls == ["bring"]


class FormerTransform(ParamTransform):
    seen: Any = None

    def install(self, optimizer: torch.optim.Optimizer, held: Any, tensors: Any) -> Any:  # type: ignore[override]
        self.seen = [at.name for at in held], list(tensors)
        return {}

    def derive(self, plan: Any, held: Any, tensors: Any) -> Any:  # type: ignore[override]
        assert len(held) == len(tensors) == len(plan.entries)
        return plan


class OwnPlacement(StatePlacement):
    position = Position.STATE

    def check(self, context: Any) -> None: ...

    def transform(self, context: Any) -> ParamTransform:
        self.made = FormerTransform()
        return self.made


def test_transform_with_former_tensor_list_signature_receives_tensors_and_warns() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model, placement = nn.Linear(3, 2), OwnPlacement()
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with pytest.warns(DeprecationWarning, match=r"write (install\(self, optimizer, positions\)|derive)"):
            ParallelOptimizer(inner, registry, states=placement)
        assert placement.made.seen[0] == ["weight", "bias"]
        assert all(map(lambda one, other: one is other, placement.made.seen[1], model.parameters()))


@pytest.mark.parametrize("kind", [ParamTransform, PlacementContext, Position, StatePlacement])
def test_pickle_that_names_the_former_module_of_a_class_loads(kind: type) -> None:
    assert pickle.loads(f"cmeshstep.optim.states.chain\n{kind.__name__}\n.".encode()) is kind


def test_documentation_uses_no_former_name() -> None:
    """Of the Markdown pages, only CHANGELOG.md and FORMER_NAMES.md contain former names."""
    root = Path(__file__).parents[2]
    objects = "|".join(name for names in OBJECTS.values() for name in names)
    members = "|".join({name for names in MEMBERS.values() for name in names} - {"of"})  # `ReductionPlan.of` is current
    arguments = "|".join({name for _, _, names in ARGUMENTS.values() for name in names} | {"last"})
    former = re.compile(
        rf"`({objects})`|\b({objects})\(|\.({members})\b(?=[(`])|`({arguments})` of `|\b({arguments})=\w"
    )
    pages = [
        path
        for path in [*root.glob("*.md"), *root.glob("docs/**/*.md")]
        if path.name not in ("CHANGELOG.md", "FORMER_NAMES.md")
    ]
    assert len(pages) > 40
    found = {str(path): match[0] for path in pages for match in former.finditer(path.read_text())}
    assert found == {}
