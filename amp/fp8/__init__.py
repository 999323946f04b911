"""8-bit linear layers: the precision mode, the layer, quantized tensors, and SUMMA in 8 bits."""

from .mode import Fp8 as Fp8
from .mode import fp8_layers as fp8_layers
