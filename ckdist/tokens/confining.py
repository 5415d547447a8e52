"""Confines the text process to reading its model and Python, and its workers to memory and open sockets."""

import codecs
import glob
import importlib
import logging
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ckdist.tokens.landlock import read_only
from ckdist.tokens.system_calls import allow_calls

log = logging.getLogger(__name__)

# Imported late by Python, jinja2 and this package; a worker cannot open their files.
LATE_MODULES = ("ckdist.tokens.sandbox", "jinja2.debug", "textwrap", "unicodedata", "linecache", "_strptime")
LATE_CODECS = ("unicode_escape", "raw_unicode_escape", "latin_1", "ascii", "utf_8", "utf_16", "utf_32", "idna")
LATE_FOR_GGUF = ("ckdist.tokens.tokenizer_from_gguf", "ckdist.weights.gguf")
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null")


def confine_loading(model: Path, renders: bool) -> None:
    """Lets this process read only files of the model and of Python, and open no socket. It may fork."""
    for name in (*(LATE_MODULES if renders else ()), *(() if model.is_dir() else LATE_FOR_GGUF)):
        importlib.import_module(name)
    for name in LATE_CODECS:
        codecs.lookup(name)
    time.localtime()  # reads the time zone
    for problem in (read_only(_readable(model)), allow_calls(loading=True)):
        if problem:
            log.debug("the text process has fewer limits on this kernel: %s", problem)


def confine_working() -> None:
    """Stops this process from opening files and starting processes. `confine_loading` has logged missing features."""
    read_only(())
    allow_calls(loading=False)


def _readable(model: Path) -> Iterator[Path]:
    """Files and folders. A link, as in a hub's cache, gives access to its target."""
    if model.is_dir():
        yield model
        yield from (
            path for path in (*model.glob("*"), *model.glob("additional_chat_templates/*")) if path.is_symlink()
        )
    else:
        # The parts of a split model, and the record of one at a URL, begin with the same name.
        stem = re.split(r"-\d{5}-of-\d{5}", model.name)[0].removesuffix(".gguf")
        yield from model.parent.glob(glob.escape(stem) + "*")
    yield Path(__file__).parents[1]
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)}
    yield from map(Path, (*python, *SYSTEM, *SYSTEM_FILES))
