"""CPU and Triton kernels for sums of powers of gradients, and for updates of optimizers. `native` has the formulas."""
