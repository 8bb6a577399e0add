"""The system refuses a call: disks that are full, read-only or broken, file systems with other rules, homes, memory.

    python evaluations/reliability/faults.py --cases 8 --out evaluations/reports/reliability/faults.json

Each case runs a command of `courses.py` in a forked process with one fault: an audit hook raises an error at chosen
calls that change files (each in turn, or all from one on), a limit of the process is lowered, a folder is taken away,
or the current folder is a disk that is really full (for root). `--cases` are drawn for each kind of fault, from all
calls and limits of all commands. The same command then runs without the fault, and `kill.py` judges what is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import rich_click as click
from courses import COURSES, Ran, begin, files, imported, prepare, ran
from kill import Trial, watching
from tally import Tally

PROMISE = (
    "If the system refuses a call that a command makes, the command ends with one line and exit code 1 or 2, or "
    "succeeds if the call did not matter. Its result is absent or complete, all other files are as before, and the "
    "same command then succeeds."
)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)
# Calls that some file systems never allow, and the errors that they give.
NEVER = {
    "no hard links": (("os.link",), (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK)),
    "renaming refused": (("os.rename",), (errno.EXDEV, errno.EPERM, errno.EACCES)),
    "no permissions or times": (("os.chmod", "os.utime"), (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)),
    "no locks": (("fcntl.flock",), (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)),
}
HARMLESS = ("no hard links", "no permissions or times")
LIMITS: dict[str, tuple[int, range]] = {
    "few open files": (resource.RLIMIT_NOFILE, range(6, 40)),
    "files of a largest size": (resource.RLIMIT_FSIZE, range(0, 200_000, 2_000)),
    "address space": (resource.RLIMIT_AS, range(0, 256 << 20, 4 << 20)),
}
SMALL = "small disk, really"
Fault = tuple[dict[str, Any], Callable[[], None]]  # what repeats it, and what begins it in the forked process


def failing(fails: Callable[[int, str], bool], error: int) -> Callable[[], None]:
    """Return what lets the calls of a process fail that `fails` chooses by number and name, with `error`."""

    def begin() -> None:
        process = os.getpid()

        def then(call: int, event: str, arguments: tuple[Any, ...]) -> None:
            if os.getpid() == process and fails(call, event):  # an export is verified by another process
                raise OSError(error, os.strerror(error), arguments[0] if event != "fcntl.flock" else None)

        watching(then)()

    return begin


def limited(what: int, most: int) -> None:
    """Lower a limit of this process; address space is counted from what it has."""
    if what == resource.RLIMIT_AS:
        most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def without_fsync(error: int) -> None:
    """Let no file be forced to the disk."""

    def refuse(_: int) -> None:
        raise OSError(error, os.strerror(error))

    os.fsync = refuse


def without_home(home: str | None) -> None:
    """Take the home and the cache away; without `home`, the user database knows no user either."""
    import pwd

    def no_user(number: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("FFEDIT_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"):
        os.environ.pop(name, None)
    if home is None:
        pwd.getpwuid = no_user
    else:
        os.environ["HOME"] = home


def without_temporary(folder: str) -> None:
    """Leave no folder for temporary files: tempfile tries others, which are not to be had either."""
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    tempfile._candidate_tempdir_list = lambda: [folder]  # type: ignore[attr-defined]


def not_allowed(below: str) -> None:
    """Take the right to write from a folder; root keeps it only with a capability, which this process gives up."""
    for path in [Path(below), *Path(below).rglob("*")]:
        if path.is_dir():
            path.chmod(0o555)
    library, version = ctypes.CDLL(None, use_errno=True), 0x20080522
    header, sets = (ctypes.c_uint32 * 2)(version, 0), (ctypes.c_uint32 * 6)()
    if library.capget(header, sets) == 0:
        for i in range(3):
            sets[i] &= ~(1 << 1)  # CAP_DAC_OVERRIDE
        library.capset(header, sets)


def small_disk(kilobytes: int) -> None:
    """Mount a file system that has so much room beside the case's files, in a name space of this process."""
    library, here, flags = ctypes.CDLL(None, use_errno=True), os.getcwd(), (1 << 18) | (1 << 14)  # private, recursive
    inputs = [path for path in Path(here).rglob("*") if path.is_file()]
    size = sum(-path.stat().st_size // 4096 * -4 for path in inputs) + 4 * len(inputs) + kilobytes + 64
    with tempfile.TemporaryDirectory(dir="/dev/shm") as kept:
        shutil.copytree(here, f"{kept}/case")
        for call in (
            lambda: library.unshare(0x20000),  # CLONE_NEWNS
            lambda: library.mount(b"none", b"/", None, flags, None),
            lambda: library.mount(b"tmpfs", os.fsencode(here), b"tmpfs", 0, f"size={size}k".encode()),
        ):
            if call() != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        shutil.copytree(f"{kept}/case", here, dirs_exist_ok=True)
    os.chdir(here)


def faults(trial: Trial) -> Iterator[tuple[str, Fault]]:
    """Yield all faults of a command, each with its kind."""
    for call, error in product(range(1, len(trial.calls) + 1), ERRORS):
        about = {"call": call, "error": errno.errorcode[error]}
        yield "a call fails once", (about, failing(lambda n, _, call=call: n == call, error))
        yield "all calls from one on fail", (about, failing(lambda n, _, call=call: n >= call, error))
    for kind, (calls, errors) in NEVER.items():
        for error in errors:
            yield kind, ({"error": errno.errorcode[error]}, failing(lambda _, name, calls=calls: name in calls, error))
    for error in (errno.EIO, errno.EINVAL, errno.ENOSPC):
        yield "fsync fails", ({"error": errno.errorcode[error]}, partial(without_fsync, error))
    for kind, (what, sizes) in LIMITS.items():
        for most in sizes:
            yield kind, ({"limit": most}, partial(limited, what, most))
    for home in (None, "/nowhere", "fact.json", "/proc/nowhere"):
        yield "no home", ({"home": home}, partial(without_home, home))
    for folder in ("/nowhere", "/proc", "fact.json"):
        yield "no temporary folder", ({"TMPDIR": folder}, partial(without_temporary, folder))
    for below in (".", "cache", "tmp"):
        yield "no permission, really", ({"below": below}, partial(not_allowed, below))
    if os.geteuid() == 0:
        for size in [*range(0, 64, 4), *range(64, 1024, 32)]:
            yield SMALL, ({"kB": size}, partial(small_disk, size))


def fault_of(trial: Trial, kind: str, fault: Fault) -> str | None:
    """Run a command with a fault and without, and return which part of the promise was broken, if any."""
    begin(trial.start, trial.folder, trial.course)
    ended = ran(trial.folder, trial.course.words, fault[1])
    for path in (trial.folder, *trial.folder.rglob("*")):
        if path.is_dir() and kind == "no permission, really":
            path.chmod(0o755)
    if wrong := _wrong(ended, kind):
        return wrong
    if ended.code == 0 and kind != SMALL:  # whose folder is gone with its process
        there = files(trial.folder)
        for name in trial.course.outputs:
            if trial.part(there, name) != trial.part(trial.after, name):
                return f"success, but {name} is not that of an undisturbed run"
    return trial.fault_of_next_run()


def _wrong(ended: Ran, kind: str) -> str | None:
    """Return what is wrong with how a command ended, if anything."""
    lines = ended.said.strip().splitlines()
    if ended.code == 0:
        return f"a traceback: {ended.said[-400:]}" if "Traceback" in ended.said else None
    if ended.code not in (1, 2) or len(lines) != 1 or not lines[0].startswith("error: "):
        return f"exit {ended.code}: {ended.said[-400:]!r}; 1 or 2 and one line were expected"
    return f"refused ({lines[0]}), and could be done" if kind in HARMLESS else None


@click.command()
@click.option("--cases", type=int, default=8, show_default=True, help="Of each kind, drawn from all.")
@click.option("--seed", default=0, show_default=True, help="Of the draw.")
@click.option("--kind", "kinds", multiple=True, help="Only these.")
@click.option("--course", "names", multiple=True, type=click.Choice(list(COURSES)), help="Only these courses.")
@click.option("--out", type=click.Path(path_type=Path))
def main(cases: int, seed: int, kinds: tuple[str, ...], names: tuple[str, ...], out: Path | None) -> None:
    """Run commands while the system fails, and count the broken promises."""
    imported()
    tally, every = Tally(PROMISE), dict[str, list[tuple[Trial, Fault]]]()
    work = Path(tempfile.mkdtemp(prefix="ffedit-faults-"))
    try:
        start = prepare(work)
        for name in names or COURSES:
            trial = Trial(COURSES[name], start, work / "case")
            for kind, fault in faults(trial):
                if not kinds or kind in kinds:
                    every.setdefault(kind, []).append((trial, fault))
        for kind, some in every.items():
            for trial, fault in random.Random(f"{seed} {kind}").sample(some, min(cases, len(some))):
                tally.count(kind, {"course": trial.course.name, **fault[0]}, fault_of(trial, kind, fault))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tally.finish(out, seed=seed, drawn=cases, of={kind: len(some) for kind, some in every.items()})


if __name__ == "__main__":
    main()
