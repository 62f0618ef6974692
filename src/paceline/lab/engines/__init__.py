"""vLLM engines that benches drive by hand."""
