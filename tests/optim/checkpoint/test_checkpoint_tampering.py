"""Damaged and malicious checkpoint files."""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import content, model_of, optimizer_of, sealed, zipped
from hypothesis import given
from hypothesis import strategies as st
from meshstep.optim import ParallelOptimizer, load_checkpoint, save_checkpoint
from meshstep.optim.checkpoint.directory import BLOCK, CheckedFile, SummingStream, record_of
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World


class Payload:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.mark,))


def as_extra(file: Path, payload: Payload) -> None:
    file.write_bytes(zipped({**torch.load(file, weights_only=True), "extra": payload}))


Plant = Callable[[Path, Payload], Any]
PLANTS: list[tuple[str, Plant]] = [
    *(
        (name, lambda file, payload: file.write_bytes(pickle.dumps(payload)))
        for name in ("meshstep.json", "index.json", "tensors-0.bin", "shared.pt", "rank-0.pt")
    ),
    *(
        (name, lambda file, payload: file.write_bytes(zipped(payload)))
        for name in ("index.json", "tensors-0.bin", "shared.pt", "rank-0.pt")
    ),
    ("shared.pt", as_extra),
]


def started(path: Path) -> tuple[nn.Module, Any, Path]:
    model = model_of()
    optimizer = optimizer_of(model)
    optimizer.backward(torch.stack([param.sum() for param in model.parameters()]).sum())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, save_checkpoint(path, model, optimizer, extra={"step": 1})


def test_malicious_payload_executes_if_unpickled_without_weights_only(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "one")))
    torch.load(io.BytesIO(zipped(Payload(tmp_path / "two"))), weights_only=False)
    assert (tmp_path / "one").exists()
    assert (tmp_path / "two").exists()


@pytest.mark.parametrize("model_alone", [False, True])
@pytest.mark.parametrize("case", range(len(PLANTS)))
def test_malicious_payload_in_any_checkpoint_file_is_not_executed(tmp_path: Path, case: int, model_alone: bool) -> None:
    name, plant = PLANTS[case]
    model, optimizer, checkpoint = started(tmp_path / "run")
    mark = tmp_path / "executed"
    plant(checkpoint / name, Payload(mark))
    sealed(checkpoint)
    before = content([model.state_dict(), optimizer.state_dict()])
    if model_alone and name == "rank-0.pt":
        load_checkpoint(tmp_path / "run", model, None, registry=optimizer.registry)  # this file is not read
    else:
        with pytest.raises(ValueError, match=r"damaged|planted|failed on rank 0"):
            load_checkpoint(tmp_path / "run", model, None if model_alone else optimizer, registry=optimizer.registry)
        assert content([model.state_dict(), optimizer.state_dict()]) == before
    assert not mark.exists()


def test_unmodified_checkpoint_with_recomputed_checksums_loads(tmp_path: Path) -> None:
    model, optimizer, checkpoint = started(tmp_path)
    sealed(checkpoint)
    assert load_checkpoint(tmp_path, model, optimizer) == {"step": 1}


def planted_for_two(path: Path, mark: Path) -> str:
    model = model_of(buffer=False)
    declare(model, {"*": P()})
    registry = ProcessGroupRegistry(Topology(data=2))
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), registry)
    checkpoint = save_checkpoint(path, model, optimizer)
    if registry.global_rank == 0:
        (checkpoint / "rank-1.pt").write_bytes(zipped(Payload(mark)))
        sealed(checkpoint)
    torch.distributed.barrier()
    with pytest.raises(ValueError, match=r"rank-1.pt is damaged, or was tampered with") as error:
        load_checkpoint(path, model, optimizer)
    registry.close()
    return str(error.value)


def test_malicious_file_of_one_rank_raises_on_all_ranks_without_execution(world: World, tmp_path: Path) -> None:
    world.run(2, planted_for_two, tmp_path / "run", tmp_path / "executed")
    assert not (tmp_path / "executed").exists()


