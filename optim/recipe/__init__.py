"""`Booster`, which prepares a training loop; `Pipeline`; data parallelism; clipping in accelerate and `Trainer`."""
