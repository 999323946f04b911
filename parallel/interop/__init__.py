"""Neighbours, one file each: `dtensor` (FSDP2, torch's tensor parallelism), `deepspeed` (an mpu), `megatron` (flags).

`audit` compares what any of them said with values and gradients.
"""
