"""The step: global gradient norm, clipping and the parallel optimizer."""

from .checkpoint import AsyncSaver, TorchStates, load_checkpoint, newest_checkpoint, save_checkpoint
from .clip.adagc import AdaGC
from .clip.functional import clip_grad_norm_, clip_grad_value_, global_norm
from .clip.named import ByName
from .clip.policies import Adaptive, ByGroup, ByValue, PerParameter
from .clip.previous_norm import ByPreviousNorm
from .clip.rule import ByNorm, Clip, Decision, OfEachParameter
from .clip.spikes import SkipSpikes
from .clip.state import ClipState
from .clip.warm_up import WarmUp
from .clip.zclip import ZClip
from .gradients.bucket import Exact, Exchange
from .gradients.compressed import Bf16Wire
from .gradients.sync import sync_gradients
from .kernels.choice import use_kernels
from .norm.entries import ParameterEntry
from .norm.global_norm import GlobalNorm
from .norm.measure import Fingerprints, Measure
from .norm.norms import Norms
from .norm.plan import Bucket, ReductionPlan
from .norm.replicas import ReplicaMismatchError
from .norm.stats import GradStats
from .parallel_optimizer import ParallelOptimizer
from .recipe.accelerated import take_over_clipping
from .recipe.align_copies import align_copies
from .recipe.booster import Booster
from .recipe.data_parallel import DataParallel, share_weights
from .recipe.pipeline import Pipeline
from .schedule import ConstantLR, CosineAnnealingLR, HoldOnSkip, LinearWarmupLR, MultiStepLR, PolynomialLR, WarmupLR
from .states.half_states import HalfStates
from .states.link import Binding, Link, Placement, Position
from .states.offloaded import Offloaded
from .states.pieces import Piece
from .states.replayable import Replayable, replay
from .states.sharded import Sharded
from .step.data_parallel import Reduce
from .step.skips import Skip
from .telemetry.coordinate_check import CoordinateCheck, Trial, coordinate_check
from .telemetry.csv_file import CsvFile
from .telemetry.flops import Flops
from .telemetry.json_lines import JsonLines
from .telemetry.measurement import Measurement
from .telemetry.monitor import Monitor
from .telemetry.noise_scale import NoiseScale
from .telemetry.report import Report
from .telemetry.spectral import SpectralNorms
from .telemetry.telemetry import Telemetry
from .telemetry.tensorboard import TensorBoardWriter
from .telemetry.terminal import Terminal
from .telemetry.weights_and_biases import WeightsAndBiases
from .whole.adafactor import Adafactor
from .whole.came import CAME
from .whole.lamb import LAMB
from .whole.lars import LARS
from .whole.muon import Muon
from .whole.shampoo import Shampoo
from .whole.soap import SOAP
from .whole.stable_adamw import StableAdamW

__all__ = [
    "CAME",
    "LAMB",
    "LARS",
    "SOAP",
    "AdaGC",
    "Adafactor",
    "Adaptive",
    "AsyncSaver",
    "Bf16Wire",
    "Binding",
    "Booster",
    "Bucket",
    "ByGroup",
    "ByName",
    "ByNorm",
    "ByPreviousNorm",
    "ByValue",
    "Clip",
    "ClipState",
    "ConstantLR",
    "CoordinateCheck",
    "CosineAnnealingLR",
    "CsvFile",
    "DataParallel",
    "Decision",
    "Exact",
    "Exchange",
    "Fingerprints",
    "Flops",
    "GlobalNorm",
    "GradStats",
    "HalfStates",
    "HoldOnSkip",
    "JsonLines",
    "LinearWarmupLR",
    "Link",
    "Measure",
    "Measurement",
    "Monitor",
    "MultiStepLR",
    "Muon",
    "NoiseScale",
    "Norms",
    "OfEachParameter",
    "Offloaded",
    "ParallelOptimizer",
    "ParameterEntry",
    "PerParameter",
    "Piece",
    "Pipeline",
    "Placement",
    "PolynomialLR",
    "Position",
    "Reduce",
    "ReductionPlan",
    "Replayable",
    "ReplicaMismatchError",
    "Report",
    "Shampoo",
    "Sharded",
    "Skip",
    "SkipSpikes",
    "SpectralNorms",
    "StableAdamW",
    "Telemetry",
    "TensorBoardWriter",
    "Terminal",
    "TorchStates",
    "Trial",
    "WarmUp",
    "WarmupLR",
    "WeightsAndBiases",
    "ZClip",
    "align_copies",
    "clip_grad_norm_",
    "clip_grad_value_",
    "coordinate_check",
    "global_norm",
    "load_checkpoint",
    "newest_checkpoint",
    "replay",
    "save_checkpoint",
    "share_weights",
    "sync_gradients",
    "take_over_clipping",
    "use_kernels",
]
