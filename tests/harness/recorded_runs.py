"""Small trainings that a `Recorder` records: right ones in many layouts and precisions, and wrong ones.

The model is ``head(x + down(tanh(up(norm(x)))))`` with ``x = stem(input)``. Its hidden features are sharded over
``tensor``, its batch over ``data``; the head is on the second of two stages along ``pipe``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshstep.amp import precision_of
from meshstep.optim import ByNorm, Lion, Muon, ParallelOptimizer, Recorder
from meshstep.parallel import P, ProcessGroupRegistry, Topology, copy_to, declare, reduce_from, shard
from torch import Tensor, nn
from torch.nn import functional as F
from whole_runs import STATES
from zero_models import small_buckets

INPUTS, WIDTH, HIDDEN, CLASSES, ROWS, STEPS = 6, 8, 12, 5, 12, 4
LR = 1e-2
SPECS = {
    "up.weight": P("tensor", None),
    "up.bias": P("tensor"),
    "down.weight": P(None, "tensor"),
    "*": P(),
}
SHARDED = ("up.weight", "up.bias", "down.weight")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
    "muon": Muon,
}


@dataclass(frozen=True)
class Layout:
    """A mesh, a precision and a state placement.

    Args:
        axes: In the format of `Topology.parse`; "": one rank.
        mode: The precision mode; "fp64" is fp32 with float64 tensors.
        states: Key of `whole_runs.STATES`.
        optimizer: Key of `OPTIMIZERS`.
    """

    axes: str = ""
    mode: str = "fp32"
    states: str = "whole"
    micros: int = 1
    optimizer: str = "adamw"

    @property
    def topology(self) -> Topology:
        return Topology.parse(self.axes) if self.axes else Topology(data=1)

    @property
    def size(self) -> int:
        return self.topology.world_size

    def __str__(self) -> str:
        parts = [
            self.axes or "one rank",
            *(value for value in (self.mode, self.states) if value not in ("fp32", "whole")),
        ]
        parts += [f"{self.micros} micro-batches"] * (self.micros > 1) + [self.optimizer] * (self.optimizer != "adamw")
        return " ".join(parts)


def full_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * (size or shape[-1] ** -0.5)

    return {
        "stem.weight": normal(WIDTH, INPUTS),
        "stem.bias": normal(WIDTH, size=0.1),
        "norm.weight": 1 + normal(WIDTH, size=0.1),
        "norm.bias": normal(WIDTH, size=0.1),
        "up.weight": normal(HIDDEN, WIDTH),
        "up.bias": normal(HIDDEN, size=0.1),
        "down.weight": normal(WIDTH, HIDDEN),
        "down.bias": normal(WIDTH, size=0.1),
        "head.weight": normal(CLASSES, WIDTH),
        "head.bias": normal(CLASSES, size=0.1),
    }


def full_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(ROWS, INPUTS, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


class SumBothWays(torch.autograd.Function):
    """An all-reduce in forward and, wrongly, in backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, registry: ProcessGroupRegistry) -> Tensor:
        ctx.registry = registry
        return _summed(x, registry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _summed(grad, ctx.registry), None


def _summed(x: Tensor, registry: ProcessGroupRegistry) -> Tensor:
    found = x.clone()
    if registry.size("tensor") > 1:
        dist.all_reduce(found, group=registry.group("tensor"))
    return found


class Net(nn.Module):
    """This rank's part of the model. ``mistakes`` are names of mistakes in the forward pass; see `body`."""

    def __init__(
        self, full: Mapping[str, Tensor], registry: ProcessGroupRegistry, mistakes: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.registry, self.mistakes = registry, {*mistakes}
        axes = registry.topology.axes
        self.tensor = "tensor" in axes
        self.pipe = registry.coordinate["pipe"] if "pipe" in axes else None
        for name, weight in full.items():
            module, kind = name.split(".")
            if self.pipe is not None and (module == "head") != (self.pipe == 1):
                continue
            spec = SPECS.get(name, P()) if self.tensor else P()
            if not hasattr(self, module):
                setattr(self, module, nn.Module())
            getattr(self, module).register_parameter(kind, nn.Parameter(shard(weight, spec, registry)))

    def linear(self, module: str, x: Tensor, bias: bool = True) -> Tensor:
        own: Any = getattr(self, module)
        return F.linear(x, own.weight, own.bias if bias else None)

    def body(self, x: Tensor) -> Tensor:
        """Return the input of the head."""
        wrong = self.mistakes
        x = self.linear("stem", x)
        norm: Any = self.norm
        y = F.layer_norm(x, (WIDTH,), norm.weight, norm.bias)
        if self.tensor and "no copy_to" not in wrong:
            y = copy_to(y, self.registry, "tensor")
            if "copy_to twice" in wrong:
                y = copy_to(y, self.registry, "tensor")
        z = self.linear("down", torch.tanh(self.linear("up", y)), bias="bias on every rank" in wrong)
        if self.tensor and "sum in backward" in wrong:
            z = SumBothWays.apply(z, self.registry)
        elif self.tensor and "no reduce_from" not in wrong:
            z = reduce_from(z, self.registry, "tensor")
        if "bias on every rank" not in wrong:
            z = z + self.down.bias  # type: ignore[operator, union-attr]
        return x.detach() + z if "detached residual" in wrong else x + z

    def forward(self, x: Tensor, classes: Tensor | None = None) -> Tensor:
        """Return the loss; if ``classes`` is None, return the head's input.

        On the second stage, ``x`` is the head's input already.
        """
        if classes is None:
            return self.body(x)
        return self.head_loss(x if self.pipe == 1 else self.body(x), classes)

    def head_loss(self, hidden: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples."""
        logits = self.linear("head", hidden)
        return F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, classes)


class Training:
    """A training run on one rank, like a user's script. A `Script` plants a mistake by changing its attributes."""

    def __init__(self, layout: Layout, registry: ProcessGroupRegistry, path: Path) -> None:
        self.layout, self.registry, self.path = layout, registry, path
        self.rank, self.axes = registry.global_rank, registry.topology.axes
        self.dtype = torch.float64 if layout.mode == "fp64" else torch.float32
        self.mode: Any = "fp32" if layout.mode == "fp64" else layout.mode
        self.full = full_weights()
        self.forward_mistakes: list[str] = []
        self.specs: dict[str, P] = dict(SPECS) if "tensor" in self.axes else {"*": P()}
        self.options: dict[str, Any] = {"max_norm": 1.0}
        self.lr, self.weight_decay = LR, 0.1
        self.no_decay: tuple[str, ...] = ("norm.*", "*.bias")
        self.seed: int | None = None
        self.loss_factor = 1.0
        self.batch = self.right_batch
        self.records_batch = True
        self.after_build: Callable[[Net], None] = lambda model: None
        self.before_step: Callable[[ParallelOptimizer[Any], Net, int], None] = lambda optimizer, model, step: None
        self.after_step: Callable[[ParallelOptimizer[Any], Net, int], None] = lambda optimizer, model, step: None
        self.left_out: tuple[str, ...] = ()
        self.make_optimizer: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[layout.optimizer]
        self.steps, self.every = STEPS, 1

    def right_batch(self, step: int) -> tuple[Tensor, Tensor]:
        spec = P("data") if "data" in self.axes else P()
        x, classes = (shard(full, spec, self.registry) for full in full_batch(step))
        return x, classes

    def groups(self, model: Net) -> list[dict[str, Any]]:
        """Return the param groups: with and without weight decay; one group for Adagrad, and for Muon."""
        from fnmatch import fnmatchcase

        named = [(name, param) for name, param in model.named_parameters() if name not in self.left_out]
        plain = [pair for pair in named if any(fnmatchcase(pair[0], glob) for glob in self.no_decay)]
        decayed = [pair for pair in named if all(pair[0] != name for name, _ in plain)]
        if self.layout.optimizer == "adagrad":
            return [{"params": [*decayed, *plain]}]
        if self.layout.optimizer == "muon":
            return [{"params": decayed, "weight_decay": self.weight_decay}]
        made = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return [group for group in made if group["params"]]

    def run(self) -> None:
        model = Net(self.full, self.registry, self.forward_mistakes).to(self.dtype)
        self.after_build(model)
        declare(model, {glob: spec for glob, spec in self.specs.items() if glob == "*" or self.has(model, glob)})
        precision_of(self.mode).prepare(model, self.registry)
        options = {**STATES[self.layout.states], "precision": self.mode, **self.options}
        if self.layout.micros > 1:
            options.setdefault("accumulation_steps", self.layout.micros)
        if self.layout.optimizer == "muon":
            options["on_missing_params"] = "warn"
        made = self.make_optimizer(self.groups(model), lr=self.lr)
        optimizer = ParallelOptimizer(made, self.registry, **options)
        with Recorder(optimizer, self.path, every=self.every, seed=self.seed) as recorder:
            for step in range(self.steps):
                optimizer.zero_grad()
                x, classes = self.batch(step)
                for own_x, own_classes in zip(
                    x.chunk(self.layout.micros), classes.chunk(self.layout.micros), strict=True
                ):
                    if self.records_batch:
                        recorder.batch(own_x, own_classes)
                    self.backward(optimizer, model, own_x, own_classes)
                self.before_step(optimizer, model, step)
                optimizer.step()
                self.after_step(optimizer, model, step)

    @staticmethod
    def has(model: Net, name: str) -> bool:
        return any(name == own for own, _ in model.named_parameters())

    def backward(self, optimizer: ParallelOptimizer[Any], model: Net, x: Tensor, classes: Tensor) -> None:
        """Run forward and backward of one micro-batch, on this rank's stage."""
        x = x.to(next(model.parameters()).dtype)
        if model.pipe is None:
            optimizer.backward(model(x, classes) * self.loss_factor)
            return
        peer = self.registry.topology.rank(**{**self.registry.coordinate, "pipe": 1 - model.pipe})
        if model.pipe == 0:
            hidden = model(x)
            dist.send(hidden.detach(), peer)
            grad = torch.empty_like(hidden)
            dist.recv(grad, peer)
            optimizer.backward((hidden * grad).sum())
        else:
            received = torch.empty(len(x), WIDTH, dtype=x.dtype)
            dist.recv(received, peer)
            optimizer.backward(model(received.requires_grad_(), classes) * self.loss_factor)
            assert received.grad is not None
            dist.send(received.grad, peer)


Script = Callable[[Training], None]


def right(training: Training) -> None:
    """Train without a mistake."""


def clipped_at_half(training: Training) -> None:
    """Train without a mistake, with ``max_norm`` 0.5 instead of the 1.0 of `right`."""
    training.options["max_norm"] = 0.5


def recorded(layout: Layout, script: Script = right) -> str | None:
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessGroupRegistry(layout.topology) as registry,
        small_buckets(256),
    ):
        path = Path(folder, "run.jsonl")
        training = Training(layout, registry, path)
        script(training)
        training.run()
        return path.read_text() if registry.global_rank == 0 else None


# Planted mistakes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A wrong training, and what `compare_runs` must find.

    Args:
        script: Changes the training.
        layouts: The layouts of the wrong training.
        axis: The axis that must be reported, or None.
        parameters: The parameters of which one must be named. Empty: any; None: no parameter.
        against: The layouts of the right training.
        step: The step of the first difference.
        right: Changes the right training. Default: without a mistake.
    """

    script: Script
    layouts: tuple[Layout, ...]
    cause: str
    axis: str | None = None
    parameters: frozenset[str] | None = frozenset()
    against: tuple[Layout, ...] = field(default=(Layout(),))
    step: int = 1
    right: Script = right


PLANTED: dict[str, Planted] = {}


def planted(
    axes: str,
    cause: str,
    axis: str | None = None,
    parameters: Sequence[str] | None = (),
    *,
    against: str = "",
    step: int = 1,
    also_right: bool = False,
    right_script: Script = right,
    **layout: Any,
) -> Callable[[Script], Script]:
    """Add a mistake to `PLANTED`. ``axes`` and ``against`` separate several layouts by semicolons.

    With ``also_right``, the script is right in the layouts ``against``, and makes the right training too.
    """

    def add(script: Script) -> Script:
        layouts = tuple(Layout(text.strip(), **layout) for text in axes.split(";"))
        alone = {key: value for key, value in layout.items() if key != "micros" and key != "states"}
        others = tuple(Layout(text.strip(), **alone) for text in against.split(";"))
        names = None if parameters is None else frozenset(parameters)
        PLANTED[script.__name__] = Planted(
            script, layouts, cause, axis, names, others, step, script if also_right else right_script
        )
        return script

    return add


UPSTREAM = ("stem.weight", "stem.bias", "norm.weight", "norm.bias")
NORM = ("norm.weight", "norm.bias")


@planted("data=2;data=4;data=2,tensor=2", "not averaged", "data", against=";tensor=2")
def no_average(training: Training) -> None:
    """Gradients are not averaged over data ranks (verl #7493, VeOmni #1059)."""
    training.options |= {"average_data": False, "check_replicas": False}


@planted("data=2;data=4;data=2,tensor=2", "averaged twice", "data", against=";tensor=2")
def averaged_twice(training: Training) -> None:
    """The loss is divided by the number of data ranks, and the gradient is averaged too (verl #5625)."""
    training.loss_factor = 1 / training.registry.size("data")


@planted("data=2;data=3;data=2,tensor=2", "counted several times", "data", against=";tensor=2")
def summed_over_data(training: Training) -> None:
    """The loss is multiplied by the number of data ranks (torchtitan #2318)."""
    training.loss_factor = training.registry.size("data")


@planted("tensor=2;tensor=4;data=2,tensor=2", "missing sum", "tensor", NORM, against=";data=2")
def norm_gradient_not_summed(training: Training) -> None:
    """Gradients of the layer norm before a column-parallel layer are not summed (Megatron #1446, NeMo-RL #3716)."""
    training.forward_mistakes = ["no copy_to"]
    training.options["check_replicas"] = False


@planted("tensor=2;tensor=4;data=2,tensor=2", "counted several times", "tensor", NORM, against=";data=2")
def norm_gradient_summed_twice(training: Training) -> None:
    """The input gradient of a column-parallel layer is summed twice in backward (NeMo-RL #3788)."""
    training.forward_mistakes = ["copy_to twice"]


@planted("tensor=2;data=2,tensor=2", "counted several times", "tensor", ("up.weight", "up.bias", "down.weight"))
def all_reduce_in_backward(training: Training) -> None:
    """The all-reduce of a row-parallel layer also sums in backward (pytorch #160285)."""
    training.forward_mistakes = ["sum in backward"]


@planted("tensor=2;tensor=4", "missing sum", "tensor")
def no_all_reduce_in_forward(training: Training) -> None:
    """A row-parallel layer does not sum its output (transformers #48205)."""
    training.forward_mistakes = ["no reduce_from"]
    training.options["check_replicas"] = False


@planted("tensor=2;data=2,tensor=2", "forward")
def bias_on_every_rank(training: Training) -> None:
    """The bias of a row-parallel layer is added on each rank, before the sum (a training of Megatron-style layers)."""
    training.forward_mistakes = ["bias on every rank"]


@planted("data=2;tensor=2;", "seed")
def another_seed(training: Training) -> None:
    """All weights were drawn with the seed 1 instead of 0."""
    training.full = full_weights(1)


@planted("tensor=2;data=2,tensor=2", "seed", "tensor", SHARDED)
def shards_drawn_separately(training: Training) -> None:
    """Each rank draws its shards from a generator of its own (peft #3044)."""

    def draw(model: Net) -> None:
        generator = torch.Generator().manual_seed(50 + training.registry.coordinate["tensor"])
        for name, param in model.named_parameters():
            if name in SHARDED:
                size = full_weights()[name].std()
                param.data.copy_(torch.randn(param.shape, generator=generator) * size)

    training.after_build = draw


@planted("tensor=2;tensor=4;data=2,tensor=2", "initial scale", "tensor", ("down.weight",))
def scale_of_a_shard(training: Training) -> None:
    """The standard deviation of a row-parallel weight is computed from the fan-in of the shard."""
    size = training.registry.size("tensor") ** 0.5

    def draw(model: Net) -> None:
        model.get_parameter("down.weight").data.copy_(
            shard(full_weights(3)["down.weight"] * size, SPECS["down.weight"], training.registry)
        )

    training.after_build = draw


@planted("data=2;tensor=2;data=2,tensor=2", "batch")
def another_batch(training: Training) -> None:
    """The data comes in another order (resume without the loader's state)."""
    inner = training.batch
    training.batch = lambda step: inner(step + 1)


@planted("data=2;data=3", "batch")
def no_distributed_sampler(training: Training) -> None:
    """All data ranks read the samples of the first one."""
    first = ROWS // training.registry.size("data")
    training.batch = lambda step: tuple(full[:first] for full in full_batch(step))  # type: ignore[assignment, return-value]


@planted("data=2;data=3", "learning rate", "data")
def learning_rate_of_data_size(training: Training) -> None:
    """The learning rate is scaled by the number of data ranks (linear scaling)."""
    training.lr *= training.registry.size("data")


@planted("data=2;data=3", "learning rate", step=2)
def schedule_stepped_by_every_rank(training: Training) -> None:
    """The schedule advances once per data rank (accelerate's default)."""

    def decay(optimizer: ParallelOptimizer[Any], model: Net, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LR * 0.5 ** ((step + 1) * training.registry.size("data") / 10)

    training.after_step = decay


@planted("data=2;tensor=2;data=2,tensor=2", "clip threshold", parameters=None)
def another_threshold(training: Training) -> None:
    """The clip threshold is 0.25 instead of 1.0."""
    training.options["max_norm"] = 0.25


@planted("data=2;tensor=2;", "weight decay", parameters=[*NORM, "stem.bias", "up.bias", "down.bias", "head.bias"])
def weight_decay_on_biases(training: Training) -> None:
    """Weight decay is applied to norms and biases too, as if the patterns of the param groups matched no name."""
    training.no_decay = ()


@planted("data=2;tensor=2", "not in the optimizer", parameters=["head.bias"])
def parameter_left_out(training: Training) -> None:
    """The optimizer lacks a parameter (DeepSpeed #8354)."""
    training.left_out = ("head.bias",)
    training.options["on_missing_params"] = "warn"


@planted("data=2;tensor=2", "no gradient", parameters=["down.bias"])
def replaced_parameter(training: Training) -> None:
    """The model computes with a copy of the parameter that the optimizer holds (DeepSpeed #8354)."""

    def replace(model: Net) -> None:
        own: Any = model.down
        bias = own.bias
        del own.bias
        own.register_parameter("bias", nn.Parameter(bias.detach().clone()))
        frozen = own.bias.detach().clone()
        body = model.body
        model.body = lambda x: body(x) - own.bias + frozen  # type: ignore[method-assign]

    training.after_build = replace
    training.options["check_replicas"] = False


@planted("tensor=2;tensor=4;data=2,tensor=2", "order", "tensor", ("up.weight",))
def shards_in_another_order(training: Training) -> None:
    """The shards of a weight were loaded in reverse order of the ranks (mcore-bridge #173)."""

    def reverse(model: Net) -> None:
        full = torch.cat(full_weights()["up.weight"].chunk(training.registry.size("tensor"))[::-1])
        model.get_parameter("up.weight").data.copy_(shard(full, P("tensor"), training.registry))

    training.after_build = reverse


@planted("tensor=2;data=2,tensor=2", "layout", "tensor", NORM)
def replica_declared_sharded(training: Training) -> None:
    """A replicated norm weight is declared sharded (TransformerEngine-ROCm #715)."""
    training.specs = {"norm.weight": P("tensor"), **training.specs}
    training.options["check_replicas"] = False


@planted("data=2;tensor=2;", "micro-batches", micros=3)
def micro_batches_summed(training: Training) -> None:
    """The losses of micro-batches are summed, not averaged (DeepSpeed #7837)."""
    training.loss_factor = training.layout.micros


@planted("data=2;tensor=2;", "loss scale", mode="fp16")
def loss_scale_not_removed(training: Training) -> None:
    """The gradient is multiplied by the loss scale once more (DeepSpeed #7837: 65536 times)."""

    def scale(optimizer: ParallelOptimizer[Any], model: Net, step: int) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(float(optimizer.loss_scale.scale))  # type: ignore[union-attr]

    training.options |= {"check_replicas": False}
    training.before_step = scale


@planted("tensor=2;data=2,tensor=2", "clipped before", "tensor")
def clipped_on_each_rank(training: Training) -> None:
    """torch's clip_grad_norm_ on shards, before step: each rank has another norm (hyper-parallel #279)."""

    def clip(optimizer: ParallelOptimizer[Any], model: Net, step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    training.options["check_replicas"] = False
    training.before_step = clip


@planted("tensor=2;tensor=4", "update of shards", "tensor", SHARDED, also_right=True)
def norm_of_shards_in_the_optimizer(training: Training) -> None:
    """An optimizer that normalises by the norm of the tensor is applied to shards (DeepSpeed #8437)."""
    training.make_optimizer = Normalised


@planted("tensor=2;data=2,tensor=2", "counted several times", "tensor", SHARDED)
def sharded_gradients_multiplied(training: Training) -> None:
    """Gradients of sharded parameters, such as experts, are multiplied by the size of the axis (pytorch #160285)."""

    def multiply(model: Net) -> None:
        for name, param in model.named_parameters():
            if name in SHARDED:
                param.register_hook(lambda grad: grad * training.registry.size("tensor"))

    training.after_build = multiply


@planted("data=2;data=2,tensor=2", "forward")
def mean_of_means(training: Training) -> None:
    """Data ranks have different numbers of samples, and their mean gradients are averaged without weights (verl #5625)."""

    def uneven(step: int) -> tuple[Tensor, Tensor]:
        x, classes = full_batch(step)
        rows = slice(0, 9) if training.registry.coordinate["data"] == 0 else slice(9, ROWS)
        return x[rows], classes[rows]

    training.batch = uneven


@planted(";data=2", "partial sum", None, ("stem.weight", "stem.bias"))
def detached_branch(training: Training) -> None:
    """One of two paths is detached, so gradients lack a term (transformers #48205: the router)."""
    training.forward_mistakes = ["detached residual"]


class OtherNorm(ByNorm):
    """Clips by a norm that is larger by a factor."""

    factor = 1.0

    def decide(self, norms: Any, state: Any) -> Any:
        return super().decide(norms._replace(total=norms.total * OtherNorm.factor), state)


@planted("tensor=2;tensor=4", "clip norm", "tensor", None, right_script=clipped_at_half)
def replicas_counted_in_the_norm(training: Training) -> None:
    """The norm by which gradients are clipped counts a gradient that is replicated over ``tensor`` once per rank
    (Megatron's group None, VeOmni #862)."""

    def measure(optimizer: ParallelOptimizer[Any], model: Net, step: int) -> None:
        size = training.registry.size("tensor")
        sums = torch.zeros(2, dtype=torch.float64)
        for name, param in model.named_parameters():
            assert param.grad is not None
            sums[int(name in SHARDED)] += param.grad.double().square().sum()
        dist.all_reduce(sums, group=training.registry.group("tensor"))
        OtherNorm.factor = float((sums.sum() / (sums[0] / size + sums[1])).sqrt())

    training.options["max_norm"] = OtherNorm(0.5)
    training.before_step = measure


@planted("data=2;", "optimizer state", step=3)
def state_lost(training: Training) -> None:
    """The optimizer state is not loaded after a restart."""

    def lose(optimizer: ParallelOptimizer[Any], model: Net, step: int) -> None:
        if step == 1:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()

    training.after_step = lose


@planted("data=2;tensor=2", "hyper-parameter")
def other_betas(training: Training) -> None:
    """The second beta of AdamW is 0.95 instead of 0.999."""
    training.make_optimizer = partial(torch.optim.AdamW, fused=True, betas=(0.9, 0.95))


@planted("data=2;tensor=2", "not stepped", parameters=["head.weight"])
def weights_restored(training: Training) -> None:
    """The optimizer drops the update of one weight, as with a learning rate of 0 that the recorder does not see."""
    training.make_optimizer = Dropping


@planted("data=2;tensor=2;", "loss scale", step=3, mode="fp16")
def loss_scale_updated_too_early(training: Training) -> None:
    """On a growth step, the gradient is divided by the new loss scale (DeepSpeed, ColossalAI)."""
    from meshstep.amp import TorchFp16

    def halve(optimizer: ParallelOptimizer[Any], model: Net, step: int) -> None:
        if step == 2:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)

    training.mode = TorchFp16(growth_interval=3)
    training.before_step = halve


@planted("data=2;data=2,tensor=2", "written weights", step=3)
def weights_averaged_at_a_wrong_time(training: Training) -> None:
    """Other code writes weights between two steps (DeepSpeed #7131: stale weights)."""

    def write(optimizer: ParallelOptimizer[Any], model: Net, step: int) -> None:
        if step == 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)

    training.after_step = write


class Normalised(torch.optim.Optimizer):
    """Steps by the gradient divided by its norm, tensor by tensor; it wrongly says that it is elementwise."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * param.grad / param.grad.norm()


class Dropping(torch.optim.AdamW):
    """AdamW that keeps the weights of the head, which it finds by their shape."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        heads = [param for group in self.param_groups for param in group["params"] if param.shape == (CLASSES, WIDTH)]
        before = [param.clone() for param in heads]
        super().step()
        for param, value in zip(heads, before, strict=True):
            param.copy_(value)
