"""`ckdist COMMAND [flags]`: finds the command, reads its flags, and turns every expected failure into one line and an
exit code.

Exit codes: 0 done, 1 something broke while running, 2 the user's mistake, 130 interrupted, 141 standard output was
closed.
"""

import contextlib
import gc
import importlib
import logging
import os
import sys
import time
from types import ModuleType

from ckdist import __version__, native
from ckdist.cli.arguments import parse_arguments
from ckdist.errors import CkdistError, ConfigError, EngineError, FetchError, UserError
from ckdist.terminal import styled

# Each command: its configuration in `ckdist.config`, of which only one is loaded, and what it does.
COMMANDS = {
    "serve": ("serve:ServeConfig", "answer the OpenAI API over HTTP"),
    "generate": ("generate:GenerateConfig", "continue one prompt on the terminal"),
    "chat": ("chat:ChatConfig", "chat with a model on the terminal"),
    "perplexity": ("perplexity:PerplexityConfig", "score a text, or save its logits"),
    "pull": ("commands:PullCommand", "fetch a model by its name"),
    "list": ("commands:ListCommand", "show the models that have names, and which are here"),
    "train": ("commands:TrainCommand", "train a model, from nothing or on from one"),
    "launch": ("launch:LaunchCommand", "start a command as several ranks, here or on several hosts, without MPI"),
    "export": ("commands:ExportCommand", "write a trained folder as a GGUF file"),
    "plan": ("plan:PlanConfig", "tell whether a model fits, how fast it will be, and what would help, on any machine"),
    "bench": ("bench:BenchConfig", "measure prefill and decode, or the machine itself"),
    "simulate": ("simulate:SimulateConfig", "serve requests in simulated time, on as many hosts as you like"),
    "simulate-training": (
        "simulate_training:SimulateTrainingConfig",
        "train over many hosts in simulated time, failures included",
    ),
    "doctor": ("commands:DoctorConfig", "show this machine, what works on it, how fast it is, and what to change"),
    "completion": ("commands:CompletionCommand", "print what bash, zsh or fish need to complete commands"),
}
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def settings_class(command: str) -> type:
    """The configuration of one of COMMANDS."""
    module, _, name = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(f"ckdist.config.{module}"), name)


def usage() -> str:
    """What `ckdist --help` prints."""
    lines = [
        f"ckdist {__version__}: serve and train large language models on CPU servers",
        "",
        "usage: ckdist COMMAND [flags]",
        "       ckdist launch -n RANKS ckdist COMMAND [flags]",
        "       mpirun -n RANKS ckdist COMMAND [flags]",
        "",
    ]
    lines += [f"  {name:<19s}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "ckdist COMMAND --help tells a command's flags."])


def launched_rank() -> int | None:
    """This process's rank as its launcher tells it, before any MPI call; None without a launcher."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def report(error: BaseException, rank: int | None) -> None:
    """The one line.

    A mistake of the user's, or a model that cannot be fetched, meets every rank alike: rank 0 says it, and the others
    keep quiet while it does.
    """
    shared = isinstance(error, (UserError, FetchError))
    if shared and rank:
        # the launcher ends this process as soon as rank 0 has; if rank 0 is well, the mistake is this rank's own
        time.sleep(1.0)
    name = "" if rank is None or (rank == 0 and shared) else f"rank {rank}: "
    if sys.stderr is not None:  # print would take standard output instead
        with contextlib.suppress(OSError):
            print(f"{styled('ckdist:', 'error', sys.stderr)} {name}{error}", file=sys.stderr, flush=True)


def load(command: str) -> ModuleType:
    """A command's module. What modules make stays, so nothing of it is looked at as garbage, now or later."""
    gc.disable()
    module = importlib.import_module(f"ckdist.cli.{command.replace('-', '_')}")
    gc.freeze()
    gc.enable()
    return module


def run(arguments: list[str], rank: int | None) -> int:
    """What the words ask for; the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        if not rank:
            print(__version__ if arguments[:1] == ["--version"] else usage())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        raise ConfigError(f"unknown command {arguments[0]!r}: use one of {', '.join(COMMANDS)}")
    settings = parse_arguments(settings_class(arguments[0]), arguments[1:], f"ckdist {arguments[0]}")
    level = logging.DEBUG if settings.verbose else logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    command = load(arguments[0])
    native.isa()  # a CKDIST_ISA that this CPU lacks is told before anything starts
    from ckdist.cli.local_ranks import run_ranks

    ranks = run_ranks(settings, arguments)
    return command.run(settings) if ranks is None else ranks


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    rank = launched_rank()
    try:
        code = run(arguments, rank)
        if sys.stdout is not None:
            sys.stdout.flush()
    except CkdistError as error:
        report(error, rank)
        code = 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 141
    except OSError as error:
        # a full disk behind standard output, no more processes
        report(EngineError(f"the system refused: {error}"), rank)
        code = 1
    if code:
        # A failed rank's peers may be gone: nothing may wait for them on the way out.
        with contextlib.suppress(OSError):  # the reader has gone
            if sys.stdout is not None:
                sys.stdout.flush()
        os._exit(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
