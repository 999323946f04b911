"""Adapters in PEFT's files load onto any layout of the layers of meshstep."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from lora_models import LAYOUTS, Options, R, Weights, adapted, full_weights, ranks_of
from meshstep.parallel import ProcessGroupRegistry, Topology, load_adapter, save_adapter
from torch import nn
from world import World

pytest.importorskip("safetensors", reason="needs safetensors (the extra 'lora')")

OPTIONS = Options(blocks=1)


def saved(layout: str, folder: str) -> Weights:
    with ProcessGroupRegistry(Topology(**LAYOUTS[layout].topology)) as registry:
        model = adapted(layout, registry, OPTIONS)
        save_adapter(folder, model)
        return full_weights(model, registry)


def loaded(layout: str, folder: str) -> Weights:
    with ProcessGroupRegistry(Topology(**LAYOUTS[layout].topology)) as registry:
        model = adapted(layout, registry, OPTIONS, zero=True)
        load_adapter(folder, model)
        return full_weights(model, registry)


@pytest.mark.parametrize(
    ("before", "after"), [("tensor", "grid"), ("grid", "data and tensor"), ("wide grid", "tensor")]
)
def test_adapter_is_loaded_onto_another_layout(world: World, tmp_path: Path, before: str, after: str) -> None:
    folder = str(tmp_path / "adapter")
    expected = world.run(ranks_of(before), saved, before, folder)[0]
    assert {path.name for path in Path(folder).iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads(Path(folder, "adapter_config.json").read_text())["r"] == R
    for found in world.run(ranks_of(after), loaded, after, folder):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_missing_package_and_missing_adapter_raise_clear_errors(tmp_path: Path) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        with pytest.raises(ValueError, match="Linear has no adapter named 'default'; add adapters with add_lora"):
            save_adapter(tmp_path, nn.Linear(2, 2), registry)
        missing = mock.patch.dict(sys.modules, {"safetensors.torch": None})
        with missing, pytest.raises(ModuleNotFoundError, match=r"run pip install 'meshstep\[lora\]'"):
            save_adapter(tmp_path, nn.Linear(2, 2), registry)
