"""How far to draft: cost model, selectors and the plan of CUDA graphs."""
