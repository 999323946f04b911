"""Powers of gradients and updates of optimizers in one pass over memory; see `native` for how and `reference` for what."""
