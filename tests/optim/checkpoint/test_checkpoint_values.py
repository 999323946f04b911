"""Wrong values in checkpoint files with valid checksums, and in state dicts."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import content, sealed, zipped
from layouts import Run
from meshstep.optim import ZClip, load_checkpoint, save_checkpoint
from meshstep.optim.checkpoint import directory as directory_module
from world import World

WRONG: list[Any] = ["x\x1b[31m", math.nan, -1, True, 10**400, None, [], {}, [["y"]], {"a": {"b": 1}}, 2.5, -math.inf]
DELETED = object()
Path_ = tuple[Any, ...]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Replace pytest's folder by one in memory, if the system has it: thousands of small files take long on a disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the paths of all values nested in ``value``, including nested containers."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def with_other(value: Any, path: Path_, other: Any) -> Any:
    """Return a copy of ``value`` with ``other`` at ``path``. If ``other`` is `DELETED`, the item is left out."""
    if not path:
        return other
    key, *rest = path
    if isinstance(value, dict):
        changed = {k: with_other(v, tuple(rest), other) if k is key or k == key else v for k, v in value.items()}
        return {k: v for k, v in changed.items() if v is not DELETED}
    changed_list = [with_other(v, tuple(rest), other) if index == key else v for index, v in enumerate(value)]
    return type(value)(v for v in changed_list if v is not DELETED)


def everything(run: Run) -> Any:
    state = [run.model.state_dict(), run.optimizer.state_dict(), run.schedule.state_dict()]
    return content([*state, torch.get_rng_state(), random.getstate()])


def saved_run(path: Path, precision: str) -> tuple[Run, Path]:
    run = Run((), precision)
    run.optimizer.max_norm = ZClip(warm_up=2)
    for step in range(3):
        run.step(step)
    directory = save_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule, extra={"n": 1})
    return run, directory


def mutations(value: Any, count: int, draw: random.Random) -> Iterator[tuple[Path_, Any]]:
    """Yield pairs of a path and a random wrong value: for each path once, then for ``count`` random paths.

    Paths under the top-level key "extra" are left out.
    """
    paths = [path for path in leaves(value) if "extra" not in path[:1]]
    for path in paths:
        yield path, draw.choice([*WRONG, DELETED])
    for _ in range(count):
        yield draw.choice(paths), draw.choice([*WRONG, DELETED])


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def read_manifest(file: Path) -> Any:
    return read_json(file)["manifest"]


def read_torch(file: Path) -> Any:
    return torch.load(file, weights_only=True)


def write(file: Path, value: Any) -> None:
    if file.suffix == ".pt":
        file.write_bytes(zipped(value))
    elif file.name == "meshstep.json":
        crc32 = directory_module._crc32_of(value)
        file.write_text(json.dumps({"crc32": crc32, "manifest": value}))
    else:
        file.write_text(json.dumps(value))


def error_of(load: Callable[[], object]) -> ValueError | None:
    try:
        load()
    except ValueError as error:
        return error
    return None


READ: dict[str, Callable[[Path], Any]] = {
    "shared.pt": read_torch,
    "rank-0.pt": read_torch,
    "index.json": read_json,
    "meshstep.json": read_manifest,
}


# A clip rule whose state does not fit starts anew, with a warning.
@pytest.mark.filterwarnings("ignore:ZClip keeps", "ignore:the loaded state of ZClip has no values")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", READ)
def test_wrong_value_in_checkpoint_file_is_rejected_or_leaves_usable_state(
    tmp_path: Path, name: str, precision: str
) -> None:
    run, directory = saved_run(tmp_path, precision)
    file, draw = directory / name, random.Random(7)
    original = READ[name](file)
    if name == "rank-0.pt":  # only a few entries: the states of the generators have thousands of similar integers
        original["python"] = (original["python"][0], original["python"][1], None)
        paths = [
            ("python",),
            ("cpu",),
            ("python", 0),
            ("python", 1),
            ("python", 1, 5),
            ("python", 1, 624),
            ("python", 2),
        ]
        paths += [("numpy",), ("numpy", 0), ("numpy", 1, 3), ("numpy", 2)] if "numpy" in original else []
        cases = [(path, other) for path in paths for other in [*WRONG, DELETED]]
    else:
        cases = list(mutations(original, 60, draw))
    manifest = (directory / "meshstep.json").read_bytes()
    run.step(3)
    random_state = torch.get_rng_state(), random.getstate()
    before, refused = everything(run), 0
    for path, other in cases:
        write(file, with_other(copy.deepcopy(original), path, other))
        if name != "meshstep.json":
            sealed(directory, manifest)
        error = error_of(lambda: load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule))
        if error is not None:
            refused += 1
            assert str(error).isprintable(), (path, other)
            assert everything(run) == before, (path, other)
            assert error.__cause__ is None or str(error.__cause__).isprintable()
            continue
        # The loaded run can be stepped, saved and loaded again.
        run.step(4)
        assert math.isfinite(float(run.optimizer.last_stats.total_norm)), (path, other)  # type: ignore[union-attr]
        assert all(param.isfinite().all() for param in run.model.parameters()), (path, other)
        save_checkpoint(tmp_path / "again", run.model, run.optimizer, lr_scheduler=run.schedule)
        load_checkpoint(tmp_path / "again", run.model, run.optimizer, lr_scheduler=run.schedule)
        torch.set_rng_state(random_state[0])
        random.setstate(random_state[1])
        before = everything(run)
    assert refused > len(cases) // 3


COUNTS: list[Any] = ["x", math.nan, -1, True, 2**60, 10**400, None, [1], 1.5]


@pytest.mark.parametrize("value", COUNTS, ids=lambda value: repr(value)[:9])
@pytest.mark.parametrize("name", ["skipped_steps", "vetoed_steps"])
def test_invalid_count_of_skipped_steps_in_checkpoint_or_state_dict_is_rejected(
    tmp_path: Path, name: str, value: Any
) -> None:
    run, directory = saved_run(tmp_path, "fp16")
    shared = read_torch(directory / "shared.pt")
    shared["rest"][name] = value
    write(directory / "shared.pt", shared)
    sealed(directory)
    before = everything(run)
    with pytest.raises(
        ValueError, match=rf"shared\.pt is damaged, or was tampered with: {name} is .*expected an integer from 0"
    ):
        load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule)
    assert everything(run) == before
    state = run.optimizer.state_dict()
    state["meshstep"] = {**state["meshstep"], name: value}
    with pytest.raises(ValueError, match=rf"{name} is .*expected an integer from 0 to"):
        run.optimizer.load_state_dict(state)
    assert everything(run) == before


def planted_on_two_ranks(path: Path) -> str:
    run = Run((("data", 2),), "fp16")
    run.step(0)
    directory = save_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    if run.registry.global_rank == 0:
        shared = read_torch(directory / "shared.pt")
        shared["rest"]["loss_scale"]["scale"] = "x"
        write(directory / "shared.pt", shared)
        sealed(directory)
    torch.distributed.barrier()
    before = everything(run)
    damaged = r"shared\.pt is damaged, or was tampered with: scale='x' is not valid for a loss scale"
    with pytest.raises(ValueError, match=damaged) as error:
        load_checkpoint(path, run.model, run.optimizer, lr_scheduler=run.schedule)
    assert everything(run) == before
    run.registry.close()
    return str(error.value)


def test_wrong_loss_scale_in_checkpoint_raises_on_every_rank(world: World, tmp_path: Path) -> None:
    assert len(world.run(2, planted_on_two_ranks, tmp_path)) == 2


@pytest.mark.filterwarnings("ignore:ZClip keeps")
@pytest.mark.parametrize("key", ["state", "param_groups", "meshstep"])
def test_wrong_value_in_state_dict_loads_or_raises_without_changes(tmp_path: Path, key: str) -> None:
    run, _ = saved_run(tmp_path, "fp16")
    draw, before = random.Random(3), everything(run)
    state = run.optimizer.state_dict()
    state["meshstep"].pop("coordinates")
    refused = 0
    cases = list(mutations({key: state[key]}, 40, draw))
    for path, other in cases:
        planted = with_other(state, path, other)
        try:
            run.optimizer.load_state_dict(copy.deepcopy(planted))
        except ValueError:
            refused += 1
            assert everything(run) == before, (path, other)
        else:
            run.optimizer.load_state_dict(copy.deepcopy(state))
            before = everything(run)
    assert refused > len(cases) // 4


def test_oversized_or_non_regular_manifest_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, directory = saved_run(tmp_path, "fp32")
    manifest = directory / "meshstep.json"
    monkeypatch.setattr(directory_module, "MAX_MANIFEST", 100)
    with pytest.raises(
        ValueError, match=r"meshstep\.json is damaged, or was tampered with: it has \d+ bytes, the limit is 100"
    ):
        load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule)
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(ValueError, match=r"meshstep\.json is damaged, or was tampered with: it is not a regular file"):
        load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule)


def test_overlapping_tensor_parts_in_index_are_rejected(tmp_path: Path) -> None:
    run, directory = saved_run(tmp_path, "fp32")
    index = read_json(directory / "index.json")
    shape, _, places = index["tensors"]["model/up"]
    offsets, sizes, file, start = places[0]
    half = [sizes[0] // 2, sizes[1]]
    places[:] = [[offsets, half, file, start], [offsets, half, file, start + 4 * half[0] * half[1]]]
    assert shape == sizes
    write(directory / "index.json", index)
    sealed(directory)
    with pytest.raises(ValueError, match="the parts of model/up leave gaps or overlap"):
        load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule)


def test_error_for_malicious_pickle_contains_no_escape_codes(tmp_path: Path) -> None:
    run, directory = saved_run(tmp_path, "fp32")

    class Planted:
        def __reduce__(self) -> Any:
            return (Planted, ())

    Planted.__qualname__ = Planted.__name__ = "Planted\x1b[31m"
    globals()["Planted\x1b[31m"] = Planted
    Planted.__module__ = __name__
    (directory / "shared.pt").write_bytes(zipped(Planted()))
    sealed(directory)
    with pytest.raises(ValueError, match=r"shared\.pt is damaged, or was tampered with") as error:
        load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule)
    assert str(error.value).isprintable()
    assert error.value.__cause__ is None


def test_error_for_malicious_parameter_name_contains_no_escape_codes(tmp_path: Path) -> None:
    run, directory = saved_run(tmp_path, "fp32")
    index = read_json(directory / "index.json")
    index["tensors"]["model/\x1b]0;planted\x07"] = index["tensors"].pop("model/up")
    write(directory / "index.json", index)
    sealed(directory)
    with pytest.raises(ValueError, match=r"only in the checkpoint: \\x1b\]0;planted\\x07") as error:
        load_checkpoint(tmp_path, run.model, run.optimizer, lr_scheduler=run.schedule)
    assert str(error.value).isprintable()
