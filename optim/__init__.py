"""The optimizer step of a parallel model: global gradient norm, clipping, schedules, checkpoints and `Booster`."""

from typing import TYPE_CHECKING

from ..parallel.mesh.deprecation import renamed_objects
from .arguments import Measure, Reduce
from .checkpoint import AsyncSaver, TorchStates, load_checkpoint, newest_checkpoint, save_checkpoint
from .clip.base import Clip, ClipResult, ClipState, PerParameterState
from .clip.functional import clip_grad_norm_, clip_grad_value_, global_norm, scale_gradients_
from .clip.rules import (
    AdaGC,
    Adaptive,
    ByGroup,
    ByName,
    ByNorm,
    ByPreviousNorm,
    ByValue,
    PerParameter,
    SkipSpikes,
    WarmUp,
    ZClip,
)
from .gradients.buckets import Bf16Compression, CommHook, NoCompression, sync_gradients
from .kernels.choice import use_kernels
from .lion import Lion
from .norm.global_norm import GlobalNorm
from .norm.measure import Fingerprints, GradStats, Norms
from .norm.param_table import ParamPosition, SteppedTensor
from .norm.plan import NormBucket, ParameterEntry, ReductionPlan
from .norm.replicas import ReplicaMismatchError
from .parallel_optimizer import ParallelOptimizer
from .recipe.accelerated import take_over_clipping
from .recipe.booster import Booster
from .recipe.data_parallel import DataParallel, align_replicas, broadcast_weights
from .recipe.pipeline import Pipeline
from .schedule import ConstantLR, CosineAnnealingLR, HoldOnSkip, LinearWarmupLR, MultiStepLR, PolynomialLR, WarmupLR
from .states.chain import StepObserver
from .states.half_states import HalfStates
from .states.offloaded import Offloaded
from .states.param_transform import ParamTransform, PlacementContext, Position, StatePlacement
from .states.replayable import Replayable, replay
from .states.sharded import Sharded
from .step.skips import Skip
from .step.update_request import UpdateRequest
from .telemetry.comparison import RunComparison, compare_runs
from .telemetry.coordinate_check import CoordinateCheck, Trial, coordinate_check
from .telemetry.gradient_noise import NoiseScale
from .telemetry.monitor import Flops, Monitor, Report
from .telemetry.recorder import Recorder
from .telemetry.rounding import Tolerances
from .telemetry.step_pair import Difference
from .telemetry.telemetry import Measurement, SpectralNorms, Telemetry
from .telemetry.writers import CsvFile, JsonLines, TensorBoardWriter, Terminal, WeightsAndBiases
from .whole.adafactor import CAME, Adafactor
from .whole.layerwise import LAMB, LARS, StableAdamW
from .whole.muon import Muon
from .whole.shampoo_soap import SOAP, Shampoo

__all__ = [
    "CAME",
    "LAMB",
    "LARS",
    "SOAP",
    "AdaGC",
    "Adafactor",
    "Adaptive",
    "AsyncSaver",
    "Bf16Compression",
    "Booster",
    "ByGroup",
    "ByName",
    "ByNorm",
    "ByPreviousNorm",
    "ByValue",
    "Clip",
    "ClipResult",
    "ClipState",
    "CommHook",
    "ConstantLR",
    "CoordinateCheck",
    "CosineAnnealingLR",
    "CsvFile",
    "DataParallel",
    "Difference",
    "Fingerprints",
    "Flops",
    "GlobalNorm",
    "GradStats",
    "HalfStates",
    "HoldOnSkip",
    "JsonLines",
    "LinearWarmupLR",
    "Lion",
    "Measure",
    "Measurement",
    "Monitor",
    "MultiStepLR",
    "Muon",
    "NoCompression",
    "NoiseScale",
    "NormBucket",
    "Norms",
    "Offloaded",
    "ParallelOptimizer",
    "ParamPosition",
    "ParamTransform",
    "ParameterEntry",
    "PerParameter",
    "PerParameterState",
    "Pipeline",
    "PlacementContext",
    "PolynomialLR",
    "Position",
    "Recorder",
    "Reduce",
    "ReductionPlan",
    "Replayable",
    "ReplicaMismatchError",
    "Report",
    "RunComparison",
    "Shampoo",
    "Sharded",
    "Skip",
    "SkipSpikes",
    "SpectralNorms",
    "StableAdamW",
    "StatePlacement",
    "StepObserver",
    "SteppedTensor",
    "Telemetry",
    "TensorBoardWriter",
    "Terminal",
    "Tolerances",
    "TorchStates",
    "Trial",
    "UpdateRequest",
    "WarmUp",
    "WarmupLR",
    "WeightsAndBiases",
    "ZClip",
    "align_replicas",
    "broadcast_weights",
    "clip_grad_norm_",
    "clip_grad_value_",
    "compare_runs",
    "coordinate_check",
    "global_norm",
    "load_checkpoint",
    "newest_checkpoint",
    "replay",
    "save_checkpoint",
    "scale_gradients_",
    "sync_gradients",
    "take_over_clipping",
    "use_kernels",
]


if not TYPE_CHECKING:  # hidden from type checkers, so that they report former names as errors
    __getattr__ = renamed_objects(
        __name__,
        {
            "Bf16Wire": Bf16Compression,
            "Binding": PlacementContext,
            "Bucket": NormBucket,
            "Decision": ClipResult,
            "Exact": NoCompression,
            "Exchange": CommHook,
            "Link": ParamTransform,
            "OfEachParameter": PerParameterState,
            "Piece": SteppedTensor,
            "Placement": StatePlacement,
            "align_copies": align_replicas,
            "share_weights": broadcast_weights,
        },
    )
