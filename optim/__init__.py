"""The step: global gradient norm, clipping and the parallel optimizer."""

from .checkpoint.checkpoint import load_checkpoint as load_checkpoint
from .checkpoint.checkpoint import newest_checkpoint as newest_checkpoint
from .checkpoint.checkpoint import save_checkpoint as save_checkpoint
from .clip.functional import clip_grad_norm_ as clip_grad_norm_
from .clip.functional import clip_grad_value_ as clip_grad_value_
from .clip.functional import global_norm as global_norm
from .gradients.sync import sync_gradients as sync_gradients
from .monitor import Monitor as Monitor
from .monitor import TensorBoardWriter as TensorBoardWriter
from .norm.global_norm import GlobalNorm as GlobalNorm
from .norm.plan import ReductionPlan as ReductionPlan
from .norm.replicas import ReplicaMismatchError as ReplicaMismatchError
from .norm.stats import GradStats as GradStats
from .parallel_optimizer import ParallelOptimizer as ParallelOptimizer
from .recipe.booster import Booster as Booster
from .schedule.lr_scheduler import ConstantLR as ConstantLR
from .schedule.lr_scheduler import CosineAnnealingLR as CosineAnnealingLR
from .schedule.lr_scheduler import LinearWarmupLR as LinearWarmupLR
from .schedule.lr_scheduler import MultiStepLR as MultiStepLR
from .schedule.lr_scheduler import PolynomialLR as PolynomialLR
