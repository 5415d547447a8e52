"""The numbers of `enum ckdist_rope_table` by name, for the steps that rotate."""

from ckdist import native

ROPE_TABLES = native.numbers("ckdist_rope_table", "ckdist_rope_")
NO_ROPE = ROPE_TABLES.pop("none")
