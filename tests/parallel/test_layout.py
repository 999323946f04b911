"""Shards and full tensors: which shard a spec gives to each rank, and how the full tensor is restored."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import slice_of
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    Topology,
    blocks,
    declare,
    full_shape,
    gather_objects,
    join,
    local_shape,
    shard,
    spec_of,
    unshard,
)
from meshstep.parallel.interop.dtensor import keep_specs
from meshstep.parallel.layout.shard import Region, local_index
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from world import World

SPECS = [
    P(),
    P("row"),
    P(None, "col"),
    P("row", "col"),
    P("col", "row"),
    P(("col", "row")),
    P(("row", "col"), None),
    P(None, None, ("col", "row")),
    P("data", None, "row"),
    P("col", partial="row"),
    P("col", tied={"row": (0, -1)}),
    P("col", owned={"row": 0}),
    P(None, owned={"row": 1, "col": 0}),
    P(("col", "data"), owned={"row": 1}),
    P("col", owned={"row": "col"}),
    P(None, "row", "data", owned={"col": "row"}),
    P(("data", "col"), owned={"row": "col"}),
]


@pytest.mark.parametrize(
    ("full", "spec", "local"),
    [
        ((12, 8), P("row", "col"), (6, 2)),
        ((24,), P(("col", "row")), (3,)),
        ((8, 3), P(None), (8, 3)),
        ((0, 4), P("row", "col"), (0, 1)),
        ((), P(), ()),
        ((8,), P("col", owned={"row": 0}), (2,)),
        ((8,), P("row", owned={"col": "row"}), (4,)),
    ],
)
def test_local_shape_and_full_shape_are_inverse(full: tuple[int, ...], spec: P, local: tuple[int, ...]) -> None:
    topology = Topology(row=2, col=4)
    assert local_shape(full, spec, topology) == local
    assert full_shape(local, spec, topology) == full


def test_local_shape_of_indivisible_dim_raises_value_error() -> None:
    topology = Topology(row=2, col=4)
    with pytest.raises(
        ValueError, match=re.escape("dim 1 of shape (8, 6) has length 6, which is not divisible by col=4")
    ):
        local_shape((8, 6), P("row", "col"), topology)
    with pytest.raises(ValueError, match="row=2 x col=4; make the length a multiple of 8"):
        local_shape((12,), P(("row", "col")), topology)


def test_spec_with_unknown_axis_or_too_many_entries_raises() -> None:
    topology = Topology(row=2, col=4)
    with pytest.raises(ValueError, match="names axis 'tensor'"):
        local_shape((8,), P("tensor"), topology)
    with pytest.raises(ValueError, match=r"more entries \(2\)"):
        full_shape((8,), P("row", "col"), topology)
    at = {"row": 1, "col": 2}
    with pytest.raises(ValueError, match="names axis 'tensor'"):
        local_shape((8,), P("tensor"), topology, at)
    with pytest.raises(ValueError, match=r"more entries \(2\)"):
        local_shape((8,), P("row", "col"), topology, at)


def test_shard_in_one_process_copies_the_full_tensor() -> None:
    registry = ProcessGroupRegistry(Topology(row=1, col=1))
    full = torch.randn(4, 6, requires_grad=True)
    for spec in (P("row", "col"), P(("col", "row")), P(), P("col", owned={"row": 0})):
        piece = shard(full, spec, registry)
        assert torch.equal(piece, full)
        assert not piece.requires_grad
        assert piece.data_ptr() != full.data_ptr()
        assert torch.equal(unshard(piece, spec, registry), full)


def round_trips(topology: Topology, dtype: torch.dtype) -> None:
    with ProcessGroupRegistry(topology) as registry:
        for spec in SPECS:
            for shape in ((8, 4, 12), (8, 0, 4), (7, 3, 5), (1, 2, 3)):
                full = torch.randn(shape).to(dtype)
                piece = shard(full, spec, registry, uneven=True)
                owns = spec.holds(registry.coordinate, topology)
                assert piece.dtype is dtype
                if owns:
                    assert piece.is_contiguous()
                    assert tuple(piece.shape) == local_shape(shape, spec, topology, registry.coordinate)
                    if shape[0] == 8:
                        assert torch.equal(piece, shard(full, spec, registry))
                        assert tuple(piece.shape) == local_shape(shape, spec, topology)
                else:
                    assert piece.numel() == 0
                back = unshard(piece if owns else None, spec, registry)
                assert torch.equal(back, full), spec
                assert back.dtype is dtype
                assert back.is_contiguous()
                joined = join(gather_objects(piece if owns else None, registry), spec, topology)
                assert joined.dtype is dtype
                assert torch.equal(joined, full), spec


@pytest.mark.long
@pytest.mark.parametrize("topology", [Topology(data=1, row=2, col=2), Topology(col=2, data=1, row=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unshard_inverts_shard(world: World, topology: Topology, dtype: torch.dtype) -> None:
    world.run(4, round_trips, topology, dtype)


class Created(TorchDispatchMode):
    """Records the shapes of the tensors that `Tensor.new_empty` creates in this mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func is torch.ops.aten.new_empty.default:
            self.shapes.add(tuple(result.shape))
        return result


