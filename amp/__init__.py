"""Numbers: precision modes, loss scale and master weights."""

from .apex import ApexFp16 as ApexFp16
from .fp8.mode import Fp8 as Fp8
from .grad_scaler import GradScaler as GradScaler
from .loss_scale import ConstantLossScale as ConstantLossScale
from .loss_scale import DynamicLossScale as DynamicLossScale
from .loss_scale import LossScale as LossScale
from .master_weights import MasterWeights as MasterWeights
from .precision import Bf16 as Bf16
from .precision import Fp32 as Fp32
from .precision import NaiveFp16 as NaiveFp16
from .precision import Precision as Precision
from .precision import TorchFp16 as TorchFp16
from .precision import precision_of as precision_of
from .stochastic_rounding import StochasticRounding as StochasticRounding
