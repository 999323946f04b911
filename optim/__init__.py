"""The step: global gradient norm, clipping and the parallel optimizer."""

from .checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from .clip.functional import clip_grad_norm_, clip_grad_value_, global_norm
from .gradients.sync import sync_gradients
from .monitor import Monitor, Report, TensorBoardWriter
from .norm.global_norm import GlobalNorm
from .norm.plan import Bucket, ParameterEntry, ReductionPlan
from .norm.replicas import ReplicaMismatchError
from .norm.stats import GradStats
from .parallel_optimizer import ParallelOptimizer
from .recipe.booster import Booster
from .recipe.data_parallel import DataParallel, share_weights
from .schedule import ConstantLR, CosineAnnealingLR, HoldOnSkip, LinearWarmupLR, MultiStepLR, PolynomialLR, WarmupLR

__all__ = [
    "Booster",
    "Bucket",
    "ConstantLR",
    "CosineAnnealingLR",
    "DataParallel",
    "GlobalNorm",
    "GradStats",
    "HoldOnSkip",
    "LinearWarmupLR",
    "Monitor",
    "MultiStepLR",
    "ParallelOptimizer",
    "ParameterEntry",
    "PolynomialLR",
    "ReductionPlan",
    "ReplicaMismatchError",
    "Report",
    "TensorBoardWriter",
    "WarmupLR",
    "clip_grad_norm_",
    "clip_grad_value_",
    "global_norm",
    "load_checkpoint",
    "newest_checkpoint",
    "save_checkpoint",
    "share_weights",
    "sync_gradients",
]
