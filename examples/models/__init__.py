"""The models that the examples train, each written for one process and for a mesh."""
