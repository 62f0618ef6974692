"""Whole jobs: a config in, a directory out."""
