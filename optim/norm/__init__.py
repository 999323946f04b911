"""The global norm of sharded gradients (reduction plan, sums of |g|^p on each rank, collectives), and replica checks."""
