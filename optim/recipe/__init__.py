"""`Booster`, which prepares a training loop, and the code for its pipelines, data parallelism and trainers."""
