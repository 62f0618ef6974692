"""Who proposes: drafters, and what trains them."""
