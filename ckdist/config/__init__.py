"""Settings of the commands: one frozen dataclass per command is the only source of flags, defaults, ranges and help.

`option` writes the flags, help and range of a field to `field(metadata=...)`. `ckdist.cli.arguments` builds command
lines from fields, and configurations from command lines. Ranges are checked when a configuration is created, so Python
callers get the same errors. This package reads neither the machine nor a model. A flag that means the same as in
llama-server or llama-bench has the same name.
"""
