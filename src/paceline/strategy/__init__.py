"""How far to draft: what an engine step costs, what a draft yields, and the draft length that follows from both."""
