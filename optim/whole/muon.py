"""Muon, an optimizer that orthogonalises the momentum of matrices and steps all other parameters with AdamW.

    m <- mu m + (1 - mu) g                                   momentum
    u <- (1 - mu) g + mu m   (nesterov; else m)
    o <- newton_schulz(u)                                    on one rank, the matrix's owner rank
    w <- w - lr (wd w + scale(shape) o)

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The scale that matches AdamW:
Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from math import frexp, inf, prod, sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...parallel.layout.shard import Box, Shape, narrowed
from ...parallel.layout.spec import P
from ...parallel.mesh.deprecation import renamed_arguments, renamed_fields
from ...parallel.mesh.text import some, without_wrappers
from ..step.wrapped_optimizer import named_params_of
from . import batching
from .batching import LazyTensors, by_position, grouped
from .exchange import Homes, Matrix, each
from .optimizer import ADAMW, Slot, Update, WholeOptimizer, adamw_in_place, adamw_update, moments
from .tensors import Blocks, LogicalTensor, WholeTensors, matrices_of

# Newton-Schulz iteration: five steps of a polynomial that moves singular values toward 1 ------------------------------

#     X <- a X + (b A + c A A) X,  A = X X^T          matrix form: each step reads and writes all of X, [short, long]
#     X <- Q X,  Q = P_3 P_2 P_1                      Gram form: three steps with [short, short] matrices,
#        P_k = a I + b A_k + c A_k A_k                then one product with X
#        A_1 = X X^T,  A_k+1 = P_k A_k P_k
#
# Both forms are the same polynomial of X and differ by rounding only. The Gram form needs fewer operations if X is
# long. It recomputes A from X after three steps, because rounding makes small eigenvalues of A negative, and these grow
# by the factor a^2 (about 12) per step. In the tests, the error of the Gram form is then at most 3 times the error of the
# matrix form.
#
# Keller Jordan et al. (2024). The Gram form and its restart: "Gram Newton-Schulz" (Dao AI Lab, 2026).

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients a, b and c. Five steps move singular values that are not tiny to about 0.7 to 1.2."""

RUN = 3
"""Number of steps of the Gram form before the Gram matrix A is computed from X again."""

WORTH, SMALLEST = 0.9, 128
"""Conditions for the Gram form: at most `WORTH` times the operations of the matrix form, and a short side of at least
`SMALLEST`.

With five steps, the first condition holds if the long side is at least 1.9 times the short side. For smaller matrices,
the overhead of calls dominates, and the Gram form has more calls.
"""


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 0.0
) -> Tensor:
    """Return approximately the orthogonal factor of ``matrix`` (U V^T of its singular value decomposition).

    A stack [n, rows, columns] is orthogonalised matrix by matrix. The dtype of ``matrix`` is the dtype of the
    computation. The matrix is first divided by its Frobenius norm, or by ``eps`` if the norm is smaller. A matrix of
    zeros remains zeros.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / _norm(x).clamp(min=eps) if eps else normalize(x)
    x = (on_gram if uses_gram(tuple(x.shape[-2:]), steps) else on_matrix)(x, coefficients, steps)
    return x.mT if tall else x


def normalize(matrix: Tensor) -> Tensor:
    """Return ``matrix``, or each matrix of a stack, divided by its Frobenius norm; zeros if the norm is 0.

    The matrix is multiplied by a power of two first, so that its norm neither underflows nor overflows. This
    multiplication is exact, except for subnormal numbers.
    """
    if not matrix.numel():
        return matrix.clone()
    largest = matrix.abs().amax() if matrix.dim() == 2 else _norm(matrix, inf)  # unlike abs(), makes no copy
    largest = largest.to(torch.promote_types(matrix.dtype, torch.float32))
    limit = frexp(torch.finfo(matrix.dtype).max)[1] - 1  # exponent of the dtype's largest power of two
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit)
    x = matrix * torch.ldexp(torch.ones_like(largest), -exponent).to(matrix.dtype)
    norm = _norm(x)
    return x.div_(torch.where(norm > 0, norm, torch.ones_like(norm)))


def _norm(x: Tensor, order: float = 2.0) -> Tensor:
    """Return the norm of a matrix, 0-dim, or of each matrix of a stack, [n, 1, 1]."""
    norm: Tensor = x.norm(order) if x.dim() == 2 else torch.linalg.vector_norm(x, order, (-2, -1), keepdim=True)
    return norm


def on_matrix(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Apply X <- a X + (b A + c A A) X with A = X X^T ``steps`` times, and return X.

    ``x`` is [short side, long side], or a stack of such matrices, with singular values up to 1. It may be overwritten.
    """
    a, b, c = coefficients
    mm, addmm = _products(x)
    # allocated once per call, because allocations in each iteration are slow
    after, gram, polynomial = x.new_empty(x.shape), _empty_squares(x), _empty_squares(x)
    for _ in range(steps):
        mm(x, x.mT, out=gram)
        addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        x, after = addmm(x, polynomial, x, beta=a, out=after), x
    return x


