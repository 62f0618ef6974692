"""Training loop and its parts, over protocols."""
