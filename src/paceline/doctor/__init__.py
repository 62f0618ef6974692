"""What works on this machine with this config, check by check: passed, failed with what to do next, or skipped."""
