"""Stands before matplotlib in the path of processes that tests start."""

raise ImportError("processes of tests draw no pictures")
