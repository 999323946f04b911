"""What a rank holds of a tensor: the spec, how a parameter carries it, and the pieces that it makes."""
