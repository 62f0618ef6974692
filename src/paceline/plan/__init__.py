"""What a run would gain on given hardware: the simulator and the planner."""