def pads_shard(rows: int) -> bool:
    with ProcessGroupRegistry(Topology(row=2)) as registry:
        piece = shard(torch.ones(rows, 3), P("row"), registry, uneven=True)
        with Created() as created:
            unshard(piece, P("row"), registry)
        return (4, 3) in created.shapes


def test_unshard_copies_only_shards_that_are_shorter_than_others(world: World) -> None:
    assert world.run(2, pads_shard, 8) == [False, False]
    assert world.run(2, pads_shard, 7) == [False, True]


def pieces(spec: P) -> list[float]:
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        piece: list[float] = shard(torch.arange(8.0), spec, registry).tolist()
        return piece


def test_first_named_axis_of_a_sharded_dim_varies_slowest(world: World) -> None:
    # Ranks 0..3 are (row, col) = (0, 0), (0, 1), (1, 0), (1, 1).
    assert world.run(4, pieces, P(("row", "col"))) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert world.run(4, pieces, P(("col", "row"))) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert world.run(4, pieces, P("col", owned={"row": 0})) == [[0, 1, 2, 3], [4, 5, 6, 7], [], []]
    assert world.run(4, pieces, P("col", owned={"row": "col"})) == [[0, 1, 2, 3], [], [], [4, 5, 6, 7]]


def test_local_shape_of_uneven_dim_on_last_rank_follows_torch_chunk() -> None:
    topology, at = Topology(row=2, col=3), {"row": 1, "col": 2}
    # `row` divides the 7 rows into 4 + 3, and `col` divides the 3 rows into 1 + 1 + 1.
    assert local_shape((7, 4), P(("row", "col")), topology, at) == (1, 4)
    assert local_shape((7, 4), P("col", "row"), topology, at) == (1, 2)
    assert local_shape((4,), P("col"), topology, at) == (0,)


def test_join_assembles_shards_without_process_groups() -> None:
    topology = Topology(data=2, row=2)
    spec, full = P("row"), torch.arange(6.0)
    first, second = full.chunk(2)
    assert torch.equal(join([first, second, first, second], spec, topology), full)
    assert torch.equal(join([None, second, first, None], spec, topology), full), "one replica is enough"
    assert torch.equal(join([first, second, second, first], spec, topology), full), "the first replica is taken"
    assert torch.equal(join([first] * 4, P(), topology), first)


