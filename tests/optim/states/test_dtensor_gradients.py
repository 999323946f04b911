"""DTensor gradients whose placements differ from their parameter's: replicated, partial, or sharded otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arguments import arguments
from dtensors import Axes, randn, registry_of
from meshstep.amp import Bf16
from meshstep.optim import ParallelOptimizer, ReplicaMismatchError
from meshstep.parallel import P
from sequence_parallel import GRID, assert_trained, train_block
from torch import Tensor, nn
from world import World

Trained = tuple[list[float], list[Tensor]]


# A standard parallelization plan --------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, a norm and a classifier; with ``tied`` the classifier shares the embedding weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.norm, self.head = nn.Embedding(12, 6), nn.LayerNorm(6), nn.Linear(6, 12, bias=False)
        self.double()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(tokens)))
        return out


def train(model: Words, step: Any, rows: slice) -> Trained:
    norms = []
    for number in range(4):
        tokens = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(number))[rows]
        norms.append(
            step(lambda tokens=tokens: F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        )
    params = (param.detach() for param in model.parameters())
    return norms, [param.full_tensor() if hasattr(param, "full_tensor") else param for param in params]


def words(axes: Axes, tied: bool, options: dict[str, Any]) -> Trained:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with registry_of(axes) as registry:
        model, mesh = Words(tied), registry.device_mesh("tensor")
        parallelize_module(
            model,
            mesh,
            {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate()),
            },
        )
        if tied:
            model.head.weight = model.embed.weight
        inner = torch.optim.SGD(model.parameters(), lr=0.3)
        optimizer = ParallelOptimizer(inner, registry, **arguments(max_norm=0.2, **options))

        def step(loss: Any) -> float:
            optimizer.zero_grad()
            optimizer.backward(loss())
            stats = optimizer.step()
            assert stats is not None
            return float(stats.total_norm)

        data = registry.coordinate.get("data", 0)
        return train(model, step, slice(2 * data, 2 * data + 2) if "data" in dict(axes) else slice(None))


def dense_words(tied: bool) -> Trained:
    model = Words(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(loss: Any) -> float:
        optimizer.zero_grad()
        loss().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        return float(norm)

    return train(model, step, slice(None))


@pytest.mark.parametrize("options", [{}, {"shard_states": "data"}])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_parallel_dtensor_embedding_without_declare_matches_dense_model(
    world: World, tied: bool, options: dict[str, Any]
) -> None:
    """torch leaves the gradient of the embedding replicated; the plain parameters of the norm layer count as replicated."""
    norms, params = dense_words(tied)
    for axes in ((("tensor", 2),), GRID):
        if options and axes != GRID:
            continue
        for found in world.run(2 * len(axes), words, axes, tied, options):
            assert found[0] == pytest.approx(norms, rel=1e-9)
            for one, other in zip(found[1], params, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"shard_states": "data"}, {"offload": 0.5}])
def test_partial_dtensor_gradients_are_reduced(world: World, options: dict[str, Any]) -> None:
    """The gradients of a norm layer under sequence parallelism are partial, although its declared spec P() is not."""
    for found in world.run(4, train_block, GRID, False, options, {"*": P()}):
        assert_trained(found)


# Single gradients -----------------------------------------------------------------------------------------------------

FULL = (8, 6)


def stepped(axes: Axes, of_param: str, of_steps: list[list[str | None]]) -> list[list[list[float]]]:
    """Step a zero parameter with SGD, lr 1, on gradients with placements given per step and rank.

    Return the full parameter after each step.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    with registry_of(axes) as registry:
        mesh = registry.device_mesh(*dict(axes))
        placements = eval_placements(of_param)
        param = nn.Parameter(distribute_tensor(torch.zeros(FULL, dtype=torch.float64), mesh, placements))
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=1.0), registry)
        found = []
        for by_rank in of_steps:
            said = by_rank[registry.global_rank % len(by_rank)]
            optimizer.backward(None)
            if said is not None:
                dense, given = randn(*FULL, seed=1), eval_placements(said)
                complete = [Replicate() if placement.is_partial() else placement for placement in given]
                whole = distribute_tensor(dense, mesh, complete, src_data_rank=None)
                count = 1
                for index, placement in enumerate(given):
                    count *= mesh.size(index) if placement.is_partial("sum") else 1
                local = whole.to_local() / count
                param.grad = DTensor.from_local(
                    local, mesh, given, run_check=False, shape=param.shape, stride=param.stride()
                )
            optimizer.step()
            optimizer.zero_grad()
            found.append(param.full_tensor().tolist())  # type: ignore[attr-defined]
        return found


