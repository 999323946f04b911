"""Parameter transforms, which let an optimizer step shards, CPU copies or float32 masters, and optimizer state dicts."""
