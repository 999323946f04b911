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
from meshstep.parallel import (
    P,
    ProcessGroupRegistry,
    Topology,
    add_lora,
    declare,
    declare_adapters,
    load_adapter,
    save_adapter,
)
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


def adapter_of_one_stage(folder: str) -> str:
    """Save and load the adapter of the first pipeline stage. The second stage has no adapter, and its name is wrong."""
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        model = nn.Module()
        model.register_module("up" if registry.global_rank == 0 else "norm", nn.Linear(4, 4))
        declare(model, {"*": P()})
        with pytest.raises(ValueError, match="the model has on no rank an adapter named 'default'; add adapters with"):
            save_adapter(folder, model, registry)
        if registry.global_rank == 0:
            add_lora(model, "up", R, 2.0, registry)
        else:
            with pytest.raises(
                ValueError, match=r"or of a parameter \[experts, out, in\], that this pipeline stage has"
            ):
                add_lora(model, "up", R, 2.0, registry)
        assert len(declare_adapters(model, registry)) == (2 if registry.global_rank == 0 else 0)
        factors = {name: param for name, param in model.named_parameters() if "lora_" in name}
        for param in factors.values():
            nn.init.ones_(param)
        save_adapter(folder, model, registry)
        for param in factors.values():
            nn.init.zeros_(param)
        load_adapter(folder, model, registry)
        assert all(bool((param == 1).all()) for param in factors.values())
        other = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="the model has on no rank an adapter"):
            load_adapter(folder, other, registry)
        return " ".join(factors)


def test_adapter_files_of_a_pipeline_whose_second_stage_has_no_adapter(world: World, tmp_path: Path) -> None:
    assert world.run(2, adapter_of_one_stage, str(tmp_path / "adapter")) == ["up.lora_A up.lora_B", ""]


def test_ranks_in_a_file_follow_patterns_as_in_peft(tmp_path: Path) -> None:
    """A pattern of PEFT is a regular expression for the end of a layer's name, and the first match is used."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    add_lora(model, "layers.0", 2, 4.0)
    add_lora(model, "layers.1", 3, 8.0)
    save_adapter(tmp_path, model)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {
        "rank_pattern": {r"layers\.[1-9]": 3, r"layers\.\d": 5, "layers.0": 2},
        "alpha_pattern": {"^layers.1": 8.0},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    load_adapter(tmp_path, model)
    config["rank_pattern"] = {"ayers.1": 3}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"layers\.1 has r=3, but the saved adapter has r=2; create the adapters with r=2"
    ):
        load_adapter(tmp_path, model)
