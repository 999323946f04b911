"""Numbers: precision modes, loss scale and master weights."""
