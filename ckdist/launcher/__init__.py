"""Ranks without MPI: `Supervisor` starts, watches, ends and restarts them on this host and on others."""
