"""Who proposes: EAGLE-3, DFlash and history drafters, and how they are trained."""
