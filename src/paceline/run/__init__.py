"""Who runs when: the loop, its bookkeeping, and the processes that it runs in."""
