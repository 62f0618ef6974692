"""Engines and learner as Ray actors. The only room that imports ray."""
