"""What stands in for a parameter in the optimizer: local tensors, pieces, copies on the CPU, masters."""
