"""CPU and Triton kernels for gradient norms, optimizer updates (formulas in `native`), and stochastic rounding."""