def test_join_of_missing_or_inconsistent_shards_raises_error() -> None:
    topology, spec = Topology(data=2, row=2), P("row")
    first, second = torch.arange(6.0).chunk(2)
    with pytest.raises(
        ValueError,
        match=re.escape("the list has no shard of a rank at row=1; give the shard of a rank with this coordinate"),
    ):
        join([first, None, first, None], spec, topology)
    with pytest.raises(
        ValueError, match="the list has None for all ranks that hold this tensor; give the tensor of at least one"
    ):
        join([None] * 4, P(), topology)
    with pytest.raises(ValueError, match="the list has None for all ranks that hold"):
        join([first, None, first, None], P(owned={"row": 1}), topology)
    with pytest.raises(ValueError, match="list of shards has length 2, but the world size is 4"):
        join([first, second], spec, topology)
    with pytest.raises(
        ValueError, match=r"the shard has shape \(2,\), but .* a shard of shape \(3,\) of the full shape \(5,\)"
    ):
        join([first[:2], second, None, None], spec, topology)
    with pytest.raises(ValueError, match="names axis 'tensor'"):
        join([first] * 4, P("tensor"), topology)
    with pytest.raises(ValueError, match=r"more entries \(2\)"):
        join([first] * 4, P(None, "row"), topology)
    with pytest.raises(ValueError, match="names axis 'expert'"):
        join([first] * 4, P(owned={"expert": 0}), topology)
    with pytest.raises(ValueError, match=re.escape("'row'")):
        join([first] * 4, P(owned={"row": 5}), topology)
    for other in (second.double(), second.unsqueeze(0)):
        with pytest.raises(
            ValueError, match=r"shards of torch.float32 with ndim=1 and torch.float(64|32) with ndim=[12]; give"
        ):
            join([first, other, None, None], spec, topology)


def pieces_of_another_tensor() -> list[str]:
    with ProcessGroupRegistry(Topology(row=3)) as registry:
        with pytest.raises(
            ValueError, match=r"the shard has shape \(1,\), but .* a shard of shape \(2,\) of the full shape \(6,\)"
        ) as error:
            unshard(torch.zeros(registry.global_rank + 1), P("row"), registry)
        return [str(error.value)]


def test_unshard_of_inconsistent_shards_raises_on_every_rank(world: World) -> None:
    assert len({tuple(texts) for texts in world.run(3, pieces_of_another_tensor)}) == 1


def owner_gives_none() -> list[str]:
    messages = []
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        for spec in (P("col", owned={"row": 0}), P("col")):
            with pytest.raises(ValueError, match="pass the shard on") as error:
                unshard(None, spec, registry)
            messages.append(str(error.value))
    return messages


def test_unshard_with_missing_shard_raises_on_every_rank(world: World) -> None:
    for owned, sharded in world.run(4, owner_gives_none):
        assert "the owner rank of this shard passed no tensor to unshard" in owned
        assert "unshard got None on this rank" in sharded


def shard_is_a_list(spec: P) -> str:
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        shard: Any = [1.0, 2.0] if registry.global_rank == 0 else torch.ones(2)
        try:
            unshard(shard, spec, registry)
        except (TypeError, ValueError) as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("spec", [P("col"), P("col", owned={"row": 0}), P(None, owned={"row": 0, "col": 0})], ids=str)
def test_unshard_of_a_list_raises_on_every_rank_that_gathers_it(world: World, spec: P) -> None:
    texts = world.run(4, shard_is_a_list, spec)
    assert "unshard got a list as the shard; give a tensor" in texts[0]
    assert "no error" not in texts[: 4 if spec.owned else 2]


def found(index: list[int], length: int) -> tuple[list[int], list[bool]]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        local, elsewhere = local_index(torch.tensor(index), length, registry, "tensor")
        return local.tolist(), elsewhere.tolist()


def test_local_index_marks_indices_of_other_ranks(world: World) -> None:
    first, second = world.run(2, found, [0, 2, 3, 5, 6, -1], 6)
    assert first == ([0, 2, 0, 0, 6, -1], [False, False, True, True, False, False])
    assert second == ([0, 0, 0, 2, 3, -4], [True, True, False, False, False, False])
    first, second = world.run(2, found, [0, 3, 4, 6, 7, -1], 7)
    assert first == ([0, 3, 0, 0, 7, -1], [False, False, True, True, False, False])
    assert second == ([0, 0, 0, 2, 3, -5], [True, True, False, False, False, False])


@pytest.mark.parametrize(("full", "offset", "found"), [((2, 3), 2, {}), ((0, 3), 0, {(0, 0): (0, 3)})])
def test_region_without_elements_has_no_part_unless_full_tensor_is_empty(
    full: tuple[int, int], offset: int, found: dict[tuple[int, int], tuple[int, int]]
) -> None:
    region = Region(full, (((offset, 0),), ((0, 3),)), 0, 0)
    assert {at: tuple(part.shape) for at, part in region.parts(torch.zeros(0, 3)).items()} == found


