"""Support for third-party libraries: `dtensor` (FSDP2, torch's tensor parallelism), `transformers`, `deepspeed`,
`megatron`, `accelerate`.

`audit` compares the layouts that these modules declare with the values and gradients of the parameters.
"""
