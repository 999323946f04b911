"""Mesh topology, process groups, parameter layouts, parallel layers, LoRA adapters, launching and data loading."""

from .adapters.declaration import declare_adapters, random_factors
from .adapters.grouped_lora import GroupedLoRA
from .adapters.lora import LoRA, add_lora
from .adapters.peft_files import load_adapter, save_adapter
from .data import ShardedDataLoader, prepare_dataloader
from .interop.deepspeed import ModelParallelUnit, mark_model_parallel
from .interop.local_parameters import spec_of
from .interop.transformers import registry_of
from .launch import Launch, get_dist_logger, init_distributed
from .layers.cross_entropy import cross_entropy_2d, cross_entropy_3d, vocab_parallel_cross_entropy
from .layers.embedding import Classifier2D, Embedding2D, VocabParallelEmbedding
from .layers.layer_norm import LayerNorm2D
from .layers.tensor_1d import ColumnParallelLinear, LayerNorm1D, RowParallelLinear
from .layers.tensor_2d import BiasLayout, Classifier2p5D, Embedding2p5D, LayerNorm2p5D, Linear2D, Linear2p5D
from .layers.tensor_3d import Classifier3D, Embedding3D, LayerNorm3D, Linear3D
from .layout.annotation import annotate, declare
from .layout.shard import Region, full_shape, join, local_shape, shard, unshard
from .layout.spec import P, blocks
from .mesh.agreement import gather_objects, on_all_ranks
from .mesh.collectives import (
    all_gather_to,
    all_to_all,
    broadcast_from,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from .mesh.registry import ProcessGroupRegistry
from .mesh.stop_gradient import stop_gradient
from .mesh.topology import Role, Topology

__all__ = [
    "BiasLayout",
    "Classifier2D",
    "Classifier2p5D",
    "Classifier3D",
    "ColumnParallelLinear",
    "Embedding2D",
    "Embedding2p5D",
    "Embedding3D",
    "GroupedLoRA",
    "Launch",
    "LayerNorm1D",
    "LayerNorm2D",
    "LayerNorm2p5D",
    "LayerNorm3D",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "LoRA",
    "ModelParallelUnit",
    "P",
    "ProcessGroupRegistry",
    "Region",
    "Role",
    "RowParallelLinear",
    "ShardedDataLoader",
    "Topology",
    "VocabParallelEmbedding",
    "add_lora",
    "all_gather_to",
    "all_to_all",
    "annotate",
    "blocks",
    "broadcast_from",
    "copy_to",
    "cross_entropy_2d",
    "cross_entropy_3d",
    "declare",
    "declare_adapters",
    "full_shape",
    "gather_from",
    "gather_objects",
    "get_dist_logger",
    "init_distributed",
    "join",
    "load_adapter",
    "local_shape",
    "mark_model_parallel",
    "on_all_ranks",
    "prepare_dataloader",
    "random_factors",
    "reduce_from",
    "reduce_scatter_to",
    "registry_of",
    "save_adapter",
    "scatter_to",
    "shard",
    "spec_of",
    "stop_gradient",
    "unshard",
    "vocab_parallel_cross_entropy",
]
