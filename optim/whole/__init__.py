"""Optimizers whose update needs the full tensor, for sharded parameters, and their base classes."""

from .any_optimizer import AnyOptimizer, whole
from .at_home import HomeOptimizer
from .exchange import Homes, Matrix
from .layout import LogicalTensor
from .muon import Muon
from .optimizer import Slot, Update, WholeOptimizer
from .shampoo import Shampoo
from .soap import SOAP
from .tensors import WholeTensors

__all__ = [
    "SOAP",
    "AnyOptimizer",
    "HomeOptimizer",
    "Homes",
    "LogicalTensor",
    "Matrix",
    "Muon",
    "Shampoo",
    "Slot",
    "Update",
    "WholeOptimizer",
    "WholeTensors",
    "whole",
]
