"""Runs the tests and tells, room by room, how many lines of Python and C++ they executed: `make coverage`.

    python tests/coverage_by_room.py                      every test, those under mpirun included
    python tests/coverage_by_room.py tests/server -x      what pytest is given
    python tests/coverage_by_room.py --report             the table of the last run again

Python is counted by coverage.py in every process that a test starts, C++ by gcov in the build of build/coverage. A
process that is killed leaves no counts, and one that ends by os._exit leaves none of C++. The lines themselves are in
build/coverage/python/index.html and build/coverage/native/index.html.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections import defaultdict

ROOT = pathlib.Path(__file__).parent.parent
BUILD = ROOT / "build" / "coverage"
RCFILE = BUILD / "coveragerc"
CONFIG = """\
[run]
data_file = {build}/data/counts
source_pkgs = ckdist
parallel = true
concurrency = thread,multiprocessing
patch = subprocess,_exit
disable_warnings = no-data-collected,module-not-measured,module-not-imported,couldnt-parse,no-ctracer
[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
    raise NotImplementedError
    ^ *\\.\\.\\.$
"""


def run(*words: str, **more: object) -> int:
    """Runs a program in the repository's root; its exit code."""
    return subprocess.run(words, cwd=ROOT, check=False, **more).returncode


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def count(words: list[str]) -> int:
    """Runs the tests under both counters; the number of runs that failed."""
    library = BUILD / "libckdist.so"
    if not library.exists():
        raise SystemExit(f"{library} is missing: make coverage builds it")
    shutil.rmtree(BUILD / "data", ignore_errors=True)
    (BUILD / "data").mkdir()
    for counts in BUILD.rglob("*.gcda"):
        counts.unlink()
    RCFILE.write_text(CONFIG.format(build=BUILD))
    env = {**os.environ, "CKDIST_LIBRARY": str(library), "PYTHONPATH": str(ROOT)}
    counted = (sys.executable, "-m", "coverage", "run", f"--rcfile={RCFILE}", "-m")
    groups = (
        (words,) if words else (("-n", str(2 * cores()), "--dist", "worksteal", "-m", "not alone"), ("-m", "alone"))
    )
    failed = sum(run(*counted, "pytest", "-q", *group, env=env) not in (0, 5) for group in groups)
    if not words and (BUILD / "unit_tests").exists():
        failed += run(str(BUILD / "unit_tests"), stdout=subprocess.DEVNULL) != 0
    return failed


def python_rooms() -> dict[str, tuple[int, int]]:
    """Lines and executed lines by the first folder below ckdist/."""
    coverage = (sys.executable, "-m", "coverage")
    rcfile = f"--rcfile={RCFILE}"
    if any((BUILD / "data").glob("counts.*")):
        run(*coverage, "combine", "--quiet", "--append", rcfile)
    report = BUILD / "python.json"
    if run(*coverage, "json", "--quiet", rcfile, "-o", str(report)):
        raise SystemExit("coverage.py has no counts")
    run(*coverage, "html", "--quiet", rcfile, "-d", str(BUILD / "python"))
    rooms: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, file in json.loads(report.read_text())["files"].items():
        parts = pathlib.Path(name).absolute().relative_to(ROOT / "ckdist").parts
        room, counts = parts[0] if len(parts) > 1 else "(root)", file["summary"]
        rooms[room] = (rooms[room][0] + counts["num_statements"], rooms[room][1] + counts["covered_lines"])
    return rooms


def native_rooms() -> dict[str, tuple[int, int]]:
    """The same by the first folder below ckdist/native/. A line of a template, or of a kernel that is compiled for
    several levels of instructions, counts once.
    """
    (BUILD / "native").mkdir(exist_ok=True)
    report = BUILD / "native.json"
    words = ("-r", str(ROOT), "--filter", "ckdist/native/", "--merge-mode-functions=separate", "-j", "2")
    lenient = ("--gcov-ignore-parse-errors=all", "--gcov-ignore-errors=no_working_dir_found")
    pages = ("--html-details", str(BUILD / "native" / "index.html"), "--json", str(report))
    gcovr = (sys.executable, "-m", "gcovr", "--gcov-executable", shutil.which("gcov") or "gcov")
    with open(BUILD / "gcovr.log", "w") as log:  # threads that count at once leave a few negative counts
        if run(*gcovr, *words, *lenient, *pages, str(BUILD), stdout=log, stderr=log):
            raise SystemExit(f"gcovr failed: see {BUILD}/gcovr.log")
    rooms: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file in json.loads(report.read_text())["files"]:
        room = pathlib.Path(file["file"]).relative_to("ckdist/native").parts[0]
        every = {line["line_number"] for line in file["lines"]}
        executed = {line["line_number"] for line in file["lines"] if line["count"] > 0}
        rooms[room] = (rooms[room][0] + len(every), rooms[room][1] + len(executed))
    return rooms


def table(title: str, rooms: dict[str, tuple[int, int]]) -> None:
    """Prints a row for each room and one for all."""
    rows = sorted(rooms.items())
    rows.append(("all", (sum(lines for _, (lines, _) in rows), sum(done for _, (_, done) in rows))))
    print(f"{title:16}{'lines':>8}{'missed':>8}{'executed':>10}")
    for room, (lines, done) in rows:
        print(f"{room:16}{lines:8}{lines - done:8}{100 * done / max(lines, 1):9.1f}%")


def main() -> int:
    """Runs the tests and prints the table; 1 where a test failed."""
    words = sys.argv[1:]
    failed = 0 if words == ["--report"] else count(words)
    table("Python", python_rooms())
    table("C++", native_rooms())
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
