"""Why to believe it: the measuring contract, the simulated loop and the report."""
