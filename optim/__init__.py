"""The step: global gradient norm, clipping and the parallel optimizer."""

from .booster import Booster as Booster
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import newest_checkpoint as newest_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .clipping import clip_grad_norm_ as clip_grad_norm_
from .clipping import clip_grad_value_ as clip_grad_value_
from .clipping import global_norm as global_norm
from .global_norm import GlobalNorm as GlobalNorm
from .grad_stats import GradStats as GradStats
from .gradient_sync import sync_gradients as sync_gradients
from .lr_scheduler import ConstantLR as ConstantLR
from .lr_scheduler import CosineAnnealingLR as CosineAnnealingLR
from .lr_scheduler import LinearWarmupLR as LinearWarmupLR
from .lr_scheduler import MultiStepLR as MultiStepLR
from .lr_scheduler import PolynomialLR as PolynomialLR
from .monitor import Monitor as Monitor
from .monitor import TensorBoardWriter as TensorBoardWriter
from .parallel_optimizer import ParallelOptimizer as ParallelOptimizer
from .reduction_plan import ReductionPlan as ReductionPlan
from .replica_check import ReplicaMismatchError as ReplicaMismatchError
