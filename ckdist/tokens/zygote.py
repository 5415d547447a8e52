"""`python -m ckdist.tokens.zygote`: loads a hostile tokenizer under limits, then forks workers that have it loaded.

Its standard input is a socket of messages: the settings (JSON), then commands of one letter and a number. It writes the
vocabulary, or the reason why there is none, to its standard output and closes it. `ckdist.tokens.confined` is the other
side.
"""

import gc
import importlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from ckdist.errors import UserError, one_line
from ckdist.prctl import die_with_parent
from ckdist.tokens import worker_frames
from ckdist.tokens.chat_template import ChatTemplate, with_template
from ckdist.tokens.confining import confine_loading, confine_working
from ckdist.tokens.probe import probe
from ckdist.tokens.process_limits import REMEDY, Confinement, Limits, LogHandler, give_up_privileges, start_nothing
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.tool_format import ToolFormat
from ckdist.tokens.traits import Traits
from ckdist.tokens.tried import was_tried

log = logging.getLogger(__name__)

Handler = Callable[[Tokenizer, dict[str, Any], bytes], tuple[Any, bytes]]

REAP_SECONDS = 0.5
TRYING = Limits(cpu=1.0, memory=512 << 20)  # for a chat template: published ones take a tenth
FORK, KILL, STATUS = b"F", b"K", b"S"  # followed by the worker's number; FORK brings the worker's socket
MAX_SETTINGS = 1 << 18  # bytes; a chat template among them
STATUS_SECONDS = 1.0  # for a worker to end after its socket was closed
KEPT_SIGNALS = 256


