"""Clip rules that 14 repositories wrote by hand for models on device meshes.

Each case builds a layout that the repository clips, and applies the repository's rule, written anew from its description.
Where the rule once had a mistake, the rule here has it too, and the test asserts its result: a wrong norm, unscaled
gradients or an error. `clip_grad_norm_` without a registry must clip by the norm of the dense gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_layouts import mesh_of
from meshstep.optim import ReplicaMismatchError, clip_grad_norm_
from meshstep.parallel import P, annotate
from torch import Tensor, nn
from world import World

MAX_NORM = 0.5
RANKS = 4
SHAPES = {"weight": (8, 6), "norm": (6,), "experts": (4, 6, 3), "head": (5, 4), "tiny": (2, 3)}
Meshes = dict[str, Any]

# Models ---------------------------------------------------------------------------------------------------------------


def dense(name: str) -> Tensor:
    """Return the full gradient of a parameter: equal on all ranks, float64."""
    generator = torch.Generator().manual_seed(len(name) * 100 + SHAPES[name][0])
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=generator)


def dense_norm(names: Iterable[str], norm_type: float = 2.0) -> float:
    return norm_of([dense(name) for name in names], norm_type)


def norm_of(tensors: Iterable[Tensor], norm_type: float = 2.0) -> float:
    return float(torch.linalg.vector_norm(torch.cat([one.flatten() for one in tensors]), norm_type))


def shard(tensor: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    """Return the shard that torch gives to ``rank``; empty if the dim has too few elements."""
    chunks = tensor.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


class Model(nn.Module):
    """Parameters with gradients. `loss` has the full gradients `dense` as its derivative."""

    def loss(self) -> Tensor:
        return torch.stack([(param * dense(name)).sum() for name, param in self.named_parameters()]).sum()

    forward = loss

    def add(self, name: str, mesh: Any = None, *placements: Any, gradient: Tensor | None = None) -> None:
        """Add a parameter of zeros with its gradient: a plain tensor, or a DTensor if there is a mesh."""
        from torch.distributed.tensor import distribute_tensor

        gradient = dense(name) if gradient is None else gradient

        def placed(tensor: Tensor) -> Tensor:
            if mesh is None:
                return tensor.clone()
            return distribute_tensor(tensor.contiguous(), mesh, placements, src_data_rank=None)

        param = nn.Parameter(placed(torch.zeros_like(gradient)))
        param.grad = placed(gradient)
        self.register_parameter(name, param)

    def fully_shard(self, mesh: Any, *names: str) -> None:
        """Add parameters, shard them with torch's `fully_shard`, and compute their gradients."""
        from torch.distributed.fsdp import fully_shard

        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros_like(dense(name))))
        fully_shard(self, mesh=mesh)
        self().backward()


def local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    shard_here: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard_here


# Layouts. Each adds parameters to the model of this rank, and returns the meshes. -------------------------------------


def stages(model: Model) -> Meshes:
    """Make two pipeline stages, each fully sharded over two ranks."""
    mesh = mesh_of((2, 2), ("pp", "fsdp"))
    names = ("weight", "norm") if mesh["pp"].get_local_rank() == 0 else ("head",)
    model.fully_shard(mesh["fsdp"], *names)
    return {"pp": mesh["pp"]}


def experts_on_slice(model: Model) -> Meshes:
    """Shard dense parameters over all ranks, and shard each rank's own experts on a mesh that lacks the dim `ep`."""
    from torch.distributed.tensor import Shard

    dp, moe = mesh_of((4,), ("dp",)), mesh_of((2, 2), ("ep", "ep_shard"))
    model.add("weight", dp, Shard(0))
    model.add("norm", dp, Shard(0))
    own = shard(dense("experts"), moe["ep"].get_local_rank(), 2)
    model.add("experts", moe["ep_shard"], Shard(1), gradient=own)
    return {"dp": dp, "ep_shard": moe["ep_shard"]}


def hsdp(model: Model) -> Meshes:
    mesh = mesh_of((2, 2), ("dp_replicate", "dp_shard"))
    model.fully_shard(mesh, "weight", "norm", "head")
    return {"all": mesh}


