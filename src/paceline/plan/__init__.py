"""Planner and simulator: the expected gain of a run on given hardware."""
