"""A real small workload, on which everything is measured."""
