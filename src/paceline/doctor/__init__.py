"""Check that this machine can run a config: each check passes, fails with advice, or is skipped with a reason."""
