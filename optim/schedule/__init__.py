"""Learning rates that move when a step was taken."""
