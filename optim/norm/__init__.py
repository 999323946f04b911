"""The global norm of sharded gradients: the reduction plan, local powers, and the collectives that add powers up."""
