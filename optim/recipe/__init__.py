"""The training recipe: `Booster` and its parts."""
