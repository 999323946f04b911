"""Random models of DTensors on several device meshes, for tests of clipping without a registry."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, prod
from typing import Any

import torch
from hypothesis import strategies as st
from meshstep.optim import clip_grad_norm_
from meshstep.parallel import P, annotate
from torch import Tensor, nn

WORLDS = {2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}
NAMES = ("dp", "dp_replicate", "dp_shard", "fsdp", "tp", "sp", "cp", "ep", "edp", "row", "x", "y", "shard")
PLAIN = -1


@dataclass(frozen=True)
class Param:
    """One logical parameter.

    Attributes:
        mesh: Index of the root mesh, or `PLAIN` for a plain tensor.
        dims: The dims of the root mesh that form the DTensor's mesh. Several adjacent dims may be flattened into one.
        flat: True: `dims` are flattened.
        shards: The sharded tensor dim per dim of the DTensor's mesh. None: replicated.
        strided: True: the mesh dims that shard the same tensor dim shard it in the reverse order, as `fully_shard`
            does.
        missing: The indices of the shards without a gradient, among all combinations of coordinates that shard.
        declared: A dim of the root mesh that is not in `dims`. Along this dim, tensor dim 0 is split into separate
            DTensors, and the parameter is declared as sharded over the dim.
        complete: True: the gradient is replicated over the DTensor's mesh, also where the parameter is sharded.
        stage: The pipeline stage that has the parameter. None: no pipeline.
    """

    shape: tuple[int, ...]
    mesh: int
    dims: tuple[int, ...] = ()
    flat: bool = False
    shards: tuple[int | None, ...] = ()
    strided: bool = False
    missing: frozenset[int] = frozenset()
    declared: int | None = None
    complete: bool = False
    stage: int | None = None


Mesh = tuple[tuple[int, ...], tuple[str, ...]]  # sizes and names of its dims


@dataclass(frozen=True)
class MeshCase:
    """A model on several meshes, and how it is clipped."""

    number: int
    world: int
    meshes: tuple[Mesh, ...]
    params: tuple[Param, ...]
    norm_type: float
    dtype: torch.dtype
    given: str
    factor: float  # max_norm / norm


def mesh_case(number: int) -> MeshCase:
    """Draw a case from the seed ``number``."""
    rng = random.Random(number)
    world = rng.choice([2, 3, 4, 4, 4, 4, 6, 8])
    meshes = tuple(_mesh(rng, WORLDS[world]) for _ in range(rng.choice([1, 2, 2, 3])))
    stages = [dim for dim, size in enumerate(meshes[0][0]) if size > 1]
    if rng.random() < 0.25 and len(stages) > 1:
        meshes, params = _pipeline(rng, meshes[0], rng.choice(stages))
    else:
        params = tuple(_param(rng, meshes) for _ in range(rng.randint(1, 6)))
    return MeshCase(
        number,
        world,
        meshes,
        params,
        rng.choice([2.0, 2.0, 2.0, 1.0, 1.5, 3.0, 12.0, inf]),
        rng.choice([torch.float64, torch.float64, torch.float64, torch.float32, torch.bfloat16]),
        rng.choice(["module", "generator", "named", "list"]),
        rng.choice([0.5, 0.1, 3.0]),
    )


MESH_CASES = st.integers(0, 2**32 - 1).map(mesh_case)


def _pipeline(rng: random.Random, mesh: Mesh, dim: int) -> tuple[tuple[Mesh, ...], tuple[Param, ...]]:
    """Use a dim of the mesh for pipeline stages, and draw parameters for each stage, at least one of them a DTensor."""
    sizes, names = mesh
    meshes = ((sizes, (*names[:dim], "pp", *names[dim + 1 :])),)
    params: list[Param] = []
    for stage in range(sizes[dim]):
        count, least = len(params) + rng.randint(1, 3), len(params)
        while len(params) < count or all(param.mesh == PLAIN for param in params[least:]):
            drawn = _param(rng, meshes)
            if dim not in drawn.dims and drawn.declared != dim:
                params.append(replace(drawn, stage=stage))
    return meshes, tuple(params)


def _mesh(rng: random.Random, factors: list[int]) -> Mesh:
    """Draw a mesh whose sizes are products of consecutive ``factors`` of the world size, sometimes with a dim of size 1."""
    cuts = sorted(rng.sample(range(1, len(factors)), rng.randint(0, len(factors) - 1)))
    sizes = [prod(factors[a:b]) for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]
    if rng.random() < 0.2:
        sizes.insert(rng.randint(0, len(sizes)), 1)
    return tuple(sizes), tuple(rng.sample(NAMES, len(sizes)))


def _param(rng: random.Random, meshes: tuple[Mesh, ...]) -> Param:
    number = rng.choice([PLAIN, *range(len(meshes)), *range(len(meshes))])
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 8, 12]) for _ in range(rng.randint(1, 3)))
    if number == PLAIN:
        return Param(shape, PLAIN, missing=frozenset({0}) if rng.random() < 0.15 else frozenset())
    sizes, names = meshes[number]
    count = rng.randint(1, len(sizes))
    dims = rng.choice([*combinations(range(len(sizes)), count)])
    flat = count > 1 and rng.random() < 0.3 and dims[-1] - dims[0] == count - 1
    on = (prod(sizes[dim] for dim in dims),) if flat else tuple(sizes[dim] for dim in dims)
    shards = tuple(rng.choice([None, *range(len(shape)), *range(len(shape))]) for _ in on)
    strided = len(set(shards) - {None}) < len([dim for dim in shards if dim is not None]) and rng.random() < 0.5
    if strided:  # a multiple of the number of shards: every version of torch supports `_StridedShard` for these lengths
        shape = tuple(size * prod(on) if dim in shards else size for dim, size in enumerate(shape))
    # A dim name that two meshes share would be ambiguous in a declaration.
    others = [name for index, (_, of) in enumerate(meshes) if index != number for name in of]
    free = [dim for dim in range(len(sizes)) if dim not in dims and names[dim] not in others]
    declared = rng.choice(free) if free and rng.random() < 0.3 and 0 not in shards else None
    if declared is not None:
        shape = (shape[0] * sizes[declared], *shape[1:])
    pieces = prod(size for size, dim in zip(on, shards, strict=True) if dim is not None)
    gone = rng.random() < 0.25
    missing = frozenset(piece for piece in range(pieces) if gone and rng.random() < 0.5)
    complete = not missing and rng.random() < 0.1
    return Param(shape, number, dims, flat, shards, strided, missing, declared, complete)


# On a rank ------------------------------------------------------------------------------------------------------------


def full_gradient(case: MeshCase, index: int) -> Tensor:
    """Return the full gradient as if no shard were missing. Each value is exact in ``case.dtype``."""
    generator = torch.Generator().manual_seed(case.number % 1000 * 10 + index)
    gradient = torch.randn(case.params[index].shape, generator=generator, dtype=torch.float64)
    return (gradient * 10.0 ** (index - 2)).to(case.dtype).double()


def slices(param: Param, sizes: tuple[int, ...], at: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the indices per tensor dim that the rank at these mesh coordinates holds."""
    held = [torch.arange(size) for size in param.shape]
    order = list(enumerate(zip(param.shards, sizes, at, strict=True)))
    for _, (dim, size, where) in reversed(order) if param.strided else order:
        if dim is not None:
            chunks = held[dim].chunk(size)
            held[dim] = chunks[where] if where < len(chunks) else held[dim][:0]
    return tuple(held)


