"""Checks that a parallel model computes the right loss and gradients, with or without a dense model for comparison."""
