"""The layout of a parameter on the mesh: the spec, its annotation on a tensor, and the shards that it defines."""