def fsdp_and_tensor_parallel(model: Model) -> Meshes:
    """Use one mesh for the linear layers, and its slice for parameters that tensor parallelism does not shard."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of((2, 2), ("dp_shard", "tp"))
    model.add("weight", mesh, Shard(0), Shard(1))
    model.add("head", mesh, Shard(1), Shard(0))
    model.add("norm", mesh["dp_shard"], Shard(0))
    return {"dp": mesh["dp_shard"], "tp": mesh["tp"]}


def experts_and_plain(model: Model) -> Meshes:
    """Make experts DTensors over all ranks, and all other parameters plain replicas."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of((4,), ("tp",))
    model.add("experts", mesh, Shard(0))
    model.add("weight")
    model.add("norm")
    return {"tp": mesh}


def replicated_norm_layers(model: Model) -> Meshes:
    """Shard linear layers over dp and tp, and replicate norm layers over tp."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of((2, 2), ("dp_cp", "tp"))
    model.add("weight", mesh, Shard(0), Shard(1))
    model.add("norm", mesh, Shard(0), Replicate())
    return {"dp": mesh["dp_cp"], "tp": mesh["tp"]}


def fsdp_over_sequence_ranks(model: Model) -> Meshes:
    """Shard parameters over the flattened mesh dims of data and sequence parallelism, and linear layers over tp too."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of((1, 2, 2), ("dp", "sp", "tp"))
    dp_sp = mesh["dp", "sp"]._flatten("dp_sp")
    model.add("weight", mesh["dp_sp", "tp"], Shard(0), Shard(1))
    model.add("norm", dp_sp, Shard(0))
    return {"dp": dp_sp, "tp": mesh["tp"]}


def fsdp(model: Model) -> Meshes:
    mesh = mesh_of((4,), ("fsdp",))
    model.fully_shard(mesh, "weight", "norm", "head", "tiny")
    return {"fsdp": mesh}


def fsdp_beside_plain(model: Model) -> Meshes:
    """Shard two parameters with `fully_shard`, and add one plain parameter."""
    model.fully_shard(mesh_of((4,), ("fsdp",)), "weight", "head")
    model.add("norm")
    return {}


def flattened(model: Model) -> Meshes:
    mesh = mesh_of((2, 2), ("dp", "cp"))["dp", "cp"]._flatten("dp_cp")
    model.fully_shard(mesh, "weight", "norm", "head")
    return {"fsdp": mesh}


def plain_replicas(model: Model) -> Meshes:
    """Add plain replicas, as a wrapper with a shard mesh of size 1 does. No rank averages gradients, so they differ."""
    mesh = mesh_of((4, 1), ("ddp", "fsdp"))
    for name in ("weight", "norm"):
        model.add(name, gradient=dense(name) * unsynchronized(dist.get_rank()))
    return {"ddp": mesh["ddp"]}


def unsynchronized(rank: int) -> float:
    """Return the factor of a rank's gradients. The mean over the ranks is 1."""
    return 0.4 + 0.4 * rank


