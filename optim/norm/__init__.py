"""The global norm of sharded gradients: the reduction plan, local powers, and one collective."""
