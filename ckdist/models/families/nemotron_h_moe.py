"""Nemotron 3 Nano: Nemotron-H with experts. Its config.json is that of nemotron_h, its GGUF architecture is its own."""

from ckdist.models.families import nemotron_h

FAMILY = nemotron_h.FAMILY
