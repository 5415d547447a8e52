"""`python declarations.py FOLDER FILE`: writes the declarations of FOLDER's C headers to the Python module FILE.

cffi parses the headers once per build of the library. Parsing them at every start would take 1/8 of a second. The
module is the same for every Python version and CPU; `ckdist.native` opens the library itself.
"""

import pathlib
import re
import sys

import cffi

MODULE = "ckdist.native.declarations"


def declarations(header: str) -> str:
    """A header's declarations without preprocessor lines and marks."""
    text = re.sub(r"^\s*#.*$", "", header, flags=re.MULTILINE)
    return re.sub(r"\bCKDIST_EXPORT\s+", "", text)


def main(folder: str, file: str) -> None:
    """Parses the headers in the order of their names, in which no header needs a later one."""
    ffi = cffi.FFI()
    for header in sorted(pathlib.Path(folder).glob("*.h")):
        ffi.cdef(declarations(header.read_text()))
    ffi.set_source(MODULE, None)
    ffi.emit_python_code(file)
    pathlib.Path(file).touch()  # cffi does not rewrite a file whose content stays the same


if __name__ == "__main__":
    main(*sys.argv[1:])
