"""Mixed precision: precision modes, loss scaling and master weights."""

from .apex import ApexFp16
from .fp8 import Fp8, fp8_layers
from .loss_scale import ConstantLossScale, DynamicLossScale, GradScaler, LossScale
from .master_weights import MasterWeights
from .modes import Bf16, Fp32, Mode, NaiveFp16, Precision, TorchFp16, precision_of
from .stochastic_rounding import StochasticRounding, stochastic_round_

__all__ = [
    "ApexFp16",
    "Bf16",
    "ConstantLossScale",
    "DynamicLossScale",
    "Fp8",
    "Fp32",
    "GradScaler",
    "LossScale",
    "MasterWeights",
    "Mode",
    "NaiveFp16",
    "Precision",
    "StochasticRounding",
    "TorchFp16",
    "fp8_layers",
    "precision_of",
    "stochastic_round_",
]
