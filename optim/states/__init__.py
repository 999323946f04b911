"""Parameter transforms (local tensors, shards, CPU copies, masters) and optimizer state dicts."""
