"""Every private part of vLLM that Paceline touches, one file a subject."""
