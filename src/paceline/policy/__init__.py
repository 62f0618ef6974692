"""What is learnt: the objective and the learner that follows it."""
