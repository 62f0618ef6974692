"""Drafters (EAGLE-3, DFlash, history) and their training."""
