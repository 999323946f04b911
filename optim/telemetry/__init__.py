"""What a run is doing, as numbers: measured every few steps, reported every few steps, and where reports go."""
