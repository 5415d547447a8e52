"""What the commands can be told: one frozen dataclass per command, the single source of flags, defaults, ranges and
help.

A field carries its flags, help and range in `field(metadata=...)`, written by `option`; `ckdist.cli.arguments` turns
fields into a command line and back. Ranges are checked when a configuration is made, so Python callers get the same
errors. Nothing here looks at the machine or at a model. Flags are named as in llama-server and llama-bench where the
meaning is the same.
"""
