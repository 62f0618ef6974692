"""Measurements of Paceline, one module per bench: `python -m benchmarks NAME`."""