def main() -> None:
    """Loads the tokenizer, reports the result, and forks workers until the owner closes its side."""
    control = socket.socket(fileno=0)
    if not (text := control.recv(MAX_SETTINGS)):
        return  # the owner has ended
    settings = json.loads(text)
    die_with_parent(settings["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which ends this process or continues
    # A panic of the tokenizers library writes many lines to descriptor 2. Python's log still goes to standard error.
    handlers = [LogHandler(os.fdopen(os.dup(2), "w"))]
    logging.basicConfig(level=settings["level"], format=settings["format"], handlers=handlers)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    give_up_privileges()
    handler = _named(settings["handler"])
    status = FileIO("/proc/self/status")
    model = Path(settings["model"])
    is_tried = model.is_dir() and was_tried(model)  # this process cannot read the user's cache once it is confined
    confine_loading(model, handler is not None)
    limits = Limits(*settings["limits"])
    result, tokenizer = _load(settings["model"], settings["overrides"], limits, status, is_tried)
    if tokenizer is not None and handler is not None:
        tokenizer = with_template(tokenizer)
        if tokenizer.chat_template is not None:
            _try_templates(tokenizer.chat_template, status)
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(null, 1)
        output.write(result)
    if tokenizer is not None and handler is not None:
        _fork_on_demand(control, tokenizer, handler, status)


def _named(name: str | None) -> Handler | None:
    """Imports the handler `module:function`."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _load(
    model: str, overrides: dict[str, Any], limits: Limits, status: FileIO, is_tried: bool
) -> tuple[bytes, Tokenizer | None]:
    """The message to the owner, and the tokenizer if it was loaded. `is_tried`: it has passed `probe` earlier."""
    confinement = Confinement(status)
    confinement.arm(limits)
    try:
        tokenizer = tokenizer_of(model, overrides)
        if not is_tried:
            probe(tokenizer, model)
        # Computed once here, so that workers have them.
        _ = tokenizer.most_bytes_per_token, tokenizer.control_text, tokenizer.encode("", parse_special=False)
        return worker_frames.packed({"vocabulary": tokenizer.to_bytes()}), tokenizer
    except UserError as error:
        refused = str(error)
    except BaseException as error:  # a panic in the library is a BaseException
        why = f"{type(error).__name__}: {one_line(error)}"
        refused = f"the tokenizer of {model} does not load ({why}); {REMEDY}"
    finally:
        confinement.disarm()
    refused = refused.encode(errors="backslashreplace").decode()  # the model's name may have any bytes
    return worker_frames.packed({"refused": refused}), None  # without limits: memory may have run out


def _try_templates(template: ChatTemplate, status: FileIO) -> None:
    """Compiles and tries each template in a child first. A template that kills the child is refused.

    The others are then compiled here, for all workers.
    """
    for name in template.sources:
        look = lambda name=name: [asdict(template.traits(name)), asdict(template.tool_format(name))]
        found = _in_child(look, TRYING, status)
        if found is None:
            template.adopt(name, None)
        else:
            template.adopt(name, Traits(**found[0]), ToolFormat(**found[1]))


def _in_child(function: Callable[[], Any], limits: Limits, status: FileIO) -> Any:
    """The result of `function`, sent as JSON by a child process with limits. None if the limits ended the child."""
    reading, writing = os.pipe()
    confinement = Confinement(status)
    zygote, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            die_with_parent(zygote)
            confinement.arm(limits)
            confine_working()
            os.write(writing, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return json.loads(data) if data else None


def _fork_on_demand(control: socket.socket, tokenizer: Tokenizer, handler: Handler, status: FileIO) -> None:
    """Forks, kills and reports workers until the owner closes its side."""
    workers: dict[int, int] = {}  # number: process
    signals: dict[int, int] = {}  # number of an ended worker: the signal that ended it, 0 without one
    gc.collect()
    gc.freeze()  # loaded objects stay shared with the workers
    control.settimeout(REAP_SECONDS)
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        except TimeoutError:
            _reap(workers, signals)
            continue
        if not data:
            return
        _reap(workers, signals)
        command, number = data[:1], int(data[1:])
        if command == KILL and number in workers:
            os.kill(workers[number], signal.SIGKILL)  # not reaped yet, so the number is still this process'
        elif command == FORK:
            zygote, confinement = os.getpid(), Confinement(status)
            pid = os.fork()
            if pid == 0:
                try:
                    die_with_parent(zygote)
                    control.close()
                    _work(socket.socket(fileno=descriptors[0]), tokenizer, handler, confinement)
                except ConnectionError:  # the owner has gone
                    pass
                except Exception as error:
                    log.warning("a text worker has failed: %s: %s", type(error).__name__, error)
                finally:
                    os._exit(0)
            workers[number] = pid
            os.close(descriptors[0])
        elif command == STATUS:
            control.send(b"%d" % _signal_of(number, workers, signals))


def _signal_of(number: int, workers: dict[int, int], signals: dict[int, int]) -> int:
    """The signal that ended a worker; 0 if it ended by itself or still runs."""
    deadline = time.monotonic() + STATUS_SECONDS
    while number in workers and time.monotonic() < deadline:
        time.sleep(0.001)
        _reap(workers, signals)
    return signals.get(number, 0)


def _reap(workers: dict[int, int], signals: dict[int, int]) -> None:
    """Collects ended workers and keeps the signals of the last KEPT_SIGNALS."""
    for number, pid in list(workers.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del workers[number]
            signals[number] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    while len(signals) > KEPT_SIGNALS:
        del signals[next(iter(signals))]


def _work(connection: socket.socket, tokenizer: Tokenizer, handler: Handler, confinement: Confinement) -> None:
    """Runs tasks, each under the limits that come with it, until the owner closes its side."""
    connection.setblocking(True)
    start_nothing()
    confine_working()
    while (task := worker_frames.receive(connection)) is not None:
        head, body = task
        confinement.arm(Limits(*head.pop("limits")))
        answer = handler(tokenizer, head, body)
        confinement.disarm()
        del task, head, body
        worker_frames.send(connection, *answer)
        del answer


if __name__ == "__main__":
    main()
    os._exit(0)  # all is written; the teardown of all modules takes time
