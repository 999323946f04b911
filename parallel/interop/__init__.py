"""Neighbours, one file each: `dtensor` (FSDP2, torch's tensor parallelism), `transformers`, `deepspeed` (an mpu)."""
