"""`paceline demo`: one long-tailed batch through plain vLLM and through Paceline, their tokens, a few RL steps."""
