"""Optimizers whose update of a tensor needs all of it, on tensors that ranks have pieces of; and what to write one with."""

from .homes import Homes
from .layout import LogicalTensor
from .muon import Muon
from .optimizer import Slot, Update, WholeOptimizer
from .rounds import Matrix
from .tensors import WholeTensors

__all__ = ["Homes", "LogicalTensor", "Matrix", "Muon", "Slot", "Update", "WholeOptimizer", "WholeTensors"]
