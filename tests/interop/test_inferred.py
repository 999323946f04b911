"""`infer` on models of Transformers and Megatron, compared with their plans and flags.

It cannot find blocks of a layout, nor the layout of a parameter that does not affect the loss.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshstep.optim.proof.prove import infer
from meshstep.parallel import P, ProcessGroupRegistry, spec_of
from torch import Tensor, nn
from world import World

Rules = dict[str, P]


def without_blocks(spec: P) -> P:
    """Remove the blocks of a spec: `infer` reads values and shapes, which determine axes but not blocks."""
    return P(*(spec.dim_axes(dim) for dim in range(len(spec.entries))), partial=spec.partial, owned=dict(spec.owned))


# Transformers --------------------------------------------------------------------------------------------------------


def llama(path: str) -> tuple[Rules, Rules, Rules, str]:
    """Return the specs of the DTensors, the specs inferred with and without full shapes, and the proofs."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    split = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_size=2), dtype=torch.float64
    )
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))

    def loss_fn(model: nn.Module) -> Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    from meshstep.parallel import registry_of

    with registry_of(split) as registry:
        said = {name: spec_of(param, registry.topology) for name, param in split.named_parameters()}
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        found = infer(split, loss_fn, registry, shapes=whole)
        blind = infer(split, loss_fn, registry)
        return said, found.rules, blind.rules, f"{found.proof}\n{blind.proof}"


def test_infer_finds_layout_of_llama_with_tensor_parallel_plan(world: World, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs transformers (the extra 'interop')")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param += 0.1 * torch.randn(param.shape)
    model.save_pretrained(tmp_path)
    for said, found, blind, proof in world.run(2, llama, str(tmp_path)):
        assert "wrong" not in proof, proof
        assert found == said
        assert {name: set(spec.sharded_axes) for name, spec in blind.items()} == {
            name: set(spec.sharded_axes) for name, spec in said.items()
        }


# Megatron-core -------------------------------------------------------------------------------------------------------


def gpt_model(options: dict[str, Any], seed: int) -> tuple[Rules, Rules, Rules, str]:
    """Return the specs of the flags, the specs inferred with and without full shapes, and the proofs."""
    from megatron_on_cpu import gpt, loss_of, megatron
    from meshstep.parallel.interop.megatron import declare_by_flags, registry_of

    registry: ProcessGroupRegistry
    with megatron():
        dense = gpt(**{**options, "sequence_parallel": False})
        whole = {name: tuple(param.shape) for name, param in dense.named_parameters()}
    with megatron(tensor_model_parallel_size=2), registry_of() as registry:
        model = gpt(tensor_model_parallel_size=2, **options)
        declare_by_flags(model, registry)
        said = {name: spec_of(param, registry.topology) for name, param in model.named_parameters()}
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.dim() == 1:  # replace zeros and ones, which are equal on all ranks for every layout
                    where = registry.rank("tensor") if said[name].sharded_axes else 0
                    generator = torch.Generator().manual_seed(1000 * len(name) + where)
                    param += 0.1 * torch.randn(param.shape, generator=generator)
        found = infer(model, lambda model: loss_of(model, seed), registry, shapes=whole)
        blind = infer(model, lambda model: loss_of(model, seed), registry)
        return said, found.rules, blind.rules, f"{found.proof}\n{blind.proof}"


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "q/k layer norms": {"qk_layernorm": True},
}


@pytest.mark.parametrize("name", KINDS)
def test_infer_finds_layout_of_megatron_gpt_model_declared_by_flags(world: World, name: str) -> None:
    if find_spec("megatron") is None:
        pytest.skip(reason="needs megatron-core, of the extra `interop`")
    for said, found, blind, proof in world.run(2, gpt_model, KINDS[name], 3):
        assert "wrong" not in proof, proof
        for key, spec in said.items():
            if key.endswith("k_layernorm.bias"):  # attention does not depend on a term added to all keys
                assert key in proof.partition("not decided: ")[2]
            else:
                assert found[key] == blind[key] == without_blocks(spec), key
        assert found.keys() == blind.keys() == said.keys()
