"""Ranks without MPI: `Supervisor` starts them on this host and on others, watches, ends and restarts them."""
