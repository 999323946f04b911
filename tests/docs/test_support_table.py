"""The tables in SUPPORT.md are correct. Each combination is run in every precision mode (three modes in `SOME`), and each
fused optimizer on a CPU and on fake CUDA tensors.

The first table lists the modes that work for each layout and form of data parallelism. These must reach the result of one
process in the same mode, within rounding. The other modes that are run must raise an error that says what to do instead.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from meshstep import P, ParallelOptimizer, ProcessGroupRegistry, Topology, declare
from meshstep.optim.step import torch_engine
from probes import HostReadError, no_host_reads
from set_gradients import setting_gradients
from support_cells import FORMS, LAYOUTS, MAX_NORM, MODES, SOME, Run, differences, run_cells, topology_of
from torch import nn
from world import World

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "SUPPORT.md").read_text()
REFUSALS = {  # text of the cell -> error
    "—": r"needs a data axis, and Topology\(.*\) has none; give data_parallel=None",
    "[^1]": r"needs float32 gradients, which DistributedDataParallel does not make: leave data_parallel out",
}


def section() -> str:
    return PAGE.partition("\n## ")[0]


def table() -> dict[tuple[str, str], str]:
    """Return (layout, form) -> text of the cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section().splitlines() if line[:1] == "|"]
    layouts = [cell.removesuffix(" [^2]").strip("`") for cell in rows[0][1:]]
    return {
        (layout, row[0].strip("`").replace("`, `Offloaded(0.5)", ", offload")): cell
        for row in rows[2:]
        for layout, cell in zip(layouts, row[1:], strict=True)
    }


TABLE = table()
CELLS: list[tuple[str, str]] = sorted(TABLE, key=lambda cell: topology_of(cell[0]).world_size)


def modes_of(cell: str) -> set[str]:
    """Return the modes that a cell lists as working."""
    if cell == "no masters [^1]":
        return {mode for mode, precision in MODES.items() if not precision.masters}
    words = cell.removesuffix("[^1]").replace("—", "").replace(",", " ").split()
    return set(MODES) if words == ["all"] else set(words)


@cache
def one_process() -> dict[str, Run]:
    return run_cells("one process", ["None"])["None"]


@cache
def on_ranks(world: World, layout: str, kind: str) -> list[dict[str, dict[str, Run]]]:
    """Return the runs of each rank for one kind of data parallelism, with and without offload."""
    forms = [form for form in FORMS if kind_of(form) == kind]
    size = topology_of(layout).world_size
    return [run_cells(layout, forms)] if size == 1 else world.run(size, run_cells, layout, forms)


def kind_of(form: str) -> str:
    return form.partition(",")[0]


def test_support_table_has_a_cell_for_every_layout_and_data_parallel_option() -> None:
    assert list(TABLE) == [(layout, form) for form in FORMS for layout in LAYOUTS]
    listed = re.findall(r"`([^`]+)`", section().partition("|")[0])
    assert [mode for mode in listed if mode in MODES] == list(MODES), "the text above the table must name all modes"
    assert all((cell == "all") <= (layout not in SOME) for (layout, _), cell in TABLE.items())


@pytest.mark.parametrize(("layout", "form"), CELLS, ids=lambda word: word)
def test_precision_modes_match_one_process_or_raise_as_support_table_shows(
    world: World, layout: str, form: str
) -> None:
    cell, ranks = TABLE[layout, form], [runs[form] for runs in on_ranks(world, layout, kind_of(form))]
    assert {mode for mode, run in ranks[0].items() if not run.refusal} == modes_of(cell)
    for runs in ranks:
        for mode, run in runs.items():
            if mode in modes_of(cell):
                assert not run.refusal
                assert differences(run, one_process()[mode], mode) == [], mode
            else:
                assert re.search(REFUSALS[cell.split()[-1]], run.refusal), run.refusal


@pytest.mark.parametrize("mode", MODES)
def test_comparison_detects_planted_wrong_norms_and_weights_in_every_mode(mode: str) -> None:
    """The planted norms are 2% too large, as if a bias counted twice; the planted weights are 20% too large."""
    reference = one_process()[mode]
    assert min(reference.norms) > 1.5 * MAX_NORM, "every step should clip"
    off = Run([1.02 * norm for norm in reference.norms], {name: 1.2 * w for name, w in reference.weights.items()}, "")
    assert len(differences(off, reference, mode)) == len(off.norms) + len(off.weights)
    nan = Run([torch.nan] * 3, {name: torch.nan * weight for name, weight in reference.weights.items()}, "")
    assert len(differences(nan, reference, mode)) == len(off.norms) + len(off.weights)


# Fused optimizers of torch ---------------------------------------------------------------------------------------------

FUSED = PAGE.partition("\n## Fused optimizers of torch\n")[2].partition("\n## ")[0]
FUSED_CELLS = [
    (name, version, params, device, cell)
    for names, version, params, *cells in (
        [cell.strip() for cell in line.strip("|").split("|")] for line in FUSED.splitlines() if line[:1] == "|"
    )
    if version not in ("torch", "---")
    for name in names.removesuffix(" [^3]").split(", ")
    for device, cell in zip(("cpu", "cuda"), cells, strict=True)
]
CANNOT_STEP = "Adagrad with fused=True has parameters on a GPU, where torch"
needs_cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="fake CUDA needs a torch with CUDA")


def make_fused(name: str, version: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the fused optimizer as a torch of ``version`` ("2.11", "newer" ...) makes it."""
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=0.1, fused=True)
    if name == "Adagrad" and version == "2.11":
        vars(optimizer).pop("_step_supports_amp_scaling", None)
    elif not hasattr(optimizer, "_step_supports_amp_scaling"):
        pytest.skip("this torch has no fused Adagrad for a GPU")
    return optimizer


def read_place(name: str, version: str, dtype: torch.dtype, device: str) -> str:
    """Return where a step reads the skip flag: "device" or "host"; "error" if the constructor raises."""
    wrong_kernels = mock.patch.object(torch_engine, "_fused_sgd_is_wrong", return_value=version == "2.11 to 2.13")
    on_gpu = device == "cuda"
    with wrong_kernels, fake_cuda(collectives_on=CUDA) if on_gpu else nullcontext(no_host_reads) as logging:
        model = nn.ParameterList([nn.Parameter(torch.ones(4, 3, dtype=dtype, device=device))])
        declare(model, {"*": P()})
        torch_optimizer = make_fused(name, version, list(model))
        try:
            optimizer = ParallelOptimizer(torch_optimizer, ProcessGroupRegistry(Topology()), max_norm=1.0)
        except ValueError as error:
            return "error" if CANNOT_STEP in str(error) else str(error)
        for _ in range(2):
            with setting_gradients(optimizer):
                for param in model:
                    param.grad = torch.ones_like(param)
            try:
                with logging() as log:
                    optimizer.step()
            except HostReadError:
                return "host"
        return "host" if log and log.waits else "device"


@needs_cuda_build
@pytest.mark.parametrize(("name", "version", "params", "device", "cell"), FUSED_CELLS)
def test_fused_optimizers_read_the_skip_flag_where_support_table_shows(
    name: str, version: str, params: str, device: str, cell: str
) -> None:
    dtypes = {"all": [torch.float32, torch.bfloat16]}.get(params) or [
        getattr(torch, dtype) for dtype in params.split(", ")
    ]
    assert {read_place(name, version, dtype, device) for dtype in dtypes} == {cell}
