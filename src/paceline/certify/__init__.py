"""Whether speculation is lossless, shown on the user's own engine."""
