"""CPU and Triton kernels for sums of powers of gradients, optimizer updates (formulas in `native`), and rounding."""
