"""Our side of vLLM, and the only folder that imports it."""
