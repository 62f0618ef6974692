"""Stock TRL in processes of its own, for comparison."""
