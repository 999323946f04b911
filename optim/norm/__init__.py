"""The global norm of sharded gradients: the reduction plan, sums of |g|^p on each rank, and their collectives."""
