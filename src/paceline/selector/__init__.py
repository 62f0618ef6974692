"""Draft length selection: cost model, selectors and CUDA graph planning."""