def on_gram(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Return the same as `on_matrix` except for rounding, by the Gram form. ``x`` is as in `on_matrix`."""
    a, b, c = coefficients
    mm, addmm = _products(x)
    after = x.new_empty(x.shape)
    gram, p, q, spare = (_empty_squares(x) for _ in range(4))
    for first in range(0, steps, RUN):
        mm(x, x.mT, out=gram)
        for step in range(first, min(first + RUN, steps)):
            if step > first:
                mm(mm(p, gram, out=spare), p, out=gram)
            addmm(gram, gram, gram, beta=b, alpha=c, out=p).diagonal(dim1=-2, dim2=-1).add_(a)
            if step > first:
                q, spare = mm(p, q, out=spare), q
            else:
                q.copy_(p)
        x, after = mm(q, x, out=after), x
    return x


def _products(x: Tensor) -> tuple[Any, Any]:
    """Return torch's functions for A B and C + A B: for matrices, or for stacks if ``x`` is a stack."""
    return (torch.mm, torch.addmm) if x.dim() == 2 else (torch.bmm, torch.baddbmm)


def _empty_squares(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.size(-2))


def uses_gram(shape: Shape, steps: int = 5) -> bool:
    """Return True if `newton_schulz` uses the Gram form for a matrix of ``shape``."""
    return min(shape) >= SMALLEST and _flops_on_gram(shape, steps) <= WORTH * _flops_on_matrix(shape, steps)


def flops(shape: Shape) -> float:
    """Return the approximate number of floating-point operations of five steps of `newton_schulz`."""
    return _flops_on_gram(shape, 5) if uses_gram(shape) else _flops_on_matrix(shape, 5)


def _flops_on_matrix(shape: Shape, steps: int) -> float:
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def _flops_on_gram(shape: Shape, steps: int) -> float:
    """Return the approximate number of floating-point operations of `on_gram`.

    A run is up to `RUN` steps. Each run has two products with X. Each step has one product A A. Each step that is not
    the first one of its run has three more products of [short side, short side] matrices.
    """
    short, long = sorted(shape)
    runs = -(-steps // RUN)
    return runs * 4.0 * short * short * long + (2.0 * steps + 6.0 * (steps - runs)) * short**3


# Muon -----------------------------------------------------------------------------------------------------------------

Scale = Literal["original", "match_rms_adamw", "spectral_unclamped"]
ADAMW_NAMES = (
    *("*embed*", "*wte*", "*wpe*", "*tok_emb*", "*pos_emb*"),  # embeddings
    *("*head.weight", "*classifier*", "output.weight", "proj_out.weight", "score.weight"),  # heads
)
"""Default of Muon's ``adamw_names``: globs that match the names of embeddings and heads.

Prefixes of wrappers, such as ``module.``, are removed from a name before it is matched.
"""
_WRAPPERS = ("module.", "base_model.model.")  # name prefixes of DistributedDataParallel and PEFT


def scale_of(rule: Scale | None, shape: Shape) -> float:
    """Return the factor on the orthogonal update of a matrix, in addition to the learning rate."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(rows / columns) if rule == "spectral_unclamped" else sqrt(max(1.0, rows / columns))


@renamed_fields(no_matrices="adamw_names")
class Muon(WholeOptimizer):
    """Muon for matrices, and AdamW for all other parameters.

        optimizer = ParallelOptimizer(Muon(model.named_parameters(), lr=0.02), registry, max_norm=1.0)

    Muon steps the parameters with two or more dims, except those whose names match ``adamw_names`` (embeddings and
    heads). The key ``"algorithm"`` of a param group, ``"muon"`` or ``"adamw"``, overrides this rule. `for_model` also
    decides by the classes of modules. `assignment` returns the algorithm of each parameter.

    A parameter with two dims is a matrix. With three dims it is a stack of matrices, such as experts. With four or more
    dims, such as a convolution's weight, the first dim is the rows, and all other dims together are the columns.

    Args:
        params: Parameters, ``model.named_parameters()`` (needed for ``adamw_names``), or param groups.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: As in `torch.optim.Muon`, with
            the same defaults.
        eps: A matrix is divided by its Frobenius norm before it is orthogonalised, or by ``eps`` if the norm is
            smaller. Default 0: no limit, so the update does not depend on the scale of the gradient. `torch.optim.Muon`
            uses 1e-7, so that gradients with a smaller norm give smaller updates.
        adamw: Options of AdamW: lr, betas, eps and weight_decay. Default of each: ``lr`` of Muon, (0.9, 0.95), 1e-8 and
            0.1.
        adamw_names: Globs over the names of parameters that AdamW steps. Default: `ADAMW_NAMES`.
        blocks: {glob over names: blocks of a fused weight along its rows}. Each block is a separate matrix. The value
            is the number of equal blocks, or the list of their numbers of rows. Examples: ``3`` for q, k and v; the
            number of heads for Muon per head. A weight that no glob matches has the blocks that its layout declares
            with `meshstep.parallel.blocks`, along rows or columns. None (default): no globs.
        ns_dtype: Dtype of the Newton-Schulz iteration. Default: bfloat16, as in torch. None: the parameter's dtype. In
            float16, elements below 3e-8 become 0. If the short side is at least 128 and the long side at least 1.9
            times as long (with five steps), the Gram form of the iteration is used, and the last bits differ from
            torch's.

    ``adjust_lr_fn`` scales the update by the weight's shape as stored. A layer may store its weight transposed, [in,
    out], as `Linear2D` does. ``"original"`` then gives another scale than for [out, in]; ``"match_rms_adamw"`` gives
    the same scale.

    Raises:
        ValueError: An option is out of range or unknown. In the constructor of `ParallelOptimizer`, or without it in
            the first step: a parameter in a group with ``"algorithm": "muon"`` has fewer than two dims, or ``blocks``
            does not fit a weight.

    Collectives: per step, matrices are exchanged in rounds. In a round, each owner rank receives full matrices of up to
        64 MiB in the parameters' dtype, or one larger matrix. Each round has at most two all-to-alls among the ranks
        that step shards of its matrices.
    Host synchronization: none if parameters and process groups are on one device.
    Memory: in a step, the full matrices of two rounds, the results of two rounds, and the communication buffers, in
        ``ns_dtype``. On a CPU, the matrices and buffers are kept for the next step. On a GPU, matrices of equal shapes in
        a round are orthogonalised together, which needs about four times their memory.

    On a GPU, few kernels step many tensors. AdamW is torch's fused AdamW. Gradients that are clipped or scaled are
    changed in place, as by torch's fused optimizers. The products of a stack of matrices may round differently from the
    products of each matrix. So results depend on the number of ranks by rounding, except with ``sum_order="fixed"``,
    which computes one matrix after the other.
    """

    kept = ("adamw_names", "blocks", "ns_dtype", "_adamw")
    divides_gradients = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 0.0,
        ns_steps: int = 5,
        adjust_lr_fn: Scale | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        adamw_names: Sequence[str] = ADAMW_NAMES,
        blocks: Blocks | None = None,
        ns_dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        if not lr >= 0 or not weight_decay >= 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"lr={lr}, weight_decay={weight_decay}, momentum={momentum}: lr and weight_decay must be >= 0, and "
                "momentum in [0, 1)"
            )
        if not 0 <= eps < inf:
            raise ValueError(
                f"eps={eps}: give a finite number >= 0, such as 0 (the default) or 1e-7 (torch.optim.Muon's)"
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw", "spectral_unclamped"):
            raise ValueError(
                f"adjust_lr_fn={adjust_lr_fn!r}: give 'original', 'match_rms_adamw' or 'spectral_unclamped'"
            )
        if unknown := {*(adamw or {})} - {*ADAMW, "lr"}:
            raise ValueError(
                f"adamw={adamw!r} contains {', '.join(sorted(unknown))}; the options are lr, {', '.join(ADAMW)}"
            )
        self.adamw_names, self.blocks, self.ns_dtype = tuple(adamw_names), dict(blocks or {}), ns_dtype
        self._adamw: dict[str, Any] = {"lr": lr, **ADAMW, **(adamw or {})}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__([group for given in groups_of(params) for group in self._sorted(given)], defaults)

    @classmethod
    @renamed_arguments(no_matrices="adamw_names")
    def for_model(cls, model: nn.Module, *args: Any, adamw_names: Sequence[str] = ADAMW_NAMES, **options: Any) -> Muon:
        """Return a Muon optimizer of a model's trained parameters, with AdamW for embeddings and heads of any name.

            muon = Muon.for_model(model, lr=0.02)
            print(muon.assignment())

        AdamW steps vectors, parameters whose names match ``adamw_names``, and the direct parameters of each module
        whose class name contains "Embedding", even if another module shares them. Of the other weights with the shape
        of an embedding's 2-dim weight, AdamW steps the last one in the model, which is taken for an untied head. In a
        pipeline stage without an embedding, a head is recognized by its name only.

        Args:
            model: This rank's part of the model. Parameters without ``requires_grad`` are left out.
            args, options: Arguments of the constructor after ``params``.
            adamw_names: Globs over the names of parameters that AdamW steps. Default: `ADAMW_NAMES`.
        """
        embeddings = {
            id(param): param
            for module in model.modules()
            if "Embedding" in type(module).__name__
            for param in module.parameters(recurse=False)
        }
        shapes = {tuple(param.shape) for param in embeddings.values() if param.dim() == 2}
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        heads = [name for name, param in named if id(param) not in embeddings and tuple(param.shape) in shapes]
        found = [name for name, param in named if id(param) in embeddings] + heads[-1:]
        exact = [escape(_unwrapped(name)) for name in found]  # globs that match these names only
        return cls(named, *args, adamw_names=(*adamw_names, *exact), **options)

    def assignment(self) -> dict[str, str]:
        """Return ``"muon"`` or ``"adamw"`` by the name of each parameter that the optimizer steps.

        The key of a parameter without a name is its position, such as ``"parameter 3 of group 0"``.
        """
        found = {}
        for index, group in enumerate(self.param_groups):
            for position, (name, _) in enumerate(named_params_of([group])):
                found[name or f"parameter {position} of group {index}"] = group["algorithm"]
        return found

    def __repr__(self) -> str:
        by_name = self.assignment()
        lines = [
            f"{label}: {some([name for name, algorithm in by_name.items() if algorithm == kind])}"
            for kind, label in (("muon", "matrices by Muon"), ("adamw", "by AdamW"))
            if kind in by_name.values()
        ]
        return "\n".join([super().__repr__(), *lines])

    def _sorted(self, group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a copy of the param group if it has an "algorithm"; else yield one group for Muon and one for AdamW."""
        if "algorithm" in group:
            if group["algorithm"] not in ("muon", "adamw"):
                raise ValueError(f"'algorithm' of the param group is {group['algorithm']!r}: give 'muon' or 'adamw'")
            yield dict(group)
            return
        for algorithm in ("muon", "adamw"):
            own = [item for item in group["params"] if self.algorithm_of(*_named(item)) == algorithm]
            # Empty groups are kept, so that all ranks have the same groups. torch needs names in all groups or in none.
            named = any(_named(item)[0] for item in group["params"])
            names: dict[str, Any] = {"param_names": []} if named and not own else {}
            yield {**group, **names, "params": own, "algorithm": algorithm}

    def algorithm_of(self, name: str | None, param: Tensor) -> str:
        """Return the algorithm for a parameter in a param group without "algorithm": ``"muon"`` or ``"adamw"``.

        It is AdamW for parameters with fewer than two dims, or with a name that matches ``adamw_names``.
        """
        no_matrix = name is not None and any(fnmatchcase(_unwrapped(name), pattern) for pattern in self.adamw_names)
        return "adamw" if param.dim() < 2 or no_matrix else "muon"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, whose parameters must all be stepped by the same algorithm.

        Raises:
            ValueError: The group has no "algorithm", and Muon would step some of its parameters and AdamW others. Or
                its "algorithm" is neither "muon" nor "adamw".
        """
        group = groups_of([param_group])[0]
        own, *rest = sorted(self._sorted(group), key=lambda part: -len(part["params"]))
        if any(part["params"] for part in rest):
            raise ValueError(
                "Muon would step some parameters of the param group, and AdamW others (with fewer than two dims, or a name "
                "that matches adamw_names); add two groups, or set 'algorithm': 'adamw' in the group, or 'muon' if all its "
                "parameters have two or more dims"
            )
        super().add_param_group({**self._adamw, **own} if own["algorithm"] == "adamw" else own)

    # Choice of matrices ---------------------------------------------------------------------------------------------

    def metadata_for(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        if group["algorithm"] != "muon":
            return ()
        if len(shape) < 2:
            raise ValueError(
                f"{name or 'a parameter'} of shape {shape} is not a matrix, which Muon needs; put it in a param group "
                "with 'algorithm': 'adamw'"
            )
        return tuple(matrices_of(name, shape, self.blocks, spec))

    def bound(self, tensors: WholeTensors) -> None:
        super().bound(tensors)
        # rounding to ns_dtype before the exchange gives the same elements as rounding afterwards, with less traffic
        self._homes = Homes(tensors, _boxes, lambda shape: flops(as_matrix(shape)), dtype=self.ns_dtype)
        self._scales: dict[int, float | Tensor] = {}

    # The step -------------------------------------------------------------------------------------------------------

    def initial(self, slot: Slot) -> dict[str, Any]:
        if slot.group["algorithm"] == "adamw":
            return moments(slot)
        return {"momentum_buffer": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        matrices = {slot.position: slot for slot in slots if slot.group["algorithm"] == "muon"}
        others = [slot for slot in slots if slot.group["algorithm"] == "adamw"]
        self._add_to_momentum(list(matrices.values()))

        def orthogonal(matrix: Matrix, lists: list[Tensor]) -> Tensor:
            whole = lists[0].reshape(as_matrix(matrix.shape))
            return newton_schulz(whole, *self._options(matrices, matrix)).reshape(matrix.shape)

        def orthogonal_stack(together: Sequence[Matrix], stacks: list[Tensor]) -> Iterator[Tensor]:
            options = [self._options(matrices, matrix) for matrix in together]
            if any(other != options[0] for other in options):
                yield from each(orthogonal)(together, stacks)
                return
            shape = together[0].shape
            made = newton_schulz(stacks[0].view(len(together), *as_matrix(shape)), *options[0])
            yield from made.contiguous().view(len(together), *shape).unbind()

        directions = LazyTensors(list(matrices.values()), _direction, _directions)
        devices = [slot.param.device for slot in matrices.values()]
        is_stacked = len({*devices}) == 1 and batching.batches_on(devices[0]) and not self.fixed_order
        compute = orthogonal_stack if is_stacked else each(orthogonal)
        for made in self._homes.map_stacks([directions], compute, devices[0] if devices else None):
            yield from self._descend_along(made, matrices)
        together = grouped(others, lambda slot: slot.is_batched)
        adamw_in_place(together.get(True, ()), self.found_inf)
        for slot in together.get(False, ()):
            yield adamw_update(slot)

    def _add_to_momentum(self, slots: Sequence[Slot]) -> None:
        """Set the momentum m of each slot to m + (1 - mu) (g - m)."""
        for of_group in grouped(slots, lambda slot: (id(slot.group), slot.is_batched or slot.position)).values():
            rate, momenta = -(1 - of_group[0].group["momentum"]), [slot.state["momentum_buffer"] for slot in of_group]
            if not of_group[0].is_batched:
                self.descend_each(momenta, [slot.grad for slot in of_group], rate, -1.0)
                continue
            grads = [slot.scaled_grad.to(slot.param.dtype).contiguous() for slot in of_group]
            self.descend_each(momenta, grads, rate, -1.0, of_group[0].grad_scale)
            for slot, grad in zip(of_group, grads, strict=True):
                slot.grad = grad  # divided by the scale, unless the step is skipped

    def _options(self, slots: Mapping[int, Slot], matrix: Matrix) -> tuple[Any, ...]:
        group = slots[self.tensors.positions(matrix.tensor)[0]].group
        return group["ns_coefficients"], group["ns_steps"], group["eps"]

    def _descend_along(self, directions: Mapping[int, Tensor], slots: Mapping[int, Slot]) -> Iterator[Update]:
        """Step parameters in place along orthogonal directions, given by position, and yield an `Update` for each."""
        scaled: list[tuple[Slot, Tensor, float]] = []
        for position, direction in directions.items():
            slot, scale = slots[position], self._scale(slots[position])
            if isinstance(scale, Tensor):
                direction, scale = direction * scale, 1.0
            scaled.append((slot, direction, scale))
        for of_scale in grouped(scaled, lambda one: (id(one[0].group), one[2])).values():
            slot, _, scale = of_scale[0]
            lr, decay = slot.group["lr"], slot.group["weight_decay"]
            params, along = [slot.param for slot, _, _ in of_scale], [direction for _, direction, _ in of_scale]
            self.descend_each(params, along, lr * scale, decay / scale)
            for slot, _, _ in of_scale:
                yield Update(slot, slot.param, {})

    def _scale(self, slot: Slot) -> float | Tensor:
        """Return the factor on a parameter's update: one number, or one per element of the shard if its matrices differ."""
        if slot.position not in self._scales:
            tensor, rule = self.tensors.tensors[slot.position], slot.group["adjust_lr_fn"]
            by_box = [(box, scale_of(rule, as_matrix(box.sizes))) for box in tensor.metadata]
            if len({scale for _, scale in by_box}) == 1:
                self._scales[slot.position] = by_box[0][1]
            else:
                whole = slot.param.new_empty(tensor.shape)
                for box, scale in by_box:
                    narrowed(whole, box).fill_(scale)
                self._scales[slot.position] = self.tensors.of_whole(slot.position, whole)
        return self._scales[slot.position]


def _direction(slot: Slot) -> Tensor:
    """Return this rank's shard of the tensor to orthogonalise. The slot's state must contain the new momentum."""
    m: Tensor = slot.state["momentum_buffer"]
    return slot.grad.lerp(m, slot.group["momentum"]) if slot.group["nesterov"] else m


def _directions(slots: Sequence[Slot]) -> dict[int, Tensor]:
    """Return {position: the same as `_direction`} for each slot, with few kernels."""
    found: dict[int, Tensor] = {}
    for (nesterov, mu, *_), alike in grouped(
        slots, lambda slot: (slot.group["nesterov"], slot.group["momentum"], slot.param.device, slot.param.dtype)
    ).items():
        momenta: list[Tensor] = [slot.state["momentum_buffer"] for slot in alike]
        made = torch._foreach_lerp([slot.grad for slot in alike], momenta, float(mu)) if nesterov else momenta
        found |= by_position(alike, made)
    return found


def _boxes(tensor: LogicalTensor) -> Sequence[Box]:
    return tensor.metadata or ()


def as_matrix(shape: Shape) -> Shape:
    """Return (rows, columns): the last two of three dims, else the first dim and the product of all other dims."""
    if len(shape) == 3:
        return shape[1:]
    return shape[0], prod(shape[1:])


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Return the ``params`` argument of an optimizer (a tensor, tensors, or param groups) as a list of param groups."""
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if not items or not isinstance(items[0], dict):
        return [{"params": items}]
    return [
        {**group, "params": [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])}
        for group in items
    ]


def _unwrapped(name: str) -> str:
    name = without_wrappers(name)
    while prefix := next((wrapper for wrapper in _WRAPPERS if name.startswith(wrapper)), None):
        name = name.removeprefix(prefix)
    return name


def _named(item: Any) -> tuple[str | None, Tensor]:
    return item if isinstance(item, tuple) else (None, item)
