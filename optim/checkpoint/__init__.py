"""A run on disk, complete or not at all, for any mesh."""
