"""Completion scripts, run by the shells themselves."""

import contextlib
import os
import pty
import select
import shutil
import signal
import subprocess
import time

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
        ("ckdist serve --transport ", ["auto", "verbs", "mpi", "tcp"]),
        ("ckdist generate --pro", ["--prompt-tiles", "--prompt"]),
        ("ckdist completion f", ["fish"]),
        ("ckdist pull smol", ["smollm2"]),
    ],
)
def test_bash_completes(script, tmp_path, line, wanted):
    words = line.split(" ")
    ask = f'source {script("bash")}; cd {tmp_path}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ckdist'
    assert said("bash", "-c", f'{ask}; echo "${{COMPREPLY[@]}}"', "bash", *words) == wanted


@contextlib.contextmanager
def interactive_zsh(folder, setup: str):
    """A zsh at a terminal, as a user has it; a function that types and gives what is shown until `wanted` is."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.execve(shutil.which("zsh"), ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "", "COLUMNS": "200"})

    def type_in(keys: str, wanted: str) -> str:
        os.write(terminal, keys.encode())
        shown, until = "", time.monotonic() + 30
        while wanted not in shown:
            assert time.monotonic() < until, f"zsh shows {shown!r} and not {wanted!r}"
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
        return shown

    try:
        type_in(f"{setup}; echo rea''dy\n", "ready")
        yield type_in
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
@pytest.mark.parametrize("installed", ["sourced", "in fpath"])
def test_zsh_completes(script, tmp_path, installed):
    load = "autoload -Uz compinit; zstyle ':completion:*' menu no; setopt nobeep"
    if installed == "sourced":
        setup = f"{load}; compinit -D -u; source {script('zsh')}"
    else:
        (tmp_path / "functions").mkdir()
        shutil.copy(script("zsh"), tmp_path / "functions/_ckdist")
        setup = f"{load}; fpath=({tmp_path}/functions $fpath); compinit -D -u"
    clear = "\x15"  # ^U: an empty line
    with interactive_zsh(tmp_path, setup) as type_in:
        type_in("ckdist per\t", "ckdist perplexity")
        type_in(f"{clear}ckdist completion f\t", "completion fish")
        type_in(f"{clear}ckdist generate --promp\t", "--prompt")
        shown = type_in(f"{clear}ckdist serve --transport \t", "verbs")
        assert "auto" in shown and "tcp" in shown


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
