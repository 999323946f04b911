"""The step: global gradient norm, clipping and the parallel optimizer."""
