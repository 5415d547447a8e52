"""Planning: memory (`memory`), cost of a step (`cost`, `measured_cost`), and sharding of work (`layouts`)."""
