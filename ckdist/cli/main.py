"""`ckdist COMMAND [flags]`: runs a command, and turns every expected failure into one line and an exit code.

Exit codes: 0 success, 1 failure at run time, 2 user's mistake, 130 interrupted, 141 standard output was closed.
"""

import contextlib
import importlib
import logging
import os
import sys
import time
from typing import NoReturn

from ckdist import __version__, native
from ckdist.cli.arguments import escaped, is_in_environment, parse_arguments
from ckdist.cli.frozen_import import frozen_import
from ckdist.ended_threads import raise_priorities
from ckdist.errors import CkdistError, ConfigError, EngineError, FetchError, UserError

# Command -> (its class in `ckdist.config`, imported on demand; its line of help).
COMMANDS = {
    "serve": ("serve_config:ServeConfig", "answer the OpenAI API over HTTP"),
    "generate": ("generate_config:GenerateConfig", "continue one prompt on the terminal"),
    "chat": ("chat_config:ChatConfig", "chat with a model on the terminal"),
    "batch": ("batch_config:BatchConfig", "answer a file of requests, and continue where it stopped"),
    "status": ("status_config:StatusConfig", "show the state, load and ranks of a running server"),
    "perplexity": ("perplexity_config:PerplexityConfig", "score a text, or save its logits"),
    "pull": ("commands:PullCommand", "fetch a model by its name"),
    "list": ("commands:ListCommand", "list named models, and those already fetched"),
    "cache": ("commands:CacheCommand", "list, verify or prune the prompts that --cache-disk has kept"),
    "train": ("commands:TrainCommand", "train a model from scratch, or fine-tune one"),
    "tune": ("tuning_commands:TuneCommand", "fine-tune a model on chats or texts, without a configuration file"),
    "distill": ("distill_config:DistillConfig", "write a teacher's probabilities of the tokens that a training learns"),
    "evaluate": ("distill_config:EvaluateConfig", "measure the loss of a model on the tokens that a training learns"),
    "merge": ("tuning_commands:MergeCommand", "write a model with an adapter added to its weights"),
    "push": ("tuning_commands:PushCommand", "load an adapter into a running server"),
    "data": ("tuning_commands:DataCommand", "check data files, and show the tokens that a training learns"),
    "launch": (
        "launch_config:LaunchCommand",
        "start a command as several ranks, here or on several hosts, without MPI",
    ),
    "export": ("commands:ExportCommand", "write a trained folder as a GGUF file"),
    "plan": ("plan_config:PlanConfig", "predict memory and speed of a model on any machine, and compare improvements"),
    "bench": ("bench_config:BenchConfig", "measure prefill and decode, or the machine itself"),
    "simulate": ("simulate_config:SimulateConfig", "serve requests in simulated time, on any number of hosts"),
    "simulate-training": (
        "simulate_training_config:SimulateTrainingConfig",
        "train over many hosts in simulated time, failures included",
    ),
    "doctor": ("commands:DoctorConfig", "show this machine, the features that work, its speed, and advice"),
    "completion": ("commands:CompletionCommand", "print a completion script for bash, zsh or fish"),
}
MODULES = {
    "batch": "batch_command",
    "cache": "prompt_caches",
    "data": "data_check",
    "status": "server_status",
}  # of commands whose module has another name
log = logging.getLogger(__name__)

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def settings_class(command: str) -> type:
    """Imports the configuration class of one of COMMANDS."""
    module, _, name = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(f"ckdist.config.{module}"), name)


def usage() -> str:
    """Returns the text of `ckdist --help`."""
    lines = [
        f"ckdist {__version__}: serve and train large language models on CPU servers",
        "",
        "usage: ckdist COMMAND [flags]",
        "       ckdist launch -n RANKS ckdist COMMAND [flags]",
        "       mpirun -n RANKS ckdist COMMAND [flags]",
        "",
    ]
    lines += [f"  {name:<19s}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "ckdist COMMAND --help lists the flags of a command."])


def launched_rank() -> int | None:
    """Returns this process's rank from its launcher's variables, before any MPI call; None without a launcher."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def report(error: BaseException, rank: int | None) -> None:
    """Prints an error as one line.

    A user's mistake or a failed fetch occurs on every rank. Rank 0 reports it while the others wait.
    """
    shared = isinstance(error, (UserError, FetchError))
    if shared and rank:
        # The launcher ends this process as soon as rank 0 exits. If rank 0 is well, only this rank has the error.
        time.sleep(1.0)
    name = "" if rank is None or (rank == 0 and shared) else f"rank {rank}: "
    if sys.stderr is not None:  # print(file=None) would write to standard output
        from ckdist.terminal import styled

        with contextlib.suppress(OSError):
            print(f"{styled('ckdist:', 'error', sys.stderr)} {name}{escaped(str(error))}", file=sys.stderr, flush=True)


def run(arguments: list[str], rank: int | None) -> int:
    """Runs the command in `arguments`. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        if not rank:
            print(__version__ if arguments[:1] == ["--version"] else usage())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        raise ConfigError(f"unknown command {arguments[0]!r}: use one of {', '.join(COMMANDS)}")
    settings = parse_arguments(settings_class(arguments[0]), arguments[1:], f"ckdist {arguments[0]}")
    level = logging.DEBUG if settings.verbose else logging.WARNING if rank else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    if not rank and is_in_environment():
        from ckdist.config.given_elsewhere import misspelt_variables

        for line in misspelt_variables(type(settings), os.environ):
            log.warning("%s", line)
    command = frozen_import(f"ckdist.cli.{MODULES.get(arguments[0], arguments[0].replace('-', '_'))}")
    native.isa()  # raises for a CKDIST_ISA that this CPU lacks, before anything starts
    from ckdist.cli.command_ranks import run_ranks

    ranks = run_ranks(settings, arguments)
    return command.run(settings) if ranks is None else ranks


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    rank = 0
    try:
        if "CKDIST_WARM" in os.environ:  # returns in the ranks that it forks
            importlib.import_module("ckdist.cli.warm_ranks").fork_ranks(*arguments[:1])
        rank = launched_rank()
        code = run(arguments, rank)
        if sys.stdout is not None:
            sys.stdout.flush()
    except CkdistError as error:
        report(error, rank)
        code = 2 if isinstance(error, UserError) else 1
    except UnicodeEncodeError as error:  # an argument with bytes of another encoding
        name = error.object[max(0, error.start - 80) : error.end]
        report(ConfigError(f"{name!r} is not valid Unicode: rename the file or folder"), rank)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 141
    except OSError as error:
        # standard output is on a full disk, or the process limit is reached
        report(EngineError(f"the system refused: {error}"), rank)
        code = 1
    if code:
        # The peers of a failed rank may be gone, so exit handlers that wait for them are skipped.
        with contextlib.suppress(OSError):  # the reader has gone
            if sys.stdout is not None:
                sys.stdout.flush()
        raise_priorities(os.getpid())
        os._exit(code)
    return 0


def command() -> NoReturn:
    """The program `ckdist`."""
    from ckdist.process_end import end_process

    code = main()
    end_process(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
