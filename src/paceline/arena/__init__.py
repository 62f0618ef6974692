"""A real small workload: a task with verifiable answers, and policies trained for it."""
