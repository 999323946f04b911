"""The common command line of all examples: shared flags, and errors in one line.

    main(read_options, Trainer, run)

joins the processes, reads the options, makes the Trainer on the requested topology, and runs it. Before the run, wrong
options or layouts raise ValueError: the program ends, and one rank prints the message.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch.distributed as dist
from meshstep.amp import ApexFp16, Precision, precision_of
from meshstep.optim import DataParallel
from meshstep.parallel import Launch, ProcessGroupRegistry, Topology, init_distributed

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

PRECISIONS = ("fp32", "fp16", "bf16", "fp16_naive", "O0", "O1", "O2", "O3", "fp8")
WRONG_USE = 2  # the exit code of argparse
# Seconds that ranks other than 0 wait before they raise an error. So rank 0 reports it first, and the launcher ends all.
PATIENCE = 30.0

EXTRA = ("sklearn", "torchvision", "tqdm")  # packages of meshstep[examples]

T = TypeVar("T")


def explain_missing_package(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error, in one line if a package of the extra ``examples`` is not installed."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in EXTRA:
        sys.__excepthook__(kind, error, trace)
        return
    print(
        f"{Path(sys.argv[0]).name}: error: {package} is not installed, which this example needs: "
        "pip install -e '.[examples]'",
        file=sys.stderr,
    )


sys.excepthook = explain_missing_package  # scripts import this module before the packages in EXTRA


# Flags ------------------------------------------------------------------------------------------------------------------

# Model axes of 2-D, 2.5-D and 3-D layers over which the batch is sharded, in addition to the data axes.
SPLIT_THE_BATCH = ("row", "depth", "input", "weight", "output")


class CommandLine(argparse.ArgumentParser):
    """Parser of a script's command line. It has the flag ``--topology``; the script adds its own flags.

    Args:
        doc: First text of ``--help``.
        axes: Meaning of the axes of the script, for the help of ``--topology``.
    """

    def __init__(self, doc: str | None, axes: str) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self.add_argument(
            "--topology",
            type=_topology,
            metavar="AXIS=SIZE,...",
            help="mesh axes, slowest first; the sizes must multiply to the number of processes. "
            f"{axes} (default: data=<number of processes>)",
        )

    def read(self, processes: int, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options, which always have a topology.

        Raises:
            ValueError: A flag is wrong.
            SystemExit: ``--help`` is given.
        """
        options = self.parse_args(arguments)
        if options.topology is None:
            options.topology = Topology(data=processes)
        if options.topology.world_size != processes and dist.is_initialized():
            ProcessGroupRegistry(options.topology)  # raises, so that the world size is checked before other flags
        if "heads" in options and options.width % options.heads:
            raise ValueError(f"--width {options.width} must be a multiple of --heads {options.heads}")
        return options

    def error(self, message: str) -> NoReturn:
        """Raise ValueError, which `main` prints like other errors."""
        raise ValueError(message)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help on rank 0 only."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            super().print_help(file)


def add_steps(parser: argparse._ActionsContainer, steps: int | None) -> None:
    """Add ``--steps``, with the default ``steps``. None: the number of steps of ``--epochs`` epochs."""
    default = "as many as --epochs have" if steps is None else "%(default)s"
    parser.add_argument("--steps", type=_count, default=steps, metavar="N", help=f"training steps (default: {default})")


def add_training_flags(
    parser: CommandLine,
    *,
    batch_size: int,
    lr: float,
    precision: str = "fp32",
    steps: int | None = None,
    epochs: int | None = None,
    accumulate: int = 1,
) -> None:
    """Add the flags of a training script, with these defaults.

    The script trains for ``steps`` steps, or for ``epochs`` passes over the data.
    """
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    add_steps(length, steps)
    if epochs is not None:
        length.add_argument("--epochs", type=_count, default=epochs, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=_count, default=batch_size, help="samples in a full batch (default: %(default)s)")
    add("--lr", type=float, default=lr, help="peak learning rate (default: %(default)s)")
    add("--max-norm", type=float, default=1.0, help="largest gradient norm after clipping (default: %(default)s)")
    add("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    modes = "mixed-precision mode, see meshstep.amp; O0 to O3 are those of apex (default: %(default)s)"
    add("--precision", choices=PRECISIONS, default=precision, help=modes)
    parts = "split each batch into K micro-batches (default: %(default)s)"
    add("--accumulate", type=_count, default=accumulate, metavar="K", help=parts)
    shards = "shard optimizer states over the data axis (1), and gradients as well (2) (default: 0)"
    add("--zero", type=int, choices=(0, 1, 2), default=0, help=shards)
    resume = "save checkpoints in DIR, and continue from the newest one; its --topology and --zero may differ"
    add("--resume", type=Path, metavar="DIR", help=resume)
    add("--save-every", type=_count, default=25, metavar="N", help="steps between checkpoints (default: %(default)s)")
    add("--plot", type=_svg, metavar="FILE.svg", help="draw the curves of loss and gradient norm")
    add("--beside", type=Path, metavar="FILE.csv", help="add the --curve of another run to the plot, in grey")
    add("--curve", type=Path, metavar="FILE.csv", help="write the numbers of the curves")


def add_model_size(parser: argparse.ArgumentParser, *, width: int, depth: int = 2) -> None:
    """Add ``--width``, ``--heads`` and ``--depth`` of a transformer; ``width`` and ``depth`` are the defaults of the
    script.
    """
    add = parser.add_argument
    add("--width", type=_count, default=width, help="features between the layers (default: %(default)s)")
    add("--heads", type=_count, default=4, help="heads of each attention layer (default: %(default)s)")
    add("--depth", type=_count, default=depth, help="number of transformer blocks (default: %(default)s)")


def check_training(options: argparse.Namespace, batch_axes: tuple[str, ...] | None = None) -> None:
    """Raise ValueError if the flags of `add_training_flags` contradict each other or the topology.

    Args:
        batch_axes: Data axes over which the batch is sharded. None: all data axes.
    """
    topology: Topology = options.topology
    batch_axes = topology.data_axes if batch_axes is None else batch_axes
    if options.zero and not topology.data_axes:
        raise ValueError(
            f"--zero shards over the data axes, and {topology!r} has none; add data=1 or more to --topology"
        )
    rows = [axis for axis in topology.axes if axis in SPLIT_THE_BATCH]
    parts = options.accumulate * topology.size(*batch_axes, *rows)
    if options.batch_size % parts:
        over = " x ".join(["--accumulate", *batch_axes, *rows])
        raise ValueError(f"--batch-size {options.batch_size} must be a multiple of {parts}, the product {over}")


def add_micro_batches(parser: CommandLine) -> None:
    """Add ``--micro-batches``, which `take_micro_batches` checks."""
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="split the batch of all data ranks into N micro-batches, sum their gradients in an order that does not "
        "depend on the number of data ranks, and print a hash of the state",
    )


