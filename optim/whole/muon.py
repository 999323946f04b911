"""Muon, an optimizer that orthogonalises the momentum of matrices and steps all other parameters with AdamW.

    m <- mu m + (1 - mu) g                                   momentum
    u <- (1 - mu) g + mu m   (nesterov; else m)
    o <- newton_schulz(u)                                    on the matrix's owner rank
    w <- w - lr (wd w + scale(shape) o)

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The scale that matches AdamW:
Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from math import frexp, inf, sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...parallel.layout.shard import Box, Shape
from ...parallel.layout.spec import P
from ...parallel.mesh.deprecation import renamed_arguments, renamed_fields
from ...parallel.mesh.text import some, without_wrappers
from ..states.chain import named_params_of
from .exchange import Homes, Matrix
from .optimizer import ADAMW, LazyTensors, Slot, Update, WholeOptimizer, adamw_update, moments
from .tensors import Blocks, LogicalTensor, WholeTensors, matrices_of, narrowed

# Newton-Schulz iteration: five steps of a polynomial that moves all singular values to about 1 ------------------------

#     X <- a X + (b A + c A A) X,  A = X X^T          matrix form: each step reads and writes all of X, [short, long]
#     X <- Q X,  Q = P_3 P_2 P_1                      Gram form: three steps with [short, short] matrices,
#        P_k = a I + b A_k + c A_k A_k                then one product with X
#        A_1 = X X^T,  A_k+1 = P_k A_k P_k
#
# Both forms are the same polynomial of X and differ by rounding only. The Gram form needs fewer operations if X is long.
# It recomputes A from X after three steps, because rounding makes small eigenvalues of A negative, and these grow by the
# factor a^2 = 12 per step. Without that, five steps in bfloat16 are wrong by up to thousands of times the result. With
# it, the error is at most 3 times the matrix form's on random matrices, and less where singular values decay.
#
# Keller Jordan et al. (2024). The Gram form and its restart: "Gram Newton-Schulz" (Dao AI Lab, 2026).

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients: a steep slope at 0. Singular values that are not tiny become about 0.7 to 1.2."""

RUN = 3
"""Number of steps of the Gram form before A is computed from X again."""

WORTH, SMALLEST = 0.9, 128
"""Limits of the Gram form: its operations divided by the matrix form's are at most `WORTH`; the short side is at least
`SMALLEST`.

With five steps, the first condition holds if the long side is at least 1.9 times the short side. If the short side is
smaller than `SMALLEST`, the overhead of calls dominates, and the Gram form has more calls.
"""


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 0.0
) -> Tensor:
    """Return approximately the orthogonal factor of ``matrix`` (U V^T of its singular value decomposition).

    The shape decides between the matrix form and the Gram form, see `uses_gram`.

    Args:
        matrix: [rows, columns], in the dtype of the computation.
        coefficients: a, b and c of the polynomial. Default: Keller Jordan's.
        steps: Number of steps. Default: 5.
        eps: Least Frobenius norm by which the matrix is divided. Default 0: no limit; a matrix of zeros remains zeros.
    """
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=eps) if eps else normalize(x)
    x = (on_gram if uses_gram(tuple(x.shape), steps) else on_matrix)(x, coefficients, steps)
    return x.mT if tall else x


def normalize(matrix: Tensor) -> Tensor:
    """Return ``matrix`` divided by its Frobenius norm; zeros if the norm is 0.

    The matrix is multiplied by a power of two first, so that its norm neither underflows nor overflows. Except for
    subnormal elements this is exact: where a plain division is accurate, the result is bitwise identical to it.

    Host synchronization: none.
    """
    if not matrix.numel():
        return matrix.clone()
    largest = matrix.abs().amax().to(torch.promote_types(matrix.dtype, torch.float32))
    limit = frexp(torch.finfo(matrix.dtype).max)[1] - 1  # exponent of the dtype's largest power of two
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit)
    x = matrix * torch.ldexp(torch.ones_like(largest), -exponent).to(matrix.dtype)
    norm = x.norm()
    return x.div_(torch.where(norm > 0, norm, torch.ones_like(norm)))


