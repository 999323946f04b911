"""Named mesh axes, the process groups along them, checks over all ranks, and collectives."""
