"""Planning: what fits (`memory`), what a step costs (`cost`, `measured_cost`), and how work is sharded (`layouts`)."""
