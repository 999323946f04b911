"""What is done with gradients that are too long."""
