"""Tiny models of torch's tutorial, Transformers and torchtitan, dense or sharded by the framework's own functions.

All models compute in float64: `Float64` replaces the float32 steps of the frameworks' code (norms, softmax, routers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB, ROWS, LENGTH = 64, 8, 8


class Sharded(NamedTuple):
    """A sharded model, and the rows of the global batch that this rank reads."""

    model: nn.Module
    rows: slice


class Float64(TorchFunctionMode):
    """Mode that replaces `Tensor.float()`, `Tensor.bfloat16()` and the argument `torch.float32` by float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        keywords = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **keywords)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def randomize(model: nn.Module) -> None:
    """Set every parameter to random values: matrices around 0, vectors around their initial values."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.copy_(noise * 0.1 if param.dim() > 1 else param + 0.1 * noise)


# torch's tutorial of tensor parallelism with fully_shard -----------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return out


class _FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(width, 32), nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), _Attention(width, heads)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(width), _FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


class Tutorial:
    """Builds the `Decoder`.

    ``sequence_parallel``: True: norms are DTensors of `SequenceParallel`. False: norms stay plain under tensor
    parallelism.
    """

    package = "torch"

    def __init__(self, sequence_parallel: bool) -> None:
        self.sequence_parallel = sequence_parallel

    def dense(self, _: str) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Decoder().double()
        randomize(model)
        return model

    def sharded(self, _: str, *, fsdp: int = 1, tp: int = 1, replicate: int = 1) -> Sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = ("replicate", "fsdp", "tp")
        mesh = init_device_mesh("cpu", (replicate, fsdp, tp), mesh_dim_names=names)
        model: Any = self.dense(_)
        if tp > 1:
            self._parallelize(model, mesh["tp"])
        if fsdp > 1:
            data = mesh["replicate", "fsdp"] if replicate > 1 else mesh["fsdp"]
            for layer in model.layers:
                fully_shard(layer, mesh=data)
            fully_shard(model, mesh=data)
        return Sharded(model, slice(torch.distributed.get_rank() // tp, None, replicate * fsdp))

    def _parallelize(self, model: Any, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        between = Shard(1) if self.sequence_parallel else Replicate()
        outer: dict[str, Any] = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        }
        inner: dict[str, Any] = {
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=between),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
        }
        if self.sequence_parallel:
            prepare = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            outer["norm"] = SequenceParallel()
            inner |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
            inner |= {"attention": prepare, "feed_forward": prepare}
        parallelize_module(model, mesh, outer)
        for layer in model.layers:
            parallelize_module(layer, mesh, inner)

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# Transformers ------------------------------------------------------------------------------------------------------------

_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.0,
}  # fmt: skip
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": _LOCAL_EXPERTS,
    "GptOss": {**_LOCAL_EXPERTS, "head_dim": 4, "sliding_window": 4},
    "Gemma3": {"head_dim": 4, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "DeepseekV3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4,
    },
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4},
}  # fmt: skip


class Transformers:
    """Builds a model of Transformers from the prefix of its class, such as "Mixtral".

    `DistributedConfig` shards it by the model's own plans.
    """

    package = "transformers"

    def __init__(self, name: str) -> None:
        self.name = name

    def save(self, path: str) -> None:
        """Write the checkpoint from which `dense` and `sharded` load."""
        transformers: Any = importlib.import_module("transformers")
        config: Any = getattr(transformers, f"{self.name}{'Text' if self.name == 'Gemma3' else ''}Config")
        with Float64(), torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, f"{self.name}ForCausalLM")(config(**_SMALL | _CONFIGS[self.name])).double()
        randomize(model)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(path)

    def dense(self, path: str) -> nn.Module:
        return self._loaded(path, None)

    def sharded(self, path: str, *, fsdp: int = 1, tp: int = 1, replicate: int = 1, ep: int = 1) -> Sharded:
        distributed: Any = importlib.import_module("transformers.distributed")
        plan: dict[str, Any] = {"tp_plan": "auto"} if tp > 1 else {}
        config = distributed.DistributedConfig(
            fsdp_size=fsdp, tp_size=tp, dp_replicate_size=replicate, ep_size=ep, **plan
        )
        return Sharded(self._loaded(path, config), slice(torch.distributed.get_rank() // tp, None, replicate * fsdp))

    def _loaded(self, path: str, config: Any) -> nn.Module:
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        # Other implementations of experts do not support float64.
        experts = {} if self.name == "Gemma3" else {"experts_implementation": "eager"}
        with Float64():
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
                path, distributed_config=config, dtype=torch.float64, **experts
            )
        return model

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        with Float64():
            logits = model(input_ids=tokens[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# torchtitan --------------------------------------------------------------------------------------------------------------


# Smaller sizes for the debug models: the function that makes the layers of a model, and its replaced arguments.
_DEBUG_MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "llama3": ("_build_llama3_layers", {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 64}),
    "deepseek_v3": (
        "_build_dsv3_layers",
        {
            "n_layers": 2, "dim": 32, "n_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 8, "dense_hidden_dim": 32, "moe_hidden_dim": 16,
        },
    ),
}  # fmt: skip


class Torchtitan:
    """Builds a debug model of torchtitan with smaller sizes; its `parallelize_fn` shards it.

    ``module`` is the name of the module below ``torchtitan.models``.
    """

    package = "torchtitan"

    def __init__(self, module: str) -> None:
        self.module = module

    def dense(self, _: str) -> nn.Module:
        with self._imported() as titan:
            model: nn.Module = self._built(titan, SimpleNamespace(parallelism=titan.ParallelismConfig()))
        return model

    def sharded(self, _: str, *, fsdp: int = 1, tp: int = 1, replicate: int = 1, ep: int = 1) -> Sharded:
        from torch.distributed.fsdp import FSDPModule

        with self._imported() as titan:
            parallelism = titan.ParallelismConfig(
                data_parallel_shard_degree=fsdp,
                data_parallel_replicate_degree=replicate,
                tensor_parallel_degree=tp,
                expert_parallel_degree=ep,
                spmd_backend="partial_dtensor",
            )
            titan.utils.set_spmd_backend(parallelism.spmd_backend)
            model = self._built(titan, SimpleNamespace(parallelism=parallelism))
            dims = titan.ParallelDims.from_config(parallelism, torch.distributed.get_world_size())
            dims.build_mesh()
            training = titan.TrainingConfig()
            training.mixed_precision_param = training.mixed_precision_reduce = "float64"
            model = titan.spec.parallelize_fn(
                model,
                parallel_dims=dims,
                training=training,
                parallelism=parallelism,
                compile_config=titan.CompileConfig(),
                ac_config=None,
                dump_folder="",
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo does not support the reduction op PREMUL_SUM
        return Sharded(model, slice(torch.distributed.get_rank() // tp, None, replicate * fsdp))

    def _built(self, titan: Any, config: Any) -> Any:
        model_config, width = titan.spec.model, _DEBUG_MODELS[self.module][1]["dim"]
        model_config.dim, model_config.vocab_size, model_config.norm.normalized_shape = width, VOCAB, width
        model_config.tok_embeddings.num_embeddings = model_config.lm_head.out_features = VOCAB
        model_config.tok_embeddings.embedding_dim = model_config.lm_head.in_features = width
        model_config.update_from_config(config=config)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = model_config.build()
            model.init_states()
        model.double()
        randomize(model)
        return model

    @contextlib.contextmanager
    def _imported(self) -> Iterator[Any]:
        """Yield the parts of torchtitan that the builder needs, with the parts that need a GPU replaced."""
        with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):  # read once, at import
            models = importlib.import_module(f"torchtitan.models.{self.module}")
            import torchtitan.config as config
            import torchtitan.distributed.utils as utils
            from torchtitan.distributed import ParallelDims
            from torchtitan.models.common.attention import ScaledDotProductAttention
            from torchtitan.models.common.moe import GroupedExperts

        config.TORCH_DTYPE_MAP["float64"] = torch.float64
        function, sizes = _DEBUG_MODELS[self.module]
        build = getattr(models, function)

        def build_small(*, rope: Any, **options: Any) -> Any:
            return build(rope=dataclasses.replace(rope, dim=8), **options | sizes)

        with (
            mock.patch.object(models, "get_attention_config", side_effect=lambda _: ScaledDotProductAttention.Config()),
            mock.patch.object(models, function, build_small),
        ):
            spec = models.model_registry("debugmodel")
        GroupedExperts._grouped_mm = _grouped_mm
        yield SimpleNamespace(
            spec=spec,
            utils=utils,
            ParallelDims=ParallelDims,
            **{name: getattr(config, name) for name in ("ParallelismConfig", "TrainingConfig", "CompileConfig")},
        )

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        from torchtitan.components.loss import cross_entropy_loss

        positions = torch.arange(LENGTH).expand(len(tokens), -1)
        # Disable the router's autocast to float32.
        autocast = mock.patch("torch.autocast", return_value=contextlib.nullcontext())
        with Float64(), autocast:
            # torchtitan sums gradients over data ranks, so the loss is divided by the tokens of the global batch.
            loss: Tensor = cross_entropy_loss(model(tokens[:, :-1], positions), tokens[:, 1:]) / (ROWS * LENGTH)
        return loss


def _grouped_mm(_: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix; `torch._grouped_mm` supports bfloat16 only."""
    ends = offs.tolist()
    return torch.cat([A[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, B_t, strict=False)])


BUILDERS: dict[str, Any] = {
    "tutorial, norms as DTensors": Tutorial(True),
    "tutorial, plain norms": Tutorial(False),
    **{name: Transformers(name) for name in _CONFIGS},
    "torchtitan Llama 3": Torchtitan("llama3"),
    "torchtitan DeepSeek-V3": Torchtitan("deepseek_v3"),
}
