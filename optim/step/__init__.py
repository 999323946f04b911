"""A window of micro-batches from its first backward to its update."""
