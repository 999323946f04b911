"""Learning rates that move when a step was taken."""

from .hold_on_skip import HoldOnSkip as HoldOnSkip
from .schedules import ConstantLR as ConstantLR
from .schedules import CosineAnnealingLR as CosineAnnealingLR
from .schedules import LinearWarmupLR as LinearWarmupLR
from .schedules import MultiStepLR as MultiStepLR
from .schedules import PolynomialLR as PolynomialLR
from .warmup_lr import WarmupLR as WarmupLR
