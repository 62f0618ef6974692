"""Verify losslessness of speculation on the user's engine."""
