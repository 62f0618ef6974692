"""Who runs when: the training loop and what it conducts, over protocols."""