# Blocks: fused weights ------------------------------------------------------------------------------------------------


def test_each_block_of_a_fused_tensor_is_sharded_separately(world: World) -> None:
    # Ranks 0..3 are (row, col) = (0, 0), (0, 1), (1, 0), (1, 1).
    assert world.run(4, pieces, P(blocks("row", 2))) == [[0, 1, 4, 5]] * 2 + [[2, 3, 6, 7]] * 2
    assert world.run(4, pieces, P(blocks("row", (2, 1, 1)))) == [[0, 1, 4, 6]] * 2 + [[2, 3, 5, 7]] * 2
    assert world.run(4, pieces, P(blocks(("col", "row"), 2))) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    # `row` shards each of two blocks; then `col` halves the row's shard: [0, 1, 4, 5] becomes [0, 1] and [4, 5].
    assert world.run(4, pieces, P((blocks("row", 2), "col"))) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    # `row` halves the tensor; then `col` shards each of two blocks of that half.
    assert world.run(4, pieces, P(("row", blocks("col", 2)))) == [[0, 2], [1, 3], [4, 6], [5, 7]]


FUSED = [
    P(blocks("row", 3)),
    P(None, blocks("col", (4, 1, 1)), "row"),
    P(blocks(("col", "row"), 3), blocks("data", (1, 2))),
    P((blocks("row", 2), "col"), tied={"data": (0, -1)}),
    P(("col", blocks("row", (1, 2))), None, blocks("data", 4)),
    P(None, blocks("col", 2), owned={"row": 1}),
    P(None, blocks("col", 2), owned={"row": "col"}),
]


def fused_round_trips(topology: Topology) -> None:
    full = torch.randn(12, 12, 8)
    with ProcessGroupRegistry(topology) as registry:
        for spec in FUSED:
            piece = shard(full, spec, registry)
            owns = spec.holds(registry.coordinate, topology)
            if owns:
                assert tuple(piece.shape) == local_shape(full.shape, spec, topology)
                assert full_shape(piece.shape, spec, topology) == full.shape
                assert torch.equal(piece, slice_of(full, spec, topology, registry.global_rank)), spec
            assert torch.equal(unshard(piece if owns else None, spec, registry), full), spec


@pytest.mark.parametrize("topology", [Topology(data=1, row=2, col=2), Topology(col=2, data=1, row=2)])
def test_unshard_inverts_shard_of_fused_tensors(world: World, topology: Topology) -> None:
    world.run(4, fused_round_trips, topology)


@pytest.mark.parametrize(
    ("length", "spec", "message"),
    [
        (8, P(blocks("row", (4, 1, 1))), "length 8 is not a multiple of 6"),
        (12, P(blocks("col", (4, 1, 1))), r"over 'col': block 2 of 3 has length 2, .*divisible by the 4 ranks"),
        (24, P(("col", blocks("row", 2))), "block 1 of 2 has length 3"),
    ],
)
def test_blocks_not_divisible_by_axis_size_raise_and_error_shows_spec(length: int, spec: P, message: str) -> None:
    topology = Topology(row=2, col=4)
    with pytest.raises(ValueError, match=message) as error:
        local_shape((length,), spec, topology)
    assert repr(spec) in str(error.value)


def test_keep_specs_finds_replaced_parameters_in_wrapped_and_replaced_modules() -> None:
    """The block is wrapped within the context, and the head is replaced under its name."""
    model = nn.ModuleDict({"block": nn.Linear(2, 2), "head": nn.Linear(2, 2, bias=False)})
    declare(model, {"block.*": P("tensor"), "head.weight": P(None, "tensor")})
    block = model["block"]
    with keep_specs(model):
        for name, param in list(block.named_parameters()):
            setattr(block, name, nn.Parameter(param.detach().clone()))
        model["block"] = nn.ModuleDict({"_checkpoint_wrapped_module": block})
        model["head"] = nn.Linear(2, 2, bias=False)
    specs = {name: spec_of(param) for name, param in model.named_parameters()}
    wrapped = "block._checkpoint_wrapped_module"
    expected = {f"{wrapped}.weight": P("tensor"), f"{wrapped}.bias": P("tensor"), "head.weight": P(None, "tensor")}
    assert specs == expected
