"""Published speed-ups, and their predictions by the simulator behind `paceline plan`."""
