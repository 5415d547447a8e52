"""The parts of a layer's forward, one file each. They call a tracer `g` and do not depend on ranks."""
