"""Optimizers whose update of a tensor needs all of it, on tensors that ranks have pieces of."""
