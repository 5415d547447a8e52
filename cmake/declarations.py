"""`python declarations.py FOLDER FILE`: writes the declarations of FOLDER's C headers as the Python module FILE.

cffi parses the headers here, once for each build of the library: at every start that would cost an eighth of a second.
The module holds what cffi found, for every Python and CPU; the library itself is opened by `ckdist.native`.
"""

import pathlib
import re
import sys

import cffi

MODULE = "ckdist.native.declarations"


def declarations(header: str) -> str:
    """A header's declarations alone, without what is for the C++ compiler."""
    text = re.sub(r"^\s*#.*$", "", header, flags=re.MULTILINE)
    text = re.sub(r'extern "C" \{|^\}\s*// extern "C"$', "", text, flags=re.MULTILINE)
    return re.sub(r"\bCKDIST_EXPORT\s+", "", text)


def main(folder: str, file: str) -> None:
    """The headers in the order of their names, which is that of what they include from each other."""
    ffi = cffi.FFI()
    for header in sorted(pathlib.Path(folder).glob("*.h")):
        ffi.cdef(declarations(header.read_text()))
    ffi.set_source(MODULE, None)
    ffi.emit_python_code(file)
    pathlib.Path(file).touch()  # cffi leaves a file as it was where it would write the same


if __name__ == "__main__":
    main(*sys.argv[1:])
