"""`ParamTable`: the tensors of a row."""

from __future__ import annotations

import pytest
import torch
from meshstep.amp import Mode
from meshstep.optim import ParallelOptimizer, Sharded, SteppedTensor
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from world import World

Row = tuple[str, str, str, str]


def texts_of(row: SteppedTensor, given: nn.Parameter) -> Row:
    """Return texts of the row's ``leaf``, ``param``, ``tensor`` and ``grad_tensor``."""

    def text(tensor: Tensor) -> str:
        if tensor is given:
            return "given"
        kind = "DTensor" if isinstance(tensor, DTensor) else "Tensor"
        return f"{kind} {tensor.dtype} {tuple(tensor.shape)}".replace("torch.", "")

    return text(row.leaf), text(row.param), text(row.tensor), "tensor" if row.grad_tensor is row.tensor else "other"


def row_of(mode: str) -> tuple[Row, bool]:
    """Return the texts of the only row, and True if ``row.tensor`` shares the memory of the parameter."""
    data = torch.ones(8, 4, dtype=torch.bfloat16 if "bf16" in mode else torch.float32)
    with ProcessGroupRegistry(Topology(tensor=2) if "DTensor" in mode else Topology(data=2)) as registry:
        param = nn.Parameter(data)
        if "DTensor" in mode:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
            param = nn.Parameter(distribute_tensor(data, mesh, [Shard(0)]))
        else:
            annotate(param, P(), "weight")
        states = [Sharded("data")] if "Sharded" in mode else []
        precision: Mode = "bf16" if "bf16" in mode else "fp32"
        optimizer = ParallelOptimizer(torch.optim.AdamW([param]), registry, precision=precision, states=states)
        (row,) = optimizer.stepped_tensors()
        own = param.to_local() if isinstance(param, DTensor) else param
        shares = row.tensor.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        return texts_of(row, param), shares


@pytest.mark.parametrize(
    ("mode", "expected", "shares"),
    [
        ("fp32", ("given", "given", "given", "tensor"), True),
        ("bf16", ("given", "given", "Tensor float32 (8, 4)", "tensor"), False),
        ("fp32 Sharded", ("given", "given", "Tensor float32 (16,)", "tensor"), True),
        ("bf16 Sharded", ("given", "given", "Tensor float32 (16,)", "tensor"), False),
        ("fp32 DTensor", ("given", "Tensor float32 (4, 4)", "Tensor float32 (4, 4)", "tensor"), True),
        ("bf16 DTensor", ("given", "Tensor bfloat16 (4, 4)", "Tensor float32 (4, 4)", "tensor"), False),
    ],
)
def test_row_has_tensors_that_module_docstring_lists(world: World, mode: str, expected: Row, shares: bool) -> None:
    assert world.run(2, row_of, mode) == [(expected, shares)] * 2
