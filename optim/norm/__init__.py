"""What the true norm of sharded gradients is: the plan, the powers, the one collective."""
