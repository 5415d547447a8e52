"""Completion scripts, run by the shells themselves."""

import shutil
import subprocess

import pytest

from ckdist.cli.completion import SHELLS, arguments_of
from ckdist.cli.main import COMMANDS


def said(*words: str) -> list[str]:
    """The lines of a program's output."""
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout.split()


@pytest.fixture
def script(tmp_path):
    def write(shell: str) -> str:
        path = tmp_path / f"ckdist.{shell}"
        path.write_text(SHELLS[shell]())
        return str(path)

    return write


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ckdist per", ["perplexity"]),
        ("ckdist serve --transport ", ["auto", "mpi", "verbs", "tcp"]),
        ("ckdist generate --pro", ["--prompt"]),
        ("ckdist completion f", ["fish"]),
        ("ckdist pull smol", ["smollm2"]),
    ],
)
def test_bash_completes(script, tmp_path, line, wanted):
    words = line.split(" ")
    ask = f'source {script("bash")}; cd {tmp_path}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ckdist'
    assert said("bash", "-c", f'{ask}; echo "${{COMPREPLY[@]}}"', "bash", *words) == wanted


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_scripts(script, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert not said(shell, "-n", script(shell))
    if shell == "fish":
        found = said("fish", "--no-config", "-c", f"source {script('fish')}; complete -C 'ckdist serve --transpor'")
        assert found[0] == "--transport"


def test_every_flag_of_every_command_is_there():
    texts = {shell: write() for shell, write in SHELLS.items()}
    for command in COMMANDS:
        for argument in arguments_of(command):
            for name in argument.names:
                assert name in texts["bash"] and name in texts["zsh"]
                assert f" {name.lstrip('-')} " in texts["fish"], name
