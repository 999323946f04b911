"""Process layout: topology, groups, parameter specs and parallel layers."""

from .data import ShardedDataLoader, prepare_dataloader
from .interop.deepspeed import ModelParallelUnit, mark_model_parallel
from .interop.local import spec_of
from .interop.transformers import registry_of
from .launch import Launch, get_dist_logger, init_distributed
from .layers.classifier_2d import Classifier2D
from .layers.cross_entropy import cross_entropy_2d, vocab_parallel_cross_entropy
from .layers.embedding import Embedding2D, VocabParallelEmbedding
from .layers.tensor_1d import ColumnParallelLinear, LayerNorm1D, RowParallelLinear
from .layers.tensor_2d import BiasLayout, LayerNorm2D, Linear2D
from .layout.annotation import annotate, declare
from .layout.blocks import blocks
from .layout.pieces import Region
from .layout.shard import full_shape, local_shape, shard, unshard
from .layout.spec import P
from .mesh.agreement import gather_objects, on_all_ranks
from .mesh.collectives import (
    all_gather_to,
    broadcast_from,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from .mesh.registry import ProcessGroupRegistry
from .mesh.roles import Role
from .mesh.topology import Topology

__all__ = [
    "BiasLayout",
    "Classifier2D",
    "ColumnParallelLinear",
    "Embedding2D",
    "Launch",
    "LayerNorm1D",
    "LayerNorm2D",
    "Linear2D",
    "ModelParallelUnit",
    "P",
    "ProcessGroupRegistry",
    "Region",
    "Role",
    "RowParallelLinear",
    "ShardedDataLoader",
    "Topology",
    "VocabParallelEmbedding",
    "all_gather_to",
    "annotate",
    "blocks",
    "broadcast_from",
    "copy_to",
    "cross_entropy_2d",
    "declare",
    "full_shape",
    "gather_from",
    "gather_objects",
    "get_dist_logger",
    "init_distributed",
    "local_shape",
    "mark_model_parallel",
    "on_all_ranks",
    "prepare_dataloader",
    "reduce_from",
    "reduce_scatter_to",
    "registry_of",
    "scatter_to",
    "shard",
    "spec_of",
    "unshard",
    "vocab_parallel_cross_entropy",
]
