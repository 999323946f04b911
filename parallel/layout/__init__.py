"""The layout of a parameter on the mesh: its spec `P`, the annotation that stores the spec, and its shards."""
