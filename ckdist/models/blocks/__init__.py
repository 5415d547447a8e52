"""The pieces of forward, a file each. They are written against a tracer `g` and say nothing about ranks."""
