"""User mistakes as tests: a short wrong script, its outcome on every rank, and the correction.

    @mistake("data=2", Right(), write="nothing")
    def zero_grad_after_step(run: Run) -> None:
        \"\"\"`zero_grad()` is called after `step()`, not before `backward()`.\"\"\"
        optimizer = run.optimizer()
        ...

Four outcomes are allowed, and each is checked on real ranks:

* `Right`: no error, no warning, and the weights are those of a dense model in float64.
* `Error`: an exception on every rank, or on the ranks that the outcome names; its text states the correction, and no
  wrong update precedes it (unless it sets ``stepped_before``).
* `Warned`: a warning states the correction; the weights are correct, or as ``then`` says.
* `AsTorch`: torch alone gives the same result for the same mistake; docs/reference/LIMITS.md lists it.

Replicas must be bitwise identical after each of them, unless they differed at the start or wrong steps are expected
before an error.
"""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from meshstep.amp import Precision, precision_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    Topology,
    copy_to,
    declare,
    gather_objects,
    join,
    reduce_from,
    shard,
)
from out_of_step import set_timeout
from torch import Tensor, nn
from world import World

LR, MOMENTUM, MAX_NORM, STEPS, BATCH = 0.1, 0.9, 3.1, 3, 8
SPECS = {"up.weight": P("tensor", None), "up.bias": P("tensor"), "down.weight": P(None, "tensor"), "down.bias": P()}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}
WAIT = 2.0  # seconds that a rank waits for missing peers in scripts that call `Run.wait_briefly`


# The model, dense and on ranks ----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """A model with 6 input features, 8 hidden features and 4 output features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


class SplitMlp(Mlp):
    """`Mlp` with its hidden features sharded over ``tensor``; its parameters are not declared yet."""

    def __init__(self, full: Mapping[str, Tensor], registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry = registry
        for name, spec in SPECS.items():
            linear, kind = name.split(".")
            setattr(getattr(self, linear), kind, nn.Parameter(shard(full[name], spec, registry)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(copy_to(x, self.registry, "tensor")))
        part = nn.functional.linear(hidden, self.down.weight)
        result: Tensor = reduce_from(part, self.registry, "tensor") + self.down.bias
        return result


def full_model(seed: int = 0) -> Mlp:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Mlp().double()


def full_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one step, for all data ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x, 3 * x[:, :4].flip(1)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).to(y.dtype), y)


class Dense:
    """A plain training script in float64 on one process: the reference, and the behaviour of torch alone for a
    mistake."""

    def __init__(self) -> None:
        self.model = full_model()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)

    def backward(self, step: int, factor: float = 1.0, rows: slice = slice(None)) -> None:
        """Add the gradient of ``factor`` times the loss of some rows of a batch."""
        x, y = full_batch(step)
        (factor * mse(self.model, x[rows], y[rows])).backward()

    def step(self, max_norm: float | None = MAX_NORM) -> None:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.sgd.step()

    def train(self, steps: Iterable[int] = range(STEPS)) -> None:
        """Train with the correct loop: clear gradients, backward, step."""
        for step in steps:
            self.sgd.zero_grad()
            self.backward(step)
            self.step()


def train_dense(dense: Dense) -> None:
    dense.train()


