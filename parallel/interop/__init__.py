"""Support for other libraries.

`dtensor` supports FSDP2 and torch's tensor parallelism. `transformers`, `deepspeed` and `megatron` support the libraries of
these names. `audit` compares declared layouts with the values and gradients of the parameters.
"""