def piece_of(param: Param, sizes: tuple[int, ...], at: tuple[int, ...]) -> int:
    """Return the index of the shard at these mesh coordinates, as in ``Param.missing``."""
    index = 0
    for dim, size, where in zip(param.shards, sizes, at, strict=True):
        if dim is not None:
            index = index * size + where
    return index


def placements_of(param: Param, sizes: tuple[int, ...]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = []
    for index, dim in enumerate(param.shards):
        later = prod(
            size for size, other in zip(sizes[index + 1 :], param.shards[index + 1 :], strict=True) if other == dim
        )
        if dim is None:
            found.append(Replicate())
        elif param.strided and later > 1:
            found.append(_StridedShard(dim, split_factor=later))
        else:
            found.append(Shard(dim))
    return found


class Held(nn.Module):
    """The parameters of this rank. ``gradients`` has the gradient of each parameter that has one, and this rank's
    shard of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, tuple[Any, Tensor]] = {}

    def set_gradients(self) -> None:
        for name, (gradient, _) in self.gradients.items():
            self.get_parameter(name).grad = gradient.clone()


def coordinate(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.get_coordinate())


def model_of(case: MeshCase) -> Held:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    roots = [init_device_mesh("cpu", sizes, mesh_dim_names=names) for sizes, names in case.meshes]
    views: dict[Any, Any] = {}
    model = Held()
    for index, param in enumerate(case.params):
        gradient = full_gradient(case, index).to(case.dtype)
        if param.stage is not None:
            (root,), ((_, names),) = roots, case.meshes
            if coordinate(root)[names.index("pp")] != param.stage:
                continue
        if param.mesh == PLAIN:
            made = nn.Parameter(torch.zeros_like(gradient))
            if not param.missing:
                model.gradients[f"param_{index}"] = gradient, gradient
            model.register_parameter(f"param_{index}", made)
            continue
        root, (sizes, names) = roots[param.mesh], case.meshes[param.mesh]
        key = param.mesh, param.dims, param.flat
        if key not in views:
            view = root if len(param.dims) == len(names) else root[tuple(names[dim] for dim in param.dims)]
            views[key] = view._flatten("_".join(("flat", *(names[dim] for dim in param.dims)))) if param.flat else view
        mesh = views[key]
        own = param
        if param.declared is not None:
            gradient = gradient.chunk(sizes[param.declared])[coordinate(root)[param.declared]].contiguous()
            own = replace(param, shape=tuple(gradient.shape))
        at = coordinate(mesh)
        local = gradient[torch.meshgrid(*slices(own, tuple(mesh.shape), at), indexing="ij")].contiguous()

        def placed(tensor: Tensor, places: list[Any], mesh: Any = mesh, like: Tensor = gradient) -> Any:
            return DTensor.from_local(tensor, mesh, places, run_check=False, shape=like.shape, stride=like.stride())

        places = placements_of(param, tuple(mesh.shape))
        made = nn.Parameter(placed(torch.zeros_like(local), places))
        if param.complete:
            model.gradients[f"param_{index}"] = placed(gradient, [Replicate()] * mesh.ndim), local
        elif piece_of(param, tuple(mesh.shape), at) not in param.missing:
            model.gradients[f"param_{index}"] = placed(local, places), local
        if param.declared is not None:
            annotate(made, P(names[param.declared]), f"param_{index}")
        model.register_parameter(f"param_{index}", made)
    return model


def dense_gradients(case: MeshCase) -> list[Tensor]:
    """Return the full gradients, with zeros for the missing shards."""
    found = []
    for index, param in enumerate(case.params):
        gradient = full_gradient(case, index)
        if param.mesh == PLAIN:
            found.append(gradient * 0 if param.missing else gradient)
            continue
        sizes = case.meshes[param.mesh][0]
        on = tuple(sizes[dim] for dim in param.dims)
        on = (prod(on),) if param.flat else on
        for at in torch.cartesian_prod(*(torch.arange(size) for size in on)).view(-1, len(on)).tolist():
            if piece_of(param, on, tuple(at)) in param.missing:
                gradient[torch.meshgrid(*slices(param, on, tuple(at)), indexing="ij")] = 0
        found.append(gradient)
    return found


def parameters_as(given: str, model: nn.Module) -> Any:
    """Return the parameters in one of the forms that `clip_grad_norm_` takes."""
    if given == "module":
        return model
    if given == "generator":
        return model.parameters()
    return [*(model.named_parameters() if given == "named" else model.parameters())]


def clip_random_model(case: MeshCase, max_norm: float) -> tuple[list[float], list[float]]:
    """Clip twice, because the first call compares replicas.

    Return the norm and the largest relative error of the clipped gradients, per call. The expected gradients are the
    original ones times min(1, max_norm / (norm + 1e-6)).
    """
    model = model_of(case)
    norms, errors = [], []
    for _ in range(2):
        model.set_gradients()
        norm = float(clip_grad_norm_(parameters_as(case.given, model), max_norm, norm_type=case.norm_type))
        factor = min(1.0, max_norm / (norm + 1e-6))
        norms.append(norm)
        errors.append(0.0)
        for name, (_, shard) in model.gradients.items():
            found, wanted = local_gradient(model.get_parameter(name)).double(), shard.double() * factor
            if wanted.numel():
                error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300)
                errors[-1] = max(errors[-1], float(error))
    return norms, errors


def local_gradient(param: Tensor) -> Tensor:
    gradient: Any = param.grad
    here: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return here
