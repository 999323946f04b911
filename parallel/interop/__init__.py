"""Neighbours, one file each: `dtensor` (FSDP2, torch's tensor parallelism), `transformers` (its plans), `deepspeed` (an
mpu), `megatron` (flags).

`audit` compares what any of them said with values and gradients.
"""
