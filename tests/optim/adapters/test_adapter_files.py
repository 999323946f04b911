"""Adapter files in PEFT's format: loading onto other layouts and into PEFT, and errors."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lora_models import LAYOUTS, Options, R, Weights, adapted, batch, dense_model, full_weights, ranks_of
from meshstep.parallel import ProcessGroupRegistry, Topology, load_adapter, save_adapter
from torch import Tensor, nn
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
def test_adapter_weights_are_bitwise_identical_after_loading_onto_another_layout(
    world: World, tmp_path: Path, before: str, after: str
) -> None:
    folder = str(tmp_path / "adapter")
    expected = world.run(ranks_of(before), saved, before, folder)[0]
    assert {path.name for path in Path(folder).iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads(Path(folder, "adapter_config.json").read_text())["r"] == R
    for found in world.run(ranks_of(after), loaded, after, folder):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def saved_loss(layout: str, folder: str, options: Options) -> Tensor:
    with ProcessGroupRegistry(Topology(**LAYOUTS[layout].topology)) as registry:
        model = adapted(layout, registry, options)
        save_adapter(folder, model)
        ids, targets = batch(0)
        return LAYOUTS[layout].loss(model, ids, targets, registry).detach()


@pytest.mark.parametrize("adapters", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("layout", ["tensor", "grid", "cube tables"])
def test_peft_loss_with_saved_adapter_equals_loss_of_sharded_model(
    world: World, tmp_path: Path, layout: str, adapters: dict[str, Any]
) -> None:
    peft: Any = pytest.importorskip("peft", reason="needs peft (the extra 'interop')")
    folder, options = str(tmp_path / "adapter"), Options(adapters=adapters, blocks=1)
    losses = world.run(ranks_of(layout), saved_loss, layout, folder, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(dense_model(options), folder)
    ids, targets = batch(0)
    expected = LAYOUTS["single"].loss(model, ids, targets, ProcessGroupRegistry(Topology())).detach()
    torch.testing.assert_close(torch.stack(losses), expected.expand(len(losses)), rtol=1e-12, atol=0)


def merged_error(folder: str) -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model: Any = adapted("tensor", registry, OPTIONS)
        save_adapter(folder, model)
        model.down.merge()
        with pytest.raises(ValueError, match=r".") as error:
            load_adapter(folder, model)
        return str(error.value)


def test_loading_into_merged_adapter_raises(world: World, tmp_path: Path) -> None:
    for text in world.run(2, merged_error, str(tmp_path)):
        assert text.startswith(
            "the adapter of down is merged, so a later unmerge() would subtract other factors than merge()"
        )


def test_save_adapter_without_adapter_or_safetensors_raises_with_remedy(tmp_path: Path) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        with pytest.raises(ValueError, match="Linear has no adapter named 'default'; add adapters with add_lora"):
            save_adapter(tmp_path, nn.Linear(2, 2), registry)
        missing = mock.patch.dict(sys.modules, {"safetensors.torch": None})
        with missing, pytest.raises(ModuleNotFoundError, match=r"run pip install 'meshstep\[lora\]'"):
            save_adapter(tmp_path, nn.Linear(2, 2), registry)
