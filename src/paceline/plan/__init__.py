"""Predict the gain of a run on given hardware: simulator and planner."""