def take_micro_batches(options: argparse.Namespace) -> None:
    """Set ``accumulate``, the number of micro-batches per data rank, from ``--micro-batches`` if it is given.

    Raises:
        ValueError: ``--micro-batches`` does not fit the other flags.
    """
    total, topology = options.micro_batches, options.topology
    if total is None:
        return
    ranks = topology.size(*topology.data_axes)
    if options.accumulate != 1:
        raise ValueError("--micro-batches does not support --accumulate: leave out --accumulate")
    if total < 1 or total % ranks or options.batch_size % total:
        raise ValueError(
            f"--micro-batches {total} must be a positive multiple of {ranks}, the number of data ranks, and must divide "
            f"--batch-size {options.batch_size}"
        )
    options.accumulate = total // ranks


def with_axes(topology: Topology, *axes: str) -> Topology:
    """Return the topology with these axes, for layers that need them. Missing axes are added with size 1."""
    sizes = {axis: topology.size(axis) for axis in topology.axes}
    missing = {axis: 1 for axis in axes if axis not in sizes}
    return Topology(roles=None, aliases=topology.aliases, **sizes, **missing)


def precision_asked(options: argparse.Namespace) -> Precision:
    """Return the precision mode of ``--precision``."""
    mode = options.precision
    return ApexFp16(opt_level=mode) if mode.startswith("O") else precision_of(mode)


def data_parallel_asked(options: argparse.Namespace) -> DataParallel | None:
    """Return the ``data_parallel`` argument of `Booster` for ``--zero``."""
    stages: dict[int, DataParallel | None] = {0: None, 1: "zero1", 2: "zero2"}
    return stages[options.zero]


def _topology(text: str) -> Topology:
    try:
        return Topology.parse(text)
    except ValueError as error:  # argparse would omit the message of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number >= 1")
    return int(text)


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg")
    return Path(text)


# Running a script -------------------------------------------------------------------------------------------------------


def main(
    read_options: Callable[[int], argparse.Namespace],
    prepare: Callable[[argparse.Namespace, ProcessGroupRegistry], T],
    run: Callable[[T], object],
) -> None:
    """Run a script on all processes of a launcher, or in this process.

    Args:
        read_options: Return the options, given the number of processes.
        prepare: Return the argument of ``run``. Raise ValueError if the options or the topology are wrong.
        run: Run the script. Its errors are printed with their traceback.
    """
    with _joined() as launch:
        with _told_by_one_rank(launch.rank):
            options = read_options(launch.world_size)
            registry = ProcessGroupRegistry(options.topology)
            prepared = prepare(options, registry)
        with registry:
            run(prepared)


@contextmanager
def _joined() -> Iterator[Launch]:
    launch = init_distributed()
    try:
        yield launch
    finally:
        dist.destroy_process_group()


@contextmanager
def _told_by_one_rank(rank: int) -> Iterator[None]:
    """Context manager that ends the program at a ValueError, with its message as the last line of rank 0.

    On other ranks the error is raised after `PATIENCE` seconds.
    """
    try:
        yield
    except ValueError as error:
        if rank != 0:
            # Usually rank 0 has the same error, and the launcher ends this rank while it sleeps.
            time.sleep(PATIENCE)
            raise
        tell(f"{Path(sys.argv[0]).name}: error: {error}")
        raise SystemExit(WRONG_USE) from None


def tell(message: str) -> None:
    """Print a message. Under torchrun, write it to the file that torchrun quotes at the end of its report instead."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        about: dict[str, Any] = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": about}))
    else:
        print(message, file=sys.stderr)
