"""Nemotron 3 Nano: Nemotron-H with experts. Its config.json is that of nemotron_h, its GGUF architecture is its own."""

from dataclasses import replace

from ckdist.models.families import nemotron_h

NAME = "nemotron_h_moe"
FAMILY = replace(nemotron_h.FAMILY, name=NAME, architectures=(), model_types=(), gguf=NAME)
