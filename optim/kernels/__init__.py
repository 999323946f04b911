"""Powers of gradients and updates of optimizers in one pass over memory. `native` has the plain formulas."""
