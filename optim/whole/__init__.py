"""Optimizers whose update needs the full tensor, for sharded parameters, and their base classes."""

from .any_optimizer import AnyOptimizer, whole
from .exchange import Homes, Matrix
from .muon import Muon
from .optimizer import HomeOptimizer, Slot, Update, WholeOptimizer
from .shampoo_soap import SOAP, Shampoo
from .tensors import LogicalTensor, WholeTensors

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
