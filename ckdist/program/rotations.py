"""The numbers of a model's rotations, by name, as steps have them."""

from ckdist import native

ROPE_TABLES = native.numbers("ckdist_rope_table", "ckdist_rope_")
NO_ROPE = ROPE_TABLES.pop("none")
