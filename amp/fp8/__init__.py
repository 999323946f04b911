"""Linear layers in 8 bits: the mode, the layer, the tensors, and SUMMA."""

from .mode import Fp8 as Fp8
from .mode import fp8_layers as fp8_layers
