"""The cost model of docs/explanation/SCALE.md prints its output, and equals counts of steps on 1 to 8 and 65,536 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense import COUNTED
from gathered_objects import objects_gathered_by, said_by_all
from meshstep.optim import HalfStates, ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.testing import fake_world
from snippets import blocks, printed_by
from torch import Tensor, nn
from world import World
from zero_models import small_buckets

PAGE = Path(__file__).parent.parent.parent / "docs" / "explanation" / "SCALE.md"
NUMELS = {"split": [512, 4096, 1024], "copied": [256, 2048, 512, 256]}
BUCKET = 4096 * 4


class Sent(NamedTuple):
    what: str
    ranks: int
    nbytes: int


@cache
def page() -> dict[str, Any]:
    """Return the names that the snippets of the page define."""
    session: dict[str, Any] = {"__name__": "scale"}
    for code, output in blocks("python", PAGE.read_text()):
        assert printed_by(code, "docs/explanation/SCALE.md", session) == output
    return session


def test_cost_model_snippets_print_the_shown_output() -> None:
    assert {"collectives", "state_bytes", "two_level"} <= page().keys()


@contextmanager
def sending() -> Iterator[list[Sent]]:
    """Record the collectives: name, number of ranks in the group, and bytes of the larger of input and output."""
    sent: list[Sent] = []

    def note(what: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        nbytes = max(arg.nbytes for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))
        sent.append(Sent(what, dist.get_world_size(kwargs.get("group")), nbytes))
        return function(*args, **kwargs)

    replaced: dict[str, Any] = {called: partial(note, name, getattr(dist, called)) for name, called in COUNTED.items()}
    with mock.patch.multiple(dist, **replaced):
        yield sent


class Case(NamedTuple):
    """A mesh of data x tensor, and options of the optimizer."""

    data: int
    tensor: int
    sharded: bool = False
    bf16: bool = False
    groups: int = 1


def sent_by(case: Case) -> tuple[list[Sent], int]:
    """Return the collectives of the third step of this rank, and its bytes of states and masters."""
    topology = Topology(data=case.data, tensor=case.tensor)
    with ProcessGroupRegistry(topology) as registry, small_buckets(BUCKET):
        params = [nn.Parameter(torch.ones(numel)) for numels in NUMELS.values() for numel in numels]
        specs = [P("tensor") if kind == "split" else P() for kind, numels in NUMELS.items() for _ in numels]
        for index, (param, spec) in enumerate(zip(params, specs, strict=True)):
            annotate(param, spec, f"layers.{index}")
            param.data = param.data.bfloat16() if case.bf16 else param.data
        parts = [params[index :: case.groups] for index in range(case.groups)]
        adamw = torch.optim.AdamW([{"params": part} for part in parts], fused=True)
        options: dict[str, Any] = {"bucket_bytes": BUCKET}
        if case.sharded:
            options = {"states": Sharded("data")}
        optimizer = ParallelOptimizer(
            adamw,
            registry,
            max_norm=1.0,
            precision="bf16" if case.bf16 else "fp32",
            check_replicas=False,
            **options,
        )
        for _ in range(3):
            with optimizer.window():
                for param in params:
                    param.grad = torch.ones(param.shape)
            with sending() as sent:
                optimizer.step()
            optimizer.zero_grad()
        moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        masters = [piece.tensor for piece in optimizer.stepped_tensors() if case.bf16]
        return sent, sum(tensor.nbytes for tensor in (*moments, *masters))


def expected(case: Case) -> list[Sent]:
    """Return the collectives that the page predicts; parameters are ordered by param groups."""
    order = [index for start in range(case.groups) for index in range(7)[start :: case.groups]]
    flat = [(kind, numel) for kind, numels in NUMELS.items() for numel in numels]
    kinds = [[flat[i][1] for i in order if flat[i][0] == kind] for kind in NUMELS]
    if case.tensor == 1 and not case.sharded:
        kinds = [[flat[i][1] for i in order]]  # nothing is sharded: one bucket kind
    buckets = page()["buckets"]
    with mock.patch.dict(page(), {"buckets": partial(buckets, nbytes=BUCKET)}):
        found = page()["collectives"](
            kinds,
            case.data,
            case.data * case.tensor,
            sharded=case.sharded,
            weight_bytes=2 if case.bf16 else 4,
            groups=case.groups,
            tensors=7 if case.tensor > 1 else 0,
        )
    names = {"reduce_scatter": "reduce_scatter_single", "all_gather": "all_gather_single"}
    return sorted(Sent(names.get(what, what), *rest) for what, *rest in found)


def state_bytes(case: Case) -> int:
    numel = sum(map(sum, NUMELS.values()))
    return int(page()["state_bytes"](numel, case.data if case.sharded else 1, masters=case.bf16))


SMALL = [
    Case(1, 1),
    Case(2, 1),
    Case(2, 1, bf16=True, sharded=True),
    Case(1, 2),
    Case(2, 2, groups=2),
    Case(2, 2, sharded=True),
    Case(4, 1, sharded=True, bf16=True),
    Case(4, 2, bf16=True),
    Case(2, 4, sharded=True),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cost_model_equals_collectives_and_bytes_counted_on_real_ranks(world: World, case: Case) -> None:
    for sent, nbytes in world.run(case.data * case.tensor, sent_by, case):
        assert sorted(sent) == expected(case)
        assert nbytes == state_bytes(case)


@pytest.mark.parametrize("case", [Case(8192, 8), Case(8, 8192), Case(64, 1024, sharded=True, bf16=True)], ids=str)
def test_cost_model_equals_counts_of_one_rank_in_a_world_of_65536(case: Case) -> None:
    with (
        fake_world(65536, rank=54_321),
        objects_gathered_by(said_by_all),
    ):
        sent, nbytes = sent_by(case)
    assert sorted(sent) == expected(case)
    assert nbytes == state_bytes(case)


def test_cost_model_of_masters_and_half_states_equals_counted_bytes() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        annotate(weight, P(), "weight")
        adamw = torch.optim.AdamW([weight], fused=True)
        optimizer = ParallelOptimizer(adamw, registry, precision="bf16", states=HalfStates())
        optimizer.backward(weight.float().square().sum())
        optimizer.step()
        (piece,) = optimizer.stepped_tensors()
        kept = [value for key, value in optimizer.state[piece.tensor].items() if key != "step"]
        found = sum(value.nbytes for value in kept) + piece.tensor.untyped_storage().nbytes()
        assert found == page()["state_bytes"](64 * 64, masters=True, half_states=True)