class Run:
    """The variables that a user's script has before its training loop, on one rank.

    Attributes:
        rank: The global rank.
        model: Split over ``tensor`` where the topology has this axis, and declared.
        mode: The precision mode's name or object.
        folder: A directory that all ranks share.
    """

    def __init__(self, registry: ProcessGroupRegistry, mode: str | Precision, folder: Path, stack: ExitStack) -> None:
        self.registry, self.mode, self.folder, self.stack = registry, mode, folder, stack
        self.rank = registry.global_rank
        self.dtype = torch.float64 if mode == "fp32" else torch.float32
        self.model = self.make_model()
        declare(self.model, self.specs)
        precision_of(mode).prepare(self.model, registry)
        self.start = weights_of(self.model)

    @property
    def specs(self) -> dict[str, P]:
        """Return the declaration of the model on this topology."""
        return SPECS if "tensor" in self.registry.topology.axes else {"*": P()}

    def make_model(self) -> Mlp:
        """Return the model with the same weights on all replicas, undeclared."""
        full = {name: param.detach() for name, param in full_model().named_parameters()}
        if "tensor" in self.registry.topology.axes:
            return SplitMlp(full, self.registry).to(self.dtype)
        model = Mlp()
        model.load_state_dict(full)
        return model.to(self.dtype)

    def sgd(self, model: nn.Module | None = None) -> torch.optim.SGD:
        named = (model or self.model).named_parameters()
        return torch.optim.SGD(named, lr=LR, momentum=MOMENTUM, fused=True)

    def optimizer(self, sgd: torch.optim.Optimizer | None = None, **options: Any) -> ParallelOptimizer[Any]:
        options = {"max_norm": MAX_NORM, "precision": self.mode, **options}
        return ParallelOptimizer(sgd or self.sgd(), self.registry, **options)

    def batch(self, step: int, of: int = 1, part: int = 0) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a batch; with ``of``, micro-batch ``part`` of ``of`` of these rows."""
        data = P("data") if "data" in self.registry.topology.axes else P()
        x, y = (shard(full, data, self.registry).to(self.dtype) for full in full_batch(step))
        return x.chunk(of)[part], y.chunk(of)[part]

    def batches(self, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(step) for step in range(steps))

    def loss(self, step: int, of: int = 1, part: int = 0) -> Tensor:
        return mse(self.model, *self.batch(step, of, part))

    def train(self, optimizer: ParallelOptimizer[Any], steps: Iterable[int] = range(STEPS)) -> None:
        """Train with the correct loop: clear gradients, backward, step."""
        for step in steps:
            optimizer.zero_grad()
            optimizer.backward(self.loss(step))
            optimizer.step()

    def begin(self) -> None:
        """Use the current weights as the initial weights of the training."""
        self.start = weights_of(self.model)

    def close_later(self, registry: ProcessGroupRegistry) -> ProcessGroupRegistry:
        """Close another registry at the end of the script. Return it."""
        self.stack.enter_context(registry)
        return registry

    def wait_briefly(self) -> None:
        """Make collectives raise an error if peers do not arrive within `WAIT` seconds."""
        for group in {self.registry.group(*self.registry.topology.axes), *self.registry._groups.values()}:
            set_timeout(group, WAIT)


# Outcomes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Right:
    """The weights of every rank equal those of the dense model; ``dense`` is the correct script in one process."""

    dense: Callable[[Dense], None] = train_dense

    is_specific = True

    def seen(self) -> str:
        return "correct weights"


@dataclass(frozen=True)
class AsTorch(Right):
    """The weights equal those of torch alone with the same mistake; ``dense`` is the script with the mistake on one
    process.
    """

    def seen(self) -> str:
        return "no error; the same weights as with torch alone"


@dataclass(frozen=True)
class Error:
    """An exception on every rank, or on ``ranks`` only.

    Args:
        kind: The class of the exception, or a base class.
        shown: A part of the exception's text, such as the correction; ``...`` matches any text.
        ranks: The ranks that raise; None: all. Other ranks reach the end of the script.
        stepped_before: False: each rank's weights equal those after some number of correct steps; True: not checked
            (torch alone would make the same wrong steps).
        dense: The script in one process up to the error, for scripts that write weights themselves: each rank has
            these weights.
        left_out: Steps that every rank skips, and that the correct run leaves out.
    """

    kind: type[BaseException]
    shown: str
    ranks: tuple[int, ...] | None = None
    stepped_before: bool = False
    dense: Callable[[Dense], None] | None = None
    left_out: tuple[int, ...] = ()

    @property
    def is_specific(self) -> bool:
        """Return whether ``shown`` has any words that the error must contain."""
        return len(re.findall(r"[a-z]", self.shown)) > 1

    def seen(self) -> str:
        return f"`` {self.kind.__name__}: {_shown(self.shown)} ``"


@dataclass(frozen=True)
class Warned:
    """A warning or a log line on some rank; the weights are as ``then`` says.

    ``shown`` is a part of the warning's text, with the correction; ``...`` matches any text.
    """

    shown: str
    then: Right | Error = field(default_factory=Right)

    is_specific = True

    def seen(self) -> str:
        after = f"; then {self.then.seen()}" if isinstance(self.then, Error) else ""
        return f"warning: `` {_shown(self.shown)} ``{after}"


Outcome = Right | Error | Warned
Script = Callable[[Run], object]


class Mistake(NamedTuple):
    """One wrong script.

    Args:
        script: The function that runs on each rank; its docstring describes the mistake.
        write: The correction.
        mode: The precision mode; in float64 (``"fp32"``) results are compared to 1e-9.
        waits: Whether a rank waits for peers that never arrive; the worker processes are replaced afterwards.
    """

    script: Script
    topology: str
    outcome: Outcome
    write: str
    mode: str | Precision = "fp32"
    waits: bool = False

    @property
    def name(self) -> str:
        return getattr(self.script, "__name__", "script")

    @property
    def says(self) -> str:
        """Return the description of the mistake."""
        return " ".join((self.script.__doc__ or "").split())


MISTAKES: list[Mistake] = []


def mistake(
    topology: str, outcome: Outcome, *, write: str, mode: str | Precision = "fp32", waits: bool = False
) -> Callable[[Script], Script]:
    def add(script: Script) -> Script:
        assert script.__doc__, "the script needs a docstring that describes the mistake"
        assert outcome.is_specific, f"{outcome}: shown must have at least two lowercase letters"
        MISTAKES.append(Mistake(script, topology, outcome, write, mode, waits))
        return script

    return add


PENDING: dict[str, str] = {}
"""Scripts, by name, with the reason why their expected outcome does not hold yet. Each must fail; remove the entry
when it passes."""


def cases_of(module: str) -> list[Any]:
    """Return the mistakes of one test file, as parameters of a test."""
    found = [one for one in MISTAKES if one.script.__module__ == module]
    return [pytest.param(one, id=one.name, marks=_marks(one.name)) for one in found]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(strict=True, reason=PENDING[name])] if name in PENDING else []


# Running and checking -------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    error: tuple[list[str], str] | None  # the names of the exception's class and base classes, and its text
    said: list[str]
    start: dict[str, Tensor]
    weights: dict[str, Tensor]


def attempt(script: Script, topology: str, mode: str | Precision, folder: str) -> Result:
    registry = ProcessGroupRegistry(Topology.parse(topology), timeout=timedelta(seconds=20), exclusive_groups=True)
    with ExitStack() as stack, listening() as said:
        stack.enter_context(registry)
        run = Run(registry, mode, Path(folder), stack)
        run.begin()
        error = None
        gather_objects(None, registry)
        said.clear()
        try:
            script(run)
        except Exception as caught:
            error = [kind.__name__ for kind in type(caught).__mro__], str(caught)
        return Result(error, list(said), run.start, weights_of(run.model))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone().contiguous() for name, param in model.named_parameters()}


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the texts of Python warnings and of log records at warning level."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        said.append(str(message))

    listener = Listener(logging.WARNING)
    logging.getLogger().addHandler(listener)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield said
    finally:
        logging.getLogger().removeHandler(listener)


def check(one: Mistake, world: World) -> None:
    """Run a mistake on its ranks and raise AssertionError unless its outcome is the expected one."""
    topology = Topology.parse(one.topology)
    with tempfile.TemporaryDirectory() as folder:
        results = world.run(topology.world_size, attempt, one.script, one.topology, one.mode, folder)
    if one.waits:
        world.close()  # a process group in which a rank got no reply is unusable
    outcome, said = one.outcome, [text for result in results for text in result.said]
    if isinstance(outcome, Warned):
        assert any(matches(outcome.shown, text) for text in said), f"no rank warned {outcome.shown!r}, but {said}"
        outcome = outcome.then
    else:
        assert not said, f"unexpected warning: {said[0]}"
    if isinstance(outcome, Error):
        check_error(outcome, results, topology, one.mode)
    else:
        errors = [result.error for result in results if result.error is not None]
        assert not errors, f"{errors[0][0][0]}: {errors[0][1]}"
        dense = Dense()
        outcome.dense(dense)
        check_replicas(results, topology)
        assert_weights(full_weights([result.weights for result in results], topology), dense, one.mode)


def check_error(expected: Error, results: list[Result], topology: Topology, mode: str | Precision) -> None:
    """Raise AssertionError unless the right ranks raised the right error, before any wrong step."""
    for rank, result in enumerate(results):
        if expected.ranks is not None and rank not in expected.ranks:
            assert result.error is None, f"rank {rank}: {result.error}"
            continue
        assert result.error is not None, f"rank {rank} raised nothing"
        kinds, text = result.error
        assert expected.kind.__name__ in kinds, f"rank {rank}: {kinds[0]}: {text}"
        assert matches(expected.shown, text), f"rank {rank}: {kinds[0]}: {text}\n\nis not\n\n{expected.shown}"
    if expected.stepped_before:
        return
    if expected.dense is None and all(same(result.start, result.weights) for result in results):
        return
    check_replicas(results, topology)
    weights, dense = full_weights([result.weights for result in results], topology), Dense()
    if expected.dense is not None:
        expected.dense(dense)
        assert_weights(weights, dense, mode)
        return
    for step in range(30):
        if step in expected.left_out:
            continue
        with suppress(AssertionError):
            assert_weights(weights, dense, mode)
            return
        dense.train([step])
    raise AssertionError("the weights are not those of any number of correct steps")


def check_replicas(results: list[Result], topology: Topology) -> None:
    """Raise AssertionError unless replicas are bitwise identical."""
    for name in results[0].weights:
        spec = SPECS[name].resolve(topology) if "tensor" in topology.axes else P()
        seen: dict[tuple[int, ...], tuple[int, Tensor]] = {}
        for rank, result in enumerate(results):
            place = tuple(topology.coordinate(rank)[axis] for axis in spec.sharded_axes)
            first, weight = seen.setdefault(place, (rank, result.weights[name]))
            assert torch.equal(weight, result.weights[name]), f"{name} differs between ranks {first} and {rank}"


def full_weights(weights: list[dict[str, Tensor]], topology: Topology) -> dict[str, Tensor]:
    specs = SPECS if "tensor" in topology.axes else dict.fromkeys(weights[0], P())
    return {name: join([of_rank[name] for of_rank in weights], specs[name], topology) for name in weights[0]}


def assert_weights(weights: Mapping[str, Tensor], dense: Dense, mode: str | Precision) -> None:
    """Raise AssertionError unless the weights are the dense model's."""
    start = dict(full_model().named_parameters())
    for name, expected in dense.model.named_parameters():
        of_mode = TOLERANCE[torch.float64 if mode == "fp32" else torch.bfloat16]
        tolerance = max(of_mode, TOLERANCE[weights[name].dtype])  # the script may have cast the model to another dtype
        scale = max((expected - start[name]).abs().max().item(), 1e-2)
        error = ((weights[name].double() - expected).abs().max() / scale).item()
        assert error <= tolerance, f"{name} is off by {error:.2e} of the update"


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def matches(shown: str, text: str) -> bool:
    """Return whether ``text`` contains ``shown``, in which ``...`` matches any text."""
    parts = map(re.escape, re.split(r"\s*\.\.\.\s*", shown))
    return re.search(".*".join(parts), text, re.DOTALL) is not None


# The page docs/reference/MISTAKES.md ----------------------------------------------------------------------------------


def section(mistakes: Iterable[Mistake]) -> str:
    """Return the two tables of a section of docs/reference/MISTAKES.md: mistakes, and scripts with correct weights."""
    wrong, correct = [], []
    for one in mistakes:
        says = one.says.replace("|", BAR)
        if type(one.outcome) is Right:
            correct.append(f"| {says} | {one.write} |")
        else:
            wrong.append(f"| {says} | {one.outcome.seen()} | {one.write} |")
    first = ["| mistake | outcome | fix |", "|---|---|---|", *wrong]
    second = ["These scripts end with correct weights:", "", "| script | note |", "|---|---|", *correct]
    return "\n".join([*first, "", *second]) + "\n"


def _shown(text: str) -> str:
    """Return the text of an outcome with an ellipsis on both sides."""
    return re.sub(r"\.{3}( \.{3})+", "...", f"... {text} ...")


BAR = r"\|"
