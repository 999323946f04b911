"""Initialise `torch.distributed` under any launcher."""

from .start import Launch as Launch
from .start import get_dist_logger as get_dist_logger
from .start import init_distributed as init_distributed