def sharded_sums(with_gradient: int) -> list[float]:
    """Return the norms of steps whose gradient is partial over the axis that shards the bfloat16 parameter.

    Only the rank ``with_gradient`` has a gradient, of ones.
    """
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    with registry_of((("tensor", 2),)) as registry:
        mesh = registry.device_mesh("tensor")
        param = nn.Parameter(distribute_tensor(torch.zeros(FULL, dtype=torch.bfloat16), mesh, [Shard(0)]))
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=1e-3), registry, precision=Bf16())
        norms = []
        for _ in range(2):
            optimizer.backward(None)
            if registry.global_rank == with_gradient:
                local = torch.ones(FULL, dtype=torch.bfloat16)
                param.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
            optimizer.zero_grad()
        return norms


@pytest.mark.parametrize("with_gradient", [0, 1])
def test_rank_without_gradient_joins_float32_sum_over_the_axis_that_shards_a_bfloat16_dtensor(
    world: World, with_gradient: int
) -> None:
    """Zeros in bfloat16 on the other rank would not fit the sum."""
    for norms in world.run(2, sharded_sums, with_gradient):
        assert norms == pytest.approx([48**0.5] * 2, rel=1e-6)


class Given(torch.autograd.Function):
    """A function of a DTensor whose backward returns a partial gradient with ``value`` in all elements.

    Nothing else may refer to the gradient, or autograd copies it; in torch 2.11 a copy is summed over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, param: Tensor, mesh: Any, value: float) -> Tensor:
        ctx.mesh, ctx.value, ctx.dtype = mesh, value, param.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        from torch.distributed.tensor import DTensor, Partial

        local = torch.full(FULL, ctx.value, dtype=ctx.dtype)
        return DTensor.from_local(local, ctx.mesh, [Partial()], run_check=False), None, None


def accumulated(of_param: str) -> list[float]:
    """Return the norms of two steps, each on partial bfloat16 gradients of 256, 1, 1 and 1 per element and rank."""
    from torch.distributed.tensor import distribute_tensor

    with registry_of((("tensor", 2),)) as registry:
        mesh = registry.device_mesh("tensor")
        zeros = torch.zeros(FULL, dtype=torch.bfloat16)
        param = nn.Parameter(distribute_tensor(zeros, mesh, eval_placements(of_param)))
        optimizer = ParallelOptimizer(torch.optim.SGD([param], lr=1e-3), registry, precision=Bf16())
        norms = []
        for _ in range(2):
            for value in (256.0, 1.0, 1.0, 1.0):
                optimizer.backward(Given.apply(param, mesh, value))
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
            optimizer.zero_grad()
        return norms


@pytest.mark.parametrize("of_param", ["0", "R"])
def test_partial_gradients_of_bfloat16_dtensors_accumulate_in_float32(world: World, of_param: str) -> None:
    """In bfloat16, 256 + 1 is 256."""
    for norms in world.run(2, accumulated, of_param):
        assert norms == pytest.approx([2 * 259 * 48**0.5] * 2, rel=1e-6)


def eval_placements(text: str) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    known = {
        "R": Replicate(), "P": Partial(), "A": Partial("avg"), "0": Shard(0), "1": Shard(1),
        "B": _StridedShard(0, split_factor=2),
    }  # fmt: skip
    return [known[letter] for letter in text]


@pytest.mark.parametrize(
    ("of_param", "of_grad"),
    [
        ("0", "R"), ("1", "R"), ("B", "R"), ("R", "P"), ("R", "A"), ("0", "P"), ("1", "A"), ("B", "P"), ("R0", "RR"),
        ("R0", "PR"), ("R0", "P0"), ("01", "RR"), ("10", "R0"), ("00", "0R"), ("00", "RR"), ("0R", "PP"), ("01", "PP"),
    ],
)  # fmt: skip
def test_dtensor_gradient_is_redistributed_to_placements_of_parameter(
    world: World, of_param: str, of_grad: str
) -> None:
    axes: Axes = (("data", 2), ("tensor", 2))[2 - len(of_param) :]
    for steps in world.run(2 * len(axes), stepped, axes, of_param, [[of_grad], [of_grad]]):
        for number, values in enumerate(steps, 1):
            torch.testing.assert_close(
                torch.tensor(values).double(), -number * randn(*FULL, seed=1), rtol=1e-6, atol=1e-6
            )


@pytest.mark.parametrize("of_param", ["R", "0"])
def test_dtensor_gradient_may_change_between_partial_and_replicated_across_steps(world: World, of_param: str) -> None:
    steps: list[list[str | None]] = [["P"], ["R"], [None, "P"], ["P"]]
    expected = [1.0, 2.0, 2.5, 3.5]
    for found in world.run(2, stepped, (("tensor", 2),), of_param, steps):
        for values, times in zip(found, expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(values).double(), -times * randn(*FULL, seed=1), rtol=1e-6, atol=1e-6
            )


# Rejected layouts -----------------------------------------------------------------------------------------------------


def refused(kind: str) -> str:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    with registry_of(GRID) as registry:
        mesh = registry.device_mesh("tensor")
        split = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
        plain = nn.Parameter(torch.ones(4) if kind != "values" else torch.ones(4) + registry.rank("tensor"))
        if kind == "mesh lacks an axis":
            split = nn.Parameter(distribute_tensor(torch.zeros(4, 4), registry.device_mesh("data"), [Shard(0)]))
        grid = registry.device_mesh("data", "tensor")
        if kind == "not over the earlier axis":
            split = nn.Parameter(distribute_tensor(torch.zeros(4, 4), grid, [Shard(0), Shard(0)]))
        check: Any = kind != "not compared"
        try:
            optimizer = ParallelOptimizer(torch.optim.SGD([split, plain], lr=1.0), registry, check_replicas=check)
            for step in range(2):
                optimizer.backward(None)
                split.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
                plain.grad = torch.ones(4) + (registry.rank("tensor") if kind == "gradients" else 0)
                if kind == "later a sum" and step and registry.global_rank:
                    split.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
                if kind == "not over the earlier axis":
                    split.grad = distribute_tensor(torch.ones(4, 4), grid, [Replicate(), Shard(0)])
                if kind == "no sum of terms":
                    split.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial("max")], run_check=False)
                stats = optimizer.step()
                assert stats is not None
                if kind == "later a sum" and step:
                    assert float(stats.found_inf) == 1
                optimizer.zero_grad()
        except (ValueError, ReplicaMismatchError) as error:
            values = split.to_local().tolist()  # type: ignore[attr-defined]
            return f"{error}, weights {values[0][0]}"
        return "no error"


@pytest.mark.parametrize(
    ("kind", "message", "weight"),
    [
        ("mesh lacks an axis", "no spec for parameter 0 of group 0 (shape (sharded, 4)), parameter 1", 0.0),
        ("not compared", "no spec for parameter 1 of group 0 (shape (4)), and", 0.0),
        ("values", "parameter 1 of group 0 (shape (4)): the parameter differs along axis 'tensor'", 0.0),
        ("gradients", "parameter 1 of group 0 (shape (4)): the gradient differs along axis 'tensor'", 0.0),
        (
            "no sum of terms",
            "is Partial(max) over 'tensor', but the parameter is Shard(dim=0); redistribute the gradient",
            0.0,
        ),
        (
            "not over the earlier axis",
            "is sharded as P(('data', 'tensor')), but its gradient is sharded over 'tensor' and not over 'data', an "
            "earlier axis of the same dim; redistribute the gradient to the placements of the parameter",
            0.0,
        ),
    ],
)
def test_missing_specs_unequal_replicas_and_unsupported_gradients_are_rejected(
    world: World, kind: str, message: str, weight: float
) -> None:
    for found in world.run(4, refused, kind):
        assert message in found
        assert found.endswith(f"weights {weight}")


def test_dtensor_gradient_becoming_partial_raises_on_its_ranks_and_skips_step_elsewhere(world: World) -> None:
    ranks = world.run(4, refused, "later a sum")
    assert ranks[0] == "no error"
    for found in ranks[1:]:
        assert (
            "is Partial(sum) over 'tensor', but the parameter is Shard(dim=0); redistribute the gradient, or let"
            in found
        )
        assert found.endswith("weights -1.0")
