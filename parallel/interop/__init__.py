"""Neighbours, one file each: `dtensor` (FSDP2, torch's tensor parallelism), `deepspeed` (an mpu)."""