def one_sharded_dim(model: Model) -> Meshes:
    """Shard each parameter over at most one dim of its mesh, and replicate it over the other dims."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, experts = mesh_of((2, 2), ("dp_replicate", "dp_shard")), mesh_of((2, 2), ("edp", "ep"))
    model.add("weight", mesh, Replicate(), Shard(0))
    model.add("head", mesh["dp_shard"], Shard(1))
    model.add("norm", mesh, Replicate(), Replicate())
    model.add("experts", experts, Replicate(), Shard(0))
    return {}


# Rules. Each returns the norm by which this rank clips, and clips. ----------------------------------------------------


def gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def squares(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.zeros((), dtype=torch.float64), *(local(one).square().sum() for one in tensors)]).sum()


def summed(value: Tensor, *groups: Any) -> Tensor:
    """Return the sum of ``value`` over the ranks of each mesh, one after another. None: all ranks."""
    value = value.clone()
    for group in groups:
        dist.all_reduce(value, group=None if group is None else group.get_group())
    return value


def full_norm(tensors: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return torch's norm of DTensors on one mesh as a plain tensor."""
    norm = torch.nn.utils.get_total_norm(tensors, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def scale(params: Iterable[Tensor], norm: Tensor) -> float:
    """Multiply the gradients by the clip coefficient of ``norm``, and return the norm."""
    for gradient in gradients(params):
        local(gradient).mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def norm_of_own_stage(model: Model, meshes: Meshes) -> float:
    return scale(model.parameters(), full_norm(gradients(model.parameters())))


def experts_of_own_group(model: Model, meshes: Meshes) -> float:
    """Sum the squares of each DTensor over its own mesh.

    Mistake: the experts' squares are not summed over `ep`, because their mesh lacks this dim, although ranks along it
    hold different experts.
    """
    experts = model.get_parameter("experts")
    rest = [param for param in model.parameters() if param is not experts]
    total = summed(squares(gradients(rest)), meshes["dp"]) + summed(squares(gradients([experts])), meshes["ep_shard"])
    return scale(model.parameters(), total.sqrt())


def over_replicas_too(model: Model, meshes: Meshes) -> float:
    return scale(model.parameters(), summed(squares(gradients(model.parameters())), None).sqrt())


def gradients_for_parameters(model: Model, meshes: Meshes) -> float:
    """Compute the norm of full gradients, then pass them to a function that looks for the gradients of its arguments."""
    full: list[Tensor] = [one.full_tensor() for one in gradients(model.parameters())]  # type: ignore[attr-defined]
    norm = torch.nn.utils.get_total_norm(full)
    torch.nn.utils.clip_grads_with_norm_(full, MAX_NORM, norm)
    return float(norm)


def stock(model: Model, meshes: Meshes) -> float:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))


def everything_over_tensor_ranks(model: Model, meshes: Meshes) -> float:
    """Sum each rank's squares over dp and then over tp, whether or not tp shards the parameter."""
    total = summed(squares(gradients(model.parameters())), meshes["dp"], meshes["tp"])
    return scale(model.parameters(), total.sqrt())


def exhausted_generator(model: Model, meshes: Meshes) -> float:
    """Count parameters without the dim tp on the first tensor rank only. The generator of parameters
    is exhausted before gradients are scaled."""
    params = model.parameters()
    first = meshes["tp"].get_local_rank() == 0
    kept = [param for param in params if first or "tp" in param.device_mesh.mesh_dim_names]  # type: ignore[attr-defined]
    return scale(params, summed(squares(gradients(kept)), meshes["dp"], meshes["tp"]).sqrt())


def group_of_missing_dim(model: Model, meshes: Meshes) -> float:
    """Sum over the mesh dim `ddp`. The layout has no such dim, so nothing is summed."""
    group = [mesh for mesh in meshes.values() if "ddp" in mesh.mesh_dim_names]
    return scale(model.parameters(), summed(squares(gradients(model.parameters())), *group).sqrt())


def own_replica(model: Model, meshes: Meshes) -> float:
    """Clip gradients that no rank averaged. The rule itself is right for replicas with equal gradients."""
    return scale(model.parameters(), squares(gradients(model.parameters())).sqrt())


def largest_of_own_shard(model: Model, meshes: Meshes) -> float:
    here = [local(one) for one in gradients(model.parameters())]  # a shard may be empty
    return scale(model.parameters(), torch.stack([one.abs().max() for one in here if one.numel()]).max())


def local_value_of_norm(model: Model, meshes: Meshes) -> float:
    """Clip by the norm of this rank's shards: the local value of a partial DTensor, which is not reduced over the mesh."""
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(squares(gradients(model.parameters())), meshes["fsdp"], [Partial()], run_check=False)
    return scale(model.parameters(), local(partial).sqrt())


def by_mesh(model: Model, meshes: Meshes) -> float:
    """Sum the squared norms of the DTensors on each mesh."""
    groups: dict[int, list[Tensor]] = {}
    for gradient in gradients(model.parameters()):
        groups.setdefault(id(gradient.device_mesh), []).append(gradient)  # type: ignore[attr-defined]
    return scale(model.parameters(), torch.stack([full_norm(group).square() for group in groups.values()]).sum().sqrt())


