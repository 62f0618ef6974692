"""Jobs that turn a config into a directory."""
