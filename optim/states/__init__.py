"""Transforms that replace parameters by stepped tensors (shards, CPU copies, float32 masters), and optimizer states."""