def by_sharded_dim(model: Model, meshes: Meshes) -> float:
    """Sum each parameter's squares over the one mesh dim that shards it."""
    total = torch.zeros((), dtype=torch.float64)
    for param in model.parameters():
        sharded = [dim for dim, placement in enumerate(param.placements) if placement.is_shard()]  # type: ignore[attr-defined]
        if len(sharded) > 1:
            raise ValueError("more than one mesh dim shards a parameter")
        mesh: Any = param.device_mesh  # type: ignore[attr-defined]
        total += summed(squares(gradients([param])), *(mesh[mesh.mesh_dim_names[dim]] for dim in sharded))
    return scale(model.parameters(), total.sqrt())


# Repositories ---------------------------------------------------------------------------------------------------------


def norm_of_stage(rank: int) -> float:
    return dense_norm(("weight", "norm") if rank < 2 else ("head",))


def norm_with_own_experts(rank: int) -> float:
    return norm_of([dense("weight"), dense("norm"), shard(dense("experts"), rank // 2, 2)])


def norm_of_own_shards(*names: str, norm_type: float = 2.0) -> Callable[[int], float]:
    return lambda rank: norm_of([shard(dense(name), rank, RANKS) for name in names], norm_type)


def counted(**times: int) -> Callable[[int], float]:
    """Return a function of the rank: the norm in which each named parameter is counted the given number of times."""
    return lambda rank: norm_of([dense(name) * times[name] ** 0.5 for name in times])


@dataclass(frozen=True)
class Repository:
    """A repository and its clip rule.

    Attributes:
        documented: The thread, commit or file that describes the rule.
        names: The parameters of the layout, over all ranks.
        mistake: The mistake that the rule once had; empty if it had none.
        rule: The rule with its mistake.
        wrong: The norm by which each rank clips because of the mistake, or a part of the error that the rule raises.
            None: the norm is right.
        scales: False if the rule returns without scaling the gradients.
        refused: The axis that `ReplicaMismatchError` names, if the layout cannot be clipped without `repair`.
        repair: Changes the model so that it can be clipped.
    """

    documented: str
    layout: Callable[[Model], Meshes]
    names: tuple[str, ...]
    mistake: str
    rule: Callable[[Model, Meshes], float]
    wrong: Callable[[int], float] | str | None = None
    scales: bool = True
    norm_type: float = 2.0
    refused: str | None = None
    repair: Callable[[Model], None] | None = None


def declare_experts(model: Model) -> None:
    annotate(model.get_parameter("experts"), P("ep"), "experts")


def average(model: Model) -> None:
    for gradient in gradients(model.parameters()):
        dist.all_reduce(gradient)
        gradient.div_(RANKS)


REPOSITORIES = {
    "torchtitan": Repository(
        "issue 596, pull request 649",
        stages,
        ("weight", "norm", "head"),
        "Each pipeline stage clips by the norm of its own parameters.",
        norm_of_own_stage,
        norm_of_stage,
    ),
    "Automodel": Repository(
        "issue 3816",
        experts_on_slice,
        ("weight", "norm", "experts"),
        "The norm of experts is not summed over expert-parallel ranks, so ranks clip by different norms.",
        experts_of_own_group,
        norm_with_own_experts,
        refused="ep",
        repair=declare_experts,
    ),
    "VeOmni": Repository(
        "issue 184, pull request 862",
        hsdp,
        ("weight", "norm", "head"),
        "Under HSDP, squares are summed over the replicas too.",
        over_replicas_too,
        counted(weight=2, norm=2, head=2),
    ),
    "transformers": Repository(
        "pull request 46113",
        fsdp_and_tensor_parallel,
        ("weight", "norm", "head"),
        "Gradients are passed where parameters are expected, so no gradient is scaled.",
        gradients_for_parameters,
        scales=False,
    ),
    "accelerate": Repository(
        "pull request 4219",
        experts_and_plain,
        ("weight", "norm", "experts"),
        "DTensors and plain tensors are passed to torch's function together, which raises.",
        stock,
        "DTensor",
    ),
    "NeMo-RL": Repository(
        "pull request 3788",
        replicated_norm_layers,
        ("weight", "norm"),
        "Parameters that are replicated over tensor-parallel ranks count once per rank.",
        everything_over_tensor_ranks,
        counted(weight=1, norm=2),
    ),
    "AReaL": Repository(
        "issue 335; areal/utils/fsdp/grad.py",
        fsdp_over_sequence_ranks,
        ("weight", "norm"),
        "The norm exhausts a generator of parameters, so no gradient is scaled.",
        exhausted_generator,
        scales=False,
    ),
    "RLinf": Repository(
        "pull request 1558",
        fsdp,
        ("weight", "norm", "head", "tiny"),
        "The group is chosen by the name of a mesh dim that the mesh lacks, so each rank clips by its local norm.",
        group_of_missing_dim,
        norm_of_own_shards("weight", "norm", "head", "tiny"),
    ),
    "verl": Repository(
        "issue 7493",
        plain_replicas,
        ("weight", "norm"),
        "With a shard mesh of size 1 no gradient is averaged, so each rank clips its own gradients.",
        own_replica,
        lambda rank: dense_norm(("weight", "norm")) * unsynchronized(rank),
        refused="replica_4x1",
        repair=average,
    ),
    "LoongForge": Repository(
        "pull request 152",
        fsdp_beside_plain,
        ("weight", "head", "norm"),
        "The sum of local squares goes over all ranks, also over ranks that hold replicas.",
        over_replicas_too,
        counted(weight=1, head=1, norm=4),
    ),
    "SimpleTuner": Repository(
        "pull request 2900",
        fsdp,
        ("weight", "norm", "head", "tiny"),
        "The reported largest gradient is the largest of this rank's shards only.",
        largest_of_own_shard,
        norm_of_own_shards("weight", "norm", "head", "tiny", norm_type=inf),
        norm_type=inf,
    ),
    "LlamaFactory": Repository(
        "pull request 10640",
        flattened,
        ("weight", "norm", "head"),
        "The value of the norm is read from a DTensor before it is reduced.",
        local_value_of_norm,
        norm_of_own_shards("weight", "norm", "head"),
    ),
    "KempnerForge": Repository(
        "kempnerforge/distributed/utils.py",
        fsdp_and_tensor_parallel,
        ("weight", "norm", "head"),
        "",
        by_mesh,
    ),
    "d9d": Repository(
        "d9d/internals/grad_norm/norm.py",
        one_sharded_dim,
        ("weight", "norm", "head", "experts"),
        "",
        by_sharded_dim,
    ),
}


@dataclass(frozen=True)
class Clipped:
    """The norm that one clip call returned on one rank, and the factor by which it scaled the gradients.

    The factor is NaN if elements were scaled differently.
    """

    norm: float
    factor: float


def clipped(model: Model, clip: Callable[[], float]) -> Clipped:
    """Clip, compare this rank's shards of the gradients with their values before, and restore them. Return the result."""
    with torch.no_grad():
        before = [local(one).clone() for one in gradients(model.parameters())]
        norm = clip()
        here = [local(one) for one in gradients(model.parameters())]
        factors = torch.cat([(after / old).flatten() for after, old in zip(here, before, strict=True)])
        for gradient, old in zip(here, before, strict=True):
            gradient.copy_(old)
    spread = (factors - factors[0]).abs().max()
    return Clipped(norm, float(factors[0]) if spread < 1e-14 else torch.nan)


def run_rule(name: str) -> tuple[Clipped | str, str | None, list[Clipped], float]:
    """Return the result of the repository's rule or its error, the error of `clip_grad_norm_` before the repair, its
    results for p = 2, 3 and inf, and the largest difference of a gradient from the dense one."""
    repository = REPOSITORIES[name]
    torch.manual_seed(0)
    model = Model()
    meshes = repository.layout(model)
    rule: Clipped | str
    try:
        rule = clipped(model, lambda: repository.rule(model, meshes))
    except (RuntimeError, ValueError) as error:
        rule = f"{type(error).__name__}: {error}"
    refused = None
    if repository.repair is not None:
        with pytest.raises(ReplicaMismatchError) as caught:
            clip_grad_norm_(model, MAX_NORM)
        refused = str(caught.value)
        repository.repair(model)
    ours = [clipped(model, lambda p=p: float(clip_grad_norm_(model, MAX_NORM, norm_type=p))) for p in (2.0, 3.0, inf)]  # type: ignore[misc]
    return rule, refused, ours, largest_difference(model)


def largest_difference(model: Model) -> float:
    """Return the largest difference of a full gradient from the dense gradient. Experts on a slice are not compared."""
    found = [0.0]
    for name, param in model.named_parameters():
        gradient: Any = param.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if full.shape == dense(name).shape:
            found.append(float((full - dense(name)).abs().max()))
    return max(found)


@pytest.mark.long
@pytest.mark.default_cases(len(REPOSITORIES))
@pytest.mark.parametrize("name", REPOSITORIES)
def test_clip_grad_norm_matches_dense_norm_on_layouts_of_hand_written_rules(world: World, name: str) -> None:
    repository = REPOSITORIES[name]
    right = dense_norm(repository.names, repository.norm_type)
    if callable(repository.wrong):
        assert max(abs(repository.wrong(rank) / right - 1) for rank in range(RANKS)) > 0.01
    for rank, (rule, refused, ours, difference) in enumerate(world.run(RANKS, run_rule, name)):
        assert difference < 1e-14, "the gradients must be the dense ones"
        for result, norm_type in zip(ours, (2.0, 3.0, inf), strict=True):
            norm = dense_norm(repository.names, norm_type)
            assert result.norm == pytest.approx(norm, rel=1e-12)
            assert result.factor == pytest.approx(MAX_NORM / (norm + 1e-6), rel=1e-12)
        assert (repository.refused is None) == (refused is None)
        if refused is not None:
            assert f"differs along axis '{repository.refused}'" in refused
        if isinstance(repository.wrong, str):
            assert isinstance(rule, str)
            assert repository.wrong in rule
            continue
        assert isinstance(rule, Clipped), rule
        expected = right if repository.wrong is None else repository.wrong(rank)
        assert rule.norm == pytest.approx(expected, rel=1e-12)
        assert rule.factor == pytest.approx(
            min(1.0, MAX_NORM / (expected + 1e-6)) if repository.scales else 1.0, rel=1e-12
        )


def test_hand_written_rule_has_documented_mistake_iff_norm_or_scaling_is_wrong() -> None:
    assert len(REPOSITORIES) == 14
    for repository in REPOSITORIES.values():
        assert bool(repository.mistake) == (repository.wrong is not None or not repository.scales)


def two_sharded_dims() -> tuple[str, float]:
    model = Model()
    fsdp_and_tensor_parallel(model)
    with pytest.raises(ValueError, match="more than one mesh dim") as caught:
        by_sharded_dim(model, {})
    return str(caught.value), float(clip_grad_norm_(model, MAX_NORM))


def test_clip_grad_norm_matches_dense_norm_where_rule_of_d9d_raises(world: World) -> None:
    """d9d's rule supports one sharded mesh dim per parameter."""
    for _, norm in world.run(RANKS, two_sharded_dims):
        assert norm == pytest.approx(dense_norm(("weight", "norm", "head")), rel=1e-12)


def test_museum_page_shows_ratios_of_wrong_to_dense_norms() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "MUSEUM.md").read_text()
    for name, repository in REPOSITORIES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} "))
        shown = [float(number) for number in re.findall(r"[\d.]+", row.split("|")[3])]
        if callable(repository.wrong):
            right = dense_norm(repository.names, repository.norm_type)
            factors = [repository.wrong(rank) / right for rank in range(RANKS)]
            assert [min(shown), max(shown)] == pytest.approx([min(factors), max(factors)], abs=0.0051)
        else:
            assert shown == ([] if isinstance(repository.wrong, str) else [1.0])
