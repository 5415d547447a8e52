"""`ckdist completion SHELL`: prints a completion script for bash, zsh or fish.

The script is built from the parsers of the command line, so it has every command and flag.
"""

import shlex
from dataclasses import dataclass

from ckdist.cli.arguments import parser_for
from ckdist.cli.main import COMMANDS, settings_class
from ckdist.config.commands import CompletionCommand
from ckdist.errors import ConfigError
from ckdist.hub.catalogue import CATALOGUE

BASH = """\
# ckdist for bash: source <(ckdist completion bash)
_ckdist() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local words= files=yes
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "%(commands)s --help --version" -- "$word"))
        return
    fi
    case "$command $before" in
%(values)s
    esac
    if [[ -z $words ]]; then
        case "$command" in
%(flags)s
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ $word == -* || $files == no ]] || COMPREPLY+=($(compgen -f -- "$word"))
}
complete -o filenames -F _ckdist ckdist
"""

ZSH = """\
#compdef ckdist
# ckdist for zsh: ckdist completion zsh > "${fpath[1]}/_ckdist"
_ckdist() {
    local -a commands
    commands=(
%(commands)s
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
%(arguments)s
    esac
}
if [ "$funcstack[1]" = _ckdist ]; then _ckdist "$@"; else compdef _ckdist ckdist; fi
"""


@dataclass(frozen=True)
class Argument:
    """A flag or positional argument of a command."""

    names: tuple[str, ...]  # empty for a positional argument
    help: str
    values: tuple[str, ...]  # all values if they are few, else empty
    files: bool  # the value may be the name of a file
    takes_value: bool  # False for a switch


def arguments_of(command: str) -> list[Argument]:
    """Returns all arguments of a command, `--help` first."""
    found = []
    for action in parser_for(settings_class(command), f"ckdist {command}").arguments:
        names = tuple(action.option_strings)
        takes_value = action.nargs != 0
        values = tuple(str(value) for value in action.choices or ())
        files = takes_value and not values
        if action.dest in ("model", "name"):
            values, files = tuple(CATALOGUE), action.dest == "model"
        found.append(Argument(names, (action.help or "").replace("%%", "%"), values, files, takes_value))
    return found


def bash() -> str:
    """Returns the script for bash."""
    values, flags = [], []
    for command in COMMANDS:
        words = []
        for argument in arguments_of(command):
            words += argument.names or argument.values
            if argument.names and argument.values:
                patterns = "|".join(f'"{command} {name}"' for name in argument.names)
                also = "" if argument.files else " files=no"
                values.append(f"        {patterns}) words={shlex.quote(' '.join(argument.values))}{also} ;;")
        flags.append(f"            {command}) words={shlex.quote(' '.join(words))} ;;")
    return BASH % {"commands": " ".join(COMMANDS), "values": "\n".join(values), "flags": "\n".join(flags)}


def zsh() -> str:
    """Returns the script for zsh."""
    escaped = lambda text: text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    commands = [f"        {shlex.quote(f'{name}:{escaped(text)}')}" for name, (_, text) in COMMANDS.items()]
    arguments = []
    for command in COMMANDS:
        specs = []
        for argument in arguments_of(command):
            ending = ":value:_files" if argument.files else f":value:({' '.join(argument.values)})"
            ending = ending if argument.takes_value else ""
            described = f"[{escaped(argument.help)}]" if argument.names else ""
            specs += [shlex.quote(f"{name}{described}{ending}") for name in argument.names or ("*",)]
        lines = " \\\n                ".join(specs)
        arguments.append(f"        {command})\n            _arguments -s \\\n                {lines}\n            ;;")
    return ZSH % {"commands": "\n".join(commands), "arguments": "\n".join(arguments)}


def fish() -> str:
    """Returns the script for fish."""
    lines = ["# ckdist for fish: ckdist completion fish > ~/.config/fish/completions/ckdist.fish"]
    for name, (_, text) in COMMANDS.items():
        lines.append(f"complete -c ckdist -n __fish_use_subcommand -f -a {name} -d {quoted_for_fish(text)}")
    for command in COMMANDS:
        for argument in arguments_of(command):
            words = [f"complete -c ckdist -n '__fish_seen_subcommand_from {command}'"]
            for name in argument.names:
                kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
                words.append(f"{kind} {name.lstrip('-')}")
            if argument.values:
                kind = "-r " if argument.files else "-x " if argument.names else "-f "
                words.append(f"{kind}-a {quoted_for_fish(' '.join(argument.values))}")
            elif argument.takes_value and argument.names:
                words.append("-r")
            elif not argument.names:
                continue
            lines.append(" ".join([*words, f"-d {quoted_for_fish(argument.help)}"]))
    return "\n".join(lines) + "\n"


def quoted_for_fish(text: str) -> str:
    """Quotes `text` as one word of fish, which has two escapes inside single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def run(command: CompletionCommand) -> int:
    """Prints the script. Returns 0. Raises ConfigError if no shell is given."""
    if command.shell is None:
        raise ConfigError("no shell is given: use ckdist completion bash, zsh or fish")
    print(SHELLS[command.shell](), end="")
    return 0
