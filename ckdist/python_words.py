"""Command lines that start Python without the current folder on its module path.

`python -m` and `python -c` look for modules in the current folder first. A downloaded model folder, or another
checkout, would run its own code there.
"""

import sys

# -P is new in Python 3.11. Earlier versions remove the folder themselves, before they import anything from a file.
SAFE = sys.version_info >= (3, 11)
REMOVE = "import sys; sys.path.remove('')"


def module_words(module: str, *arguments: str, safe: bool = SAFE) -> list[str]:
    """The words of `python -m module arguments`. `safe`: this Python knows -P."""
    if safe:
        return [sys.executable, "-P", "-m", module, *arguments]
    run = f"{REMOVE}; import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", run, *arguments]


def code_words(code: str, *, safe: bool = SAFE) -> list[str]:
    """The words of `python -c code`. `code` is simple statements in one line."""
    return [sys.executable, *(["-P", "-c", code] if safe else ["-c", f"{REMOVE}; {code}"])]
