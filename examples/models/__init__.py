"""The models of the examples, each for one process and for a mesh."""
