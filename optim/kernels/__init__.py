"""CPU and Triton kernels for gradient norms, optimizer updates and stochastic rounding."""
