"""Settings of the commands: one frozen dataclass per command is the only source of flags, defaults, ranges and help.

`option` declares a setting: its flags, help, type and range are the metadata of a dataclass field. The fields of
`ckdist train` and of machine files are declared with it too. `ckdist.cli.arguments` builds command lines from fields,
and configurations from command lines. `Settings` checks the values when a configuration is created, so Python callers
get the same errors. This package reads neither the machine nor a model. A flag that means the same as in
llama-server or llama-bench has the same name.
"""
