"""One file for each `paceline bench NAME`."""