Change = Callable[[dict[str, Any], list[Any]], Any]  # changes the index, or its entry of one tensor
CHANGES: dict[str, tuple[Change, str]] = {
    "path outside the checkpoint": (
        lambda _, said: said[2][0].__setitem__(2, "../../tensors-0.bin"),
        "the index refers to .*, which is not in the checkpoint",
    ),
    "no dtype": (lambda _, said: said.__setitem__(1, "save"), "save is not a dtype"),
    "dtype not a string": (lambda _, said: said.__setitem__(1, 7), "must be string"),
    "negative start": (lambda _, said: said[2][0].__setitem__(3, -4), r"\[-4\] is given as the position of a tensor"),
    "start not a number": (
        lambda _, said: said[2][0].__setitem__(3, "0"),
        r"\['0'\] is given as the position of a tensor",
    ),
    "huge length": (lambda _, said: said[0].__setitem__(0, 2.0**70), "a shape, which must consist of integers"),
    "beyond the tensor": (lambda _, said: said[2][0][0].__setitem__(0, 1), "are not a part of a tensor"),
    "wrong number of dims": (lambda _, said: said[2][0][1].append(1), "are not a part of a tensor"),
    "beyond the file": (lambda _, said: said[2][0].__setitem__(3, 10**9), "is too short for the tensor"),
    "same part twice": (
        lambda _, said: said[2].append(said[2][0]),
        r"has \d+ bytes of tensors in .*, but the file has \d+",
    ),
    "other byte order": (
        lambda index, _: index.__setitem__("byteorder", "big"),
        "the tensors of the checkpoint with index .*index.json are big-endian, but this machine is little-endian; load",
    ),
    "unknown byte order": (lambda index, _: index.__setitem__("byteorder", "middle"), "byte order is 'middle'"),
    "tensors not a mapping": (lambda index, _: index.__setitem__("tensors", 5), "damaged, or was tampered with"),
    "empty index": (lambda index, _: index.clear(), "damaged, or was tampered with"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_inconsistent_index_is_rejected_and_changes_nothing(tmp_path: Path, name: str) -> None:
    model, optimizer, checkpoint = started(tmp_path / "run")
    (tmp_path / "tensors-0.bin").write_bytes((checkpoint / "tensors-0.bin").read_bytes())
    index = json.loads((checkpoint / "index.json").read_bytes())
    change, message = CHANGES[name]
    change(index, index["tensors"]["model/one.weight"])
    (checkpoint / "index.json").write_text(json.dumps(index))
    sealed(checkpoint)
    before = content([model.state_dict(), optimizer.state_dict()])
    damaged = r"index\.json is damaged, or was tampered with: .*"
    expected = f"^{message}" if name == "other byte order" else message if message in damaged else damaged + message
    with pytest.raises(ValueError, match=expected):
        load_checkpoint(tmp_path / "run", model, optimizer)
    assert content([model.state_dict(), optimizer.state_dict()]) == before


# Checksums ------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_checksums_do_not_depend_on_sizes_of_writes_and_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = data.draw(st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]))
    whole = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes() if size else b""
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    file = tmp_path_factory.mktemp("sums") / "file"
    with open(file, "wb") as stream:
        summing = SummingStream(stream)
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
            summing.write(whole[start:stop])
    assert summing.record == record_of(file)
    assert summing.record.crc32 == tuple(zlib.crc32(whole[at : at + BLOCK]) for at in range(0, size, BLOCK))
    with open(file, "rb") as stream:
        checked = CheckedFile(stream, file, summing.record)
        for start, stop in data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=5)):
            read = bytearray(max(0, stop - start))
            checked.read_into(read, start)
            assert read == whole[start : max(start, stop)]


def test_checked_file_finds_damage_only_in_blocks_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    whole: Tensor = torch.arange(2 * BLOCK).to(torch.uint8)
    file.write_bytes(whole.numpy().tobytes())
    record = record_of(file)
    whole[BLOCK + 5] ^= 1
    file.write_bytes(whole.numpy().tobytes())
    with open(file, "rb") as stream:
        checked = CheckedFile(stream, file, record)
        checked.read_into(bytearray(BLOCK), 0)
        with pytest.raises(ValueError, match="is damaged: its content does not match its checksum"):
            checked.read_into(bytearray(1), BLOCK)