def on_matrix(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Return the result of the matrix form of the iteration.

    Args:
        x: [short, long], with singular values up to 1; its memory may be overwritten.
        coefficients: a, b and c.
        steps: Number of steps.
    """
    a, b, c = coefficients
    # allocated once, because an allocation per step would double the time
    after, gram, polynomial = x.new_empty(x.shape), x.new_empty(2 * x.shape[:1]), x.new_empty(2 * x.shape[:1])
    for _ in range(steps):
        torch.mm(x, x.mT, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        x, after = torch.addmm(x, polynomial, x, beta=a, out=after), x
    return x


def on_gram(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Return the result of the Gram form of the iteration. The arguments are those of `on_matrix`."""
    a, b, c = coefficients
    after = x.new_empty(x.shape)
    gram, p, q, spare = (x.new_empty(2 * x.shape[:1]) for _ in range(4))
    for first in range(0, steps, RUN):
        torch.mm(x, x.mT, out=gram)
        for step in range(first, min(first + RUN, steps)):
            if step > first:
                torch.mm(torch.mm(p, gram, out=spare), p, out=gram)
            torch.addmm(gram, gram, gram, beta=b, alpha=c, out=p).diagonal().add_(a)
            if step > first:
                q, spare = torch.mm(p, q, out=spare), q
            else:
                q.copy_(p)
        x, after = torch.mm(q, x, out=after), x
    return x


def uses_gram(shape: Shape, steps: int = 5) -> bool:
    """Return True if a matrix of ``shape`` is computed in the Gram form."""
    return min(shape) >= SMALLEST and _flops_on_gram(shape, steps) <= WORTH * _flops_on_matrix(shape, steps)


def flops(shape: Shape) -> float:
    """Return the approximate number of floating-point operations of five steps for a matrix of ``shape``."""
    return _flops_on_gram(shape, 5) if uses_gram(shape) else _flops_on_matrix(shape, 5)


def _flops_on_matrix(shape: Shape, steps: int) -> float:
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def _flops_on_gram(shape: Shape, steps: int) -> float:
    """Return the number of operations of the Gram form.

    A run is up to `RUN` steps. Each run has two products with X. Each step has one product A A, and each step that is
    not the first of its run has three more products of [short, short] matrices.
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
"""Globs over the names of embeddings and heads. They match names without prefixes of wrappers, such as ``module.``."""
_WRAPPERS = ("module.", "base_model.model.")  # of DistributedDataParallel and PEFT


def scale_of(rule: Scale | None, shape: Shape) -> float:
    """Return the factor on the orthogonal update of a matrix, in addition to the learning rate.

    Args:
        rule: ``"original"`` or None: Keller Jordan's sqrt(max(1, rows / columns)). ``"match_rms_adamw"``: Moonshot's
            0.2 sqrt(max(rows, columns)). ``"spectral_unclamped"``: sqrt(rows / columns).
        shape: (rows, columns).
    """
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(rows / columns) if rule == "spectral_unclamped" else sqrt(max(1.0, rows / columns))


@renamed_fields(no_matrices="adamw_names")
class Muon(WholeOptimizer):
    """Muon for matrices, and AdamW for all other parameters.

        optimizer = ParallelOptimizer(Muon(model.named_parameters(), lr=0.02), registry, max_norm=1.0)

    A parameter with two or more dims is a matrix unless its name matches ``adamw_names`` (embeddings and heads).
    `for_model` also decides by the classes of modules. `assignment` returns the algorithm of each parameter, and
    ``repr`` shows it. A parameter with three dims is a stack of matrices, such as experts. With four or more dims, such
    as a convolution's, the first dim is the rows and all other dims are the columns. ``"algorithm": "muon"`` or
    ``"adamw"`` in a param group overrides this rule.

    Args:
        params: Parameters, ``model.named_parameters()`` (needed for ``adamw_names``), or param groups.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: As in `torch.optim.Muon`.
        eps: Least norm by which a matrix is divided before it is orthogonalised. Default 0: no limit, so the update does
            not depend on the scale of the gradient. `torch.optim.Muon` uses 1e-7, so that gradients with a smaller
            norm give smaller updates.
        adamw: AdamW's options lr (default: ``lr``), betas, eps and weight_decay. None: ``lr``, (0.9, 0.95), 1e-8
            and 0.1.
        adamw_names: Globs over names of parameters that AdamW steps. Default: `ADAMW_NAMES`.
        blocks: Blocks of a fused weight along its rows, each a separate matrix, by glob over names. The value is the
            number of equal blocks, or the list of sizes. Examples: ``3`` for q, k and v; the number of heads for Muon
            per head. A weight that no glob matches uses the `meshstep.parallel.blocks` of its layout, along rows or
            columns. None: layouts only.
        ns_dtype: Dtype of the iteration. Default: bfloat16, as in torch. None: the parameter's dtype. In float16,
            elements below 3e-8 become 0. If the short side is at least 128 and the long side at least 1.9 times as long,
            the Gram form is used, whose last bits differ from torch's (see `newton_schulz`).

    ``adjust_lr_fn`` scales the update by the weight's shape as stored. A layer may store its weight transposed, [in,
    out], as `Linear2D` does. ``"original"`` then gives another scale than for [out, in]; ``"match_rms_adamw"`` gives
    the same scale.

    Raises:
        ValueError: An option is out of range. When the optimizer is bound, or in the first step: a parameter in a group
            with ``"algorithm": "muon"`` has fewer than two dims, or ``blocks`` does not fit a weight.

    Collectives: matrices are exchanged in rounds of up to `meshstep.optim.whole.exchange.ROUND_BYTES` (or one larger
        matrix) per owner rank. Each round has at most two all-to-alls among the ranks that hold shards of its matrices.
    Memory: up to three rounds of full matrices, each of up to ``ROUND_BYTES`` or one larger matrix (half of that
        if float32 weights are sent in bfloat16).
        On a CPU, the buffers of two rounds are kept for the next step.
    """

    kept = ("adamw_names", "blocks", "ns_dtype", "_adamw")

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

        AdamW steps vectors, parameters whose names match ``adamw_names``, and the parameters of each module whose class
        name contains "Embedding", even if another module shares them. Of the other weights with the shape of an
        embedding's weight, AdamW steps the last one, which is taken for an untied head. In a pipeline stage without an
        embedding, a head is recognized by its name only.

        Args:
            model: This rank's part of the model.
            args, options: As in the constructor.
            adamw_names: As in the constructor.
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
        """Yield ``group`` if it has an "algorithm"; otherwise yield a group for Muon and a group for AdamW."""
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
        """Return ``"muon"`` or ``"adamw"``: the algorithm that steps a parameter, by its dims and name."""
        no_matrix = name is not None and any(fnmatchcase(_unwrapped(name), pattern) for pattern in self.adamw_names)
        return "adamw" if param.dim() < 2 or no_matrix else "muon"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group.

        Raises:
            ValueError: The group contains matrices and other parameters, and has no "algorithm".
        """
        group = groups_of([param_group])[0]
        own, *rest = sorted(self._sorted(group), key=lambda part: -len(part["params"]))
        if any(part["params"] for part in rest):
            raise ValueError(
                "the param group contains matrices and other parameters; add two groups, or set 'algorithm' in the group "
                "to 'muon' or 'adamw'"
            )
        super().add_param_group({**self._adamw, **own} if own["algorithm"] == "adamw" else own)

    # Choice of matrices ---------------------------------------------------------------------------------------------

    def metadata_for(self, name: str | None, shape: Shape, group: Mapping[str, Any], spec: P | None) -> Any:
        if group["algorithm"] != "muon":
            return ()
        if len(shape) < 2:
            raise ValueError(
                f"{name} of shape {shape} is not a matrix, which Muon needs; put it in a param group with 'algorithm': "
                "'adamw'"
            )
        return tuple(matrices_of(name, shape, self.blocks, spec))

    def bound(self, tensors: WholeTensors) -> None:
        super().bound(tensors)
        # rounding before the exchange gives the same elements as rounding on the owner rank, with less traffic
        self._homes = Homes(tensors, _boxes, lambda shape: flops(as_matrix(shape)), dtype=self.ns_dtype)
        self._scales: dict[int, float | Tensor] = {}

    # The step -------------------------------------------------------------------------------------------------------

    def initial(self, slot: Slot) -> dict[str, Any]:
        if slot.group["algorithm"] == "adamw":
            return moments(slot)
        return {"momentum_buffer": torch.zeros_like(slot.param, memory_format=torch.contiguous_format)}

    def updates(self, slots: Sequence[Slot]) -> Iterator[Update]:
        matrices = {slot.position: slot for slot in slots if slot.group["algorithm"] == "muon"}
        for slot in matrices.values():
            mu = slot.group["momentum"]
            self.descend(slot.state["momentum_buffer"], slot.grad, -(1 - mu), -1.0)  # m + (1 - mu) (g - m)

        def orthogonal(matrix: Matrix, lists: list[Tensor]) -> Tensor:
            group = matrices[self.tensors.positions(matrix.tensor)[0]].group
            whole = lists[0].reshape(as_matrix(matrix.shape))
            return newton_schulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"]).reshape(matrix.shape)

        directions = LazyTensors(list(matrices.values()), _direction)
        device = next((slot.param.device for slot in matrices.values()), None)
        for position, o in self._homes.map([directions], orthogonal, device):
            slot = matrices[position]
            lr, decay, scale = slot.group["lr"], slot.group["weight_decay"], self._scale(slot)
            if isinstance(scale, Tensor):
                o, scale = o * scale, 1.0
            self.descend(slot.param, o, lr * scale, decay / scale)
            yield Update(slot, slot.param, {})
        for slot in slots:
            if slot.group["algorithm"] == "adamw":
                yield adamw_update(slot)

    def _scale(self, slot: Slot) -> float | Tensor:
        """Return the scale of a slot's update: a number, or one per element if its matrices have different scales."""
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
    """Return u of the formulas in the module docstring; the state must have the new momentum."""
    m: Tensor = slot.state["momentum_buffer"]
    return slot.grad.lerp(m, slot.group["momentum"]) if slot.group["nesterov"] else m


def _boxes(tensor: LogicalTensor) -> Sequence[Box]:
    return tensor.metadata or ()


def as_matrix(shape: Shape) -> Shape:
    """Return (rows, columns): the last two dims of a stack, or the first dim and the product of all others."""
    if len(shape) == 3:
        return shape[1:]
    rest = 1
    for size in shape[1:]:
        rest *= size
    return shape[0], rest


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Return ``params`` as a list of param groups."""
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
