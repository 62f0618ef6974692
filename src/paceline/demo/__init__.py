"""`paceline demo`: one long-tailed batch through plain vLLM and through Paceline, a certificate, a few RL steps."""
