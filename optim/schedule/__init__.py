"""Learning-rate schedules that move only when the optimizer took a step."""

from .hold import HoldOnSkip as HoldOnSkip
from .schedules import ConstantLR as ConstantLR
from .schedules import CosineAnnealingLR as CosineAnnealingLR
from .schedules import LinearWarmupLR as LinearWarmupLR
from .schedules import MultiStepLR as MultiStepLR
from .schedules import PolynomialLR as PolynomialLR
from .schedules import WarmupLR as WarmupLR
