"""The FSDP2 learner: objective, correction of the mismatch, guard, hidden states and checkpoints."""
