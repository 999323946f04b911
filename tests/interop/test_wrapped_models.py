"""A Transformers model with a tensor-parallel plan in wrappers that rename its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, registry_of
from meshstep.parallel.layout.annotation import annotation_of
from torch import Tensor, nn
from transformers_models import loaded, loss_of, made, sgd, tokens_of, weights_of
from world import World

pytest.importorskip("transformers", reason="needs transformers (the extra 'interop')")

NORMS = ("q_norm.weight", "k_norm.weight")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a float64 checkpoint of Qwen3, whose plan sums the gradients of q_norm and k_norm."""
    path = tmp_path_factory.mktemp("wrapped") / "qwen3"
    made("qwen3").double().save_pretrained(path)
    return str(path)


class Nested(nn.Module):
    """A wrapper that renames parameters and does not pass attributes through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"model": model})

    def forward(self, **inputs: Any) -> Any:
        return self.inner["model"](**inputs)


def nested(model: nn.Module) -> nn.Module:
    return Nested(model)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def with_checkpointing(model: Any) -> nn.Module:
    """Wrap each block, so that names change within the model that has the plan. Return the model."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    return model  # type: ignore[no-any-return]


def adapted(peft: Any, model: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that Transformers has renamed
        lora: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], **options))
    for name, param in lora.named_parameters():
        if "lora_A" in name:  # PEFT draws other values for a sharded layer
            nn.init.normal_(param, generator=torch.Generator().manual_seed(3))
    return lora


def with_lora(model: nn.Module) -> nn.Module:
    """Return a PeftModel with LoRA on q_proj, in which q_norm and k_norm are trained too."""
    peft = pytest.importorskip("peft")
    lora = adapted(peft, model)
    for name, param in lora.named_parameters():
        if name.endswith(NORMS):
            param.requires_grad_()
    return lora


def with_saved_norms(model: nn.Module) -> nn.Module:
    """Return a PeftModel that trains its own copies of q_norm and k_norm (``modules_to_save``)."""
    peft = pytest.importorskip("peft")
    return adapted(peft, model, modules_to_save=["q_norm", "k_norm"])


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [nested, compiled, with_checkpointing, with_lora, with_saved_norms]


def train(path: str, wrap: Callable[[nn.Module], nn.Module], tensor_parallel: bool) -> dict[str, Tensor]:
    """Return the weights after three steps with two micro-batches each."""
    model = wrap(loaded(path, (1, 2) if tensor_parallel else None))
    inner: Any = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.3, momentum=0.9)
    optimizer = ParallelOptimizer.for_model(model, inner, accumulation_steps=2) if tensor_parallel else inner
    for step in range(3):
        for part in tokens_of(step).chunk(2):
            if tensor_parallel:
                optimizer.backward(loss_of(model, part))
            else:
                (loss_of(model, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_of(model)
    if tensor_parallel:
        optimizer.registry.close()
    return weights


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrapped_transformers_model_trains_like_dense_model(
    world: World, path: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    expected = train(path, wrap, False)
    for found in world.run(2, train, path, wrap, True):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-12, msg=name)


def refusals(path: str) -> list[str]:
    found = []
    model, other = loaded(path, (1, 2)), loaded(path, (1, 2))
    replaced = loaded(path, (1, 2))
    norm = replaced.model.layers[1].self_attn.k_norm
    inner = norm.forward
    norm.forward = lambda x: inner(x)
    renamed = loaded(path, (1, 2))
    renamed._tp_plan = {"encoder.*.query": "colwise", "encoder.*.q_norm": "replicated_with_grad_allreduce"}
    for given in (nn.ModuleList([model, other]), compiled(replaced), with_checkpointing(replaced), Nested(renamed)):
        with pytest.raises(ValueError, match=r".") as error:
            ParallelOptimizer.for_model(given, sgd(given))
        found.append(str(error.value))
        assert all(annotation_of(param) is None for param in given.parameters()), (
            "for_model declared parameters before it raised"
        )
    return found


def test_for_model_rejects_two_sharded_models_and_mismatched_plans(world: World, path: str) -> None:
    for two, compiled_model, checkpointed, renamed in world.run(2, refusals, path):
        assert "ModuleList contains 2 sharded models (Qwen3ForCausalLM, Qwen3ForCausalLM)" in two
        for text in (compiled_model, checkpointed):
            assert (
                "model.layers.1.self_attn.k_norm is 'replicated_with_grad_allreduce' in the tensor-parallel plan, but"
                in text
            )
        assert "the tensor-parallel plan of Qwen3ForCausalLM names encoder.*.query, encoder.*.q_norm, but" in renamed


def declared(path: str) -> list[tuple[str, P]]:
    model = loaded(path, (1, 2))
    wrapped = Nested(compiled(model))
    wrapped.scale = nn.Parameter(torch.ones(2))
    registry_of(wrapped).close()
    names = {annotation.name: annotation.spec for annotation in map(annotation_of, wrapped.parameters()) if annotation}
    return [(name, names[name]) for name in ("scale", "model.norm.weight", "model.layers.1.self_attn.q_norm.weight")]


def test_wrapped_transformers_parameters_have_names_of_unwrapped_model(world: World, path: str) -> None:
    expected = [("scale", P()), ("model.norm.weight", P()), ("model.layers.1.self_attn.q_norm.weight", P(partial="tp"))]
    assert world.run(2, declared, path) == [expected] * 2


def with_new_norm(path: str) -> str:
    model: Any = compiled(loaded(path, (1, 2)))
    optimizer = ParallelOptimizer.for_model(model, sgd(model))
    with optimizer.registry:
        model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
        optimizer.backward(loss_of(model, tokens_of(0)))
        with pytest.raises(RuntimeError, match="trainable parameters that the optimizer does not have") as error:
            optimizer.step()
    return str(error.value)


def test_step_raises_if_parameter_was_replaced_after_for_model(world: World, path: str) -> None:
    for text in world.run(2, with_new_norm, path):
        assert "will never step, on ranks 0-1: model.norm.weight. " in text
