"""The system fails: disks that are full, read-only or broken, file systems with other rules, clocks, homes, memory.

**The promise.** Whatever the system refuses while a command works, the command ends with one clear line and exit code 1
or 2, or with success where the refusal is harmless, and never with a traceback. What it was to make is absent or
complete, files that were there before are as before, and the same command, run again without the fault, succeeds and
leaves nothing temporary behind.

**How.** Each case runs one command on a tiny model in a child that has a current folder, a cache, a home and a folder
for temporary files of its own. A library that is preloaded (`failing_calls.c`; it needs a C compiler and Linux) makes
chosen calls of the C library fail below that folder: each in turn, or all from one on. A disk that is really full is a
small tmpfs (for root). Memory fails at each allocation of a tensor in turn, and by a limit of the address space.

    python evaluations/reliability/faults.py                  # every call of every command: half an hour on one core
    python evaluations/reliability/faults.py --cases 60       # 60 cases of each kind, drawn from all
    python evaluations/reliability/faults.py --kinds "full disk,clock" --commands apply,undo
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

LIBRARY = Path(__file__).with_name("failing_calls.c")


def rerun() -> None:
    """Compile the library and run this script again with it preloaded."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "failing_calls.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", made, LIBRARY, "-ldl"], check=True)
        script = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(made)}, check=False)
    sys.exit(script.returncode)


if __name__ == "__main__" and "LD_PRELOAD" not in os.environ:
    rerun()

import children
from tally import REPORTS, Tally

PROMISE = (
    "If the system refuses a call that a command makes, the command ends with one line and exit code 1 or 2, or "
    "succeeds if the call did not matter. Its result is absent or complete, all other files are as before, and the "
    "same command then succeeds."
)
CREATE, WRITE, MKDIR, RENAME, LINK, REMOVE, FSYNC, CHMOD, UTIME, LOCK, READ, ALLOCATE, REPLACE = (
    1 << i for i in range(13)
)
SPACE = CREATE | WRITE | MKDIR | LINK
CHANGES = SPACE | RENAME | REMOVE | FSYNC | CHMOD | UTIME | LOCK
ALWAYS = 1 << 40
YEAR = 365 * 86400.0
SMALL = "small disk, really"
TENSOR = 2048  # bytes of the smallest allocation that fails


@dataclass(frozen=True)
class Command:
    """A command, and what it makes in the current folder."""

    name: str
    words: list[str]
    makes: tuple[str, ...]
    resumes: bool = False  # what it makes grows, and is continued by the next run


@dataclass(frozen=True)
class Fault:
    """A fault, of which `begin(root)` is called in the child."""

    kind: str
    about: dict[str, Any]
    begin: Callable[[Path], object]
    harmless: bool = False  # success is expected


class World:
    """The inputs, the commands, what they make without faults, and the folder of a case."""

    def __init__(self, folder: Path, names: Collection[str] | None) -> None:
        self.inputs, self.root = folder / "inputs", folder / "case"
        self.work = self.root / "work"
        children.prepare(without_faults)
        children.make(self.inputs)
        self.commands = [command for command in commands(self.inputs) if names is None or command.name in names]
        self.fresh()
        self.before = children.without_times(self.work)
        self.inputs_before = children.disk(self.inputs)
        self.expected: dict[str, dict[str, str]] = {}
        for command in self.commands:
            ran = self.attempt(command)
            assert ran.code == 0, (command.name, ran)
            self.expected[command.name] = children.without_times(self.work)

    def fresh(self) -> None:
        """Make the folder of a case anew."""
        for path in self.root.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("work/earlier", "home", "tmp", "cache"):
            (self.root / name).mkdir(parents=True)
        (self.work / "earlier" / "note.txt").write_text("mine")
        shutil.copytree(self.inputs / "edit", self.work / "old")

    def attempt(self, command: Command, begin: Callable[[Path], object] = lambda root: None) -> children.Ran:
        """Run a command in a fresh folder."""
        self.fresh()
        return self.again(command, begin)

    def again(self, command: Command, begin: Callable[[Path], object] = lambda root: None, *more: str) -> children.Ran:
        """Run a command in the folder as it is."""

        def before() -> None:
            environment(self.root)
            begin(self.root)

        return children.run([*command.words, *more], self.work, before)


def commands(inputs: Path) -> list[Command]:
    """List the commands that write."""
    base, edit = inputs / "base", inputs / "edit"
    model = children.words("-m", base, "--layers", "1", "--corpus", inputs / "corpus.txt", "-q")
    short, fact, facts = children.SHORT, str(inputs / "fact.json"), str(inputs / "facts.json")
    pages = ["--json", "r.json", "--html", "p.html", "--plot", "p.png", "--save-recipe", "r.yaml", "--log", "log"]
    export = children.words("export", edit, "-q", "-m", base, "--out")
    gguf = children.words("export", inputs / "gguf-edit", "-q", "-m", inputs / "tiny.gguf", "--out")
    bench = ["bench", facts, *model, *short, "--no-full", "--out", "b", "--mode"]
    made = ("e", "x", "r.json", "p.html", "p.png", "r.yaml")
    return [
        Command("apply", ["apply", fact, *model, *short, "--out", "e", "--export", "x", *pages], made),
        Command("apply over", ["apply", fact, *model, *short, "--out", "old", "--force"], ("old",)),
        Command("checkpoint", [*export, "x"], ("x",)),
        Command("checkpoint over", [*export, "old", "--force"], ("old",)),
        Command("adapter", [*export, "x", "--format", "adapter"], ("x",)),
        Command("delta", [*export, "x", "--format", "delta"], ("x",)),
        Command("gguf", [*gguf, "x.gguf"], ("x.gguf",)),
        Command("gguf adapter", [*gguf, "x.gguf", "--format", "adapter"], ("x.gguf",)),
        Command("undo", ["undo", str(inputs / "edited"), "-q", "--out", "u"], ("u",)),
        Command("stats", ["stats", *model, "--out", "s"], ("s",)),
        Command("bench", [*bench, "single", "--methods", "rome,memit"], ("b",), resumes=True),
        Command("bench in sequence", [*bench, "sequential", "--methods", "memit,alphaedit"], ("b",), resumes=True),
        Command("locate", ["locate", fact, *children.words("-m", base), "--json", "t.json", "-q"], ("t.json",)),
    ]


def calls(library: ctypes.CDLL, root: Path, kinds: int, first: int, last: int, error: int) -> None:
    """Let calls of `kinds` below `root` fail."""
    library.fail_calls(
        os.fsencode(root), kinds, ctypes.c_long(first), ctypes.c_long(last), error, ctypes.c_size_t(TENSOR)
    )


@contextmanager
def without_faults() -> Iterator[None]:
    """Let nothing fail in the block, which stands for another process: no call, and no limit."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    limits = {
        what: resource.getrlimit(what) for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
    }
    library.pause_failing(1)
    for name, (_, hard) in limits.items():
        resource.setrlimit(name, (hard, hard))
    try:
        yield
    finally:
        for name, limit in limits.items():
            resource.setrlimit(name, limit)
        library.pause_failing(0)


def environment(root: Path) -> None:
    """Point home, cache and temporary files into the case's folder."""
    os.environ.update(FFEDIT_CACHE=str(root / "cache"), HOME=str(root / "home"), TMPDIR=str(root / "tmp"))
    os.environ.update(HF_HOME=str(root / "home" / "hf"), COLUMNS="100", HF_HUB_OFFLINE="1")
    tempfile.tempdir = None


# The faults ---------------------------------------------------------------------------------------


def numbered(world: World, library: ctypes.CDLL, command: Command, kinds: int) -> int:
    """Count the calls of `kinds` that a command makes without a fault."""
    world.attempt(command, partial(calls, library, kinds=kinds, first=ALWAYS, last=ALWAYS, error=0))
    return int(library.calls_seen())


def faults_of(world: World, library: ctypes.CDLL, command: Command, kinds: Collection[str] | None) -> Iterator[Fault]:
    """Yield all faults of a command that are of `kinds` (all: None)."""
    for fault in _faults_of(world, library, command, kinds):
        if kinds is None or fault.kind in kinds:
            yield fault


def _faults_of(world: World, library: ctypes.CDLL, command: Command, kinds: Collection[str] | None) -> Iterator[Fault]:

    def each(kind: str, which: int, error: int, on: bool = False) -> Iterator[Fault]:
        if kinds is None or kind in kinds:
            for number in range(numbered(world, library, command, which)):
                last = ALWAYS if on else number
                about = {"call": number, "and after": on, "error": errno.errorcode[error]}
                yield Fault(kind, about, partial(calls, library, kinds=which, first=number, last=last, error=error))

    def always(
        kind: str, which: int, errors: Iterable[int], harmless: bool = False, below: str = ""
    ) -> Iterator[Fault]:
        for error in errors:
            about = {"error": errno.errorcode[error]} | ({"below": below} if below else {})

            def begin(root: Path, error: int = error) -> None:
                calls(library, root / below, which, 0, ALWAYS, error)

            yield Fault(kind, about, begin, harmless)

    yield from each("full disk from a call on", SPACE, errno.ENOSPC, on=True)
    yield from each("a call fails once", CHANGES, errno.EIO)
    yield from each("permission denied once", CREATE | MKDIR | RENAME | LINK | REMOVE | READ, errno.EACCES)
    yield from each("too many files once", CREATE | READ | MKDIR, errno.EMFILE)
    yield from each("memory fails once", ALLOCATE, errno.ENOMEM)
    yield from each("memory fails from a call on", ALLOCATE, errno.ENOMEM, on=True)
    links = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK)
    yield from always("no hard links", LINK, links, harmless=True)
    yield from always("renaming of folders refused", REPLACE, (errno.EEXIST, errno.ENOTEMPTY, errno.EXDEV, errno.EPERM))
    yield from always("renaming refused", RENAME, (errno.EXDEV, errno.EPERM, errno.EACCES))
    yield from always("fsync fails", FSYNC, (errno.EIO, errno.EINVAL, errno.ENOSPC))
    yield from always(
        "no permissions or times", CHMOD | UTIME, (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS), harmless=True
    )
    yield from always("no locks", LOCK, (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
    readonly = CHANGES & ~FSYNC & ~LOCK
    for below in ("work", "cache", "home", "tmp", "cache/moments", "cache/texts", ""):
        yield from always("read-only", readonly, (errno.EROFS, errno.EACCES), below in ("home", "cache/moments"), below)
    for below in ("work", "cache", "home", "tmp"):
        yield Fault("no permission, really", {"below": below}, partial(not_allowed, below=below), below == "home")
    for years in (-50, -3, 1, 3, 100):
        for after in (0, 20, 200):
            about = {"years": years, "after readings": after}
            yield Fault("clock", about, partial(clock, years=years, after=after), harmless=True)
    for name, begin in HOMELESS.items():
        yield Fault("no home", {"home": name}, begin)
    for name in ("missing", "read-only", "a file"):
        yield Fault("no temporary folder", {"TMPDIR": name}, partial(no_temporary, how=name))
    for most in range(6, 40):
        yield Fault("few open files", {"limit": most}, partial(limited, what=resource.RLIMIT_NOFILE, most=most))
    for size in [*range(0, 64, 2), *range(64, 512, 16)]:
        begin = partial(limited, what=resource.RLIMIT_FSIZE, most=size * 1024)
        yield Fault("files of a largest size", {"kB": size}, begin)
    for size in [*range(0, 16), *range(16, 64, 4), *range(64, 512, 32)]:
        yield Fault("address space", {"MB": size}, partial(address_space, megabytes=size))
    if os.geteuid() == 0:
        for size in [*range(0, 256, 4), *range(256, 1280, 32)]:
            yield Fault(SMALL, {"kB": size}, partial(small_disk, kilobytes=size))


def not_allowed(root: Path, below: str) -> None:
    """Take the right to write from a folder; root keeps it only with a capability, which this process gives up."""
    for path in [root / below, *(root / below).rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    library, version = ctypes.CDLL(None, use_errno=True), 0x20080522
    header, sets = (ctypes.c_uint32 * 2)(version, 0), (ctypes.c_uint32 * 6)()
    if library.capget(header, sets) == 0:
        for i in range(3):
            sets[i] &= ~(1 << 1)  # CAP_DAC_OVERRIDE
        library.capset(header, sets)


def clock(root: Path, years: float, after: int) -> None:
    """Let the clock jump after it was read some times."""
    real, readings = time.time, 0

    def jumped() -> float:
        nonlocal readings
        readings += 1
        return real() + (years * YEAR if readings > after else 0)

    time.time = jumped
    time.time_ns = lambda: int(jumped() * 1e9)


def _without_home(root: Path, home: str | None) -> None:
    for name in ("FFEDIT_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"):
        os.environ.pop(name, None)
    if home is not None:
        os.environ["HOME"] = home.format(root=root)
    else:  # the home of the user database is not to be written to
        import pwd

        pwd.getpwuid = _no_user


def _no_user(number: int) -> Any:
    raise KeyError(f"getpwuid(): uid not found: {number}")


HOMELESS: dict[str, Callable[[Path], object]] = {
    "unset": partial(_without_home, home=None),
    "missing": partial(_without_home, home="{root}/nowhere"),
    "a file": partial(_without_home, home="{root}/work/earlier/note.txt"),
    "not writable": partial(_without_home, home="/proc/nowhere"),
}


def no_temporary(root: Path, how: str) -> None:
    """Leave no folder for temporary files: tempfile tries others, which are not to be had either."""
    folder = {"missing": "/nowhere", "read-only": "/proc", "a file": str(root / "work" / "earlier" / "note.txt")}[how]
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    tempfile._candidate_tempdir_list = lambda: [folder]  # type: ignore[attr-defined]


def limited(root: Path, what: int, most: int) -> None:
    """Set a limit of this process."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def address_space(root: Path, megabytes: int) -> None:
    """Limit what this process may map in addition to what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def small_disk(root: Path, kilobytes: int) -> None:
    """Mount a file system of a size at the current folder, in a name space of this process."""
    library = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_private_rec = 0x20000, (1 << 18) | (1 << 14)
    work = os.fsencode(root / "work")
    held = {path.relative_to(root / "work"): path.read_bytes() for path in (root / "work").rglob("*") if path.is_file()}
    for call in (
        lambda: library.unshare(clone_newns),
        lambda: library.mount(b"none", b"/", None, ms_private_rec, None),
        lambda: library.mount(b"tmpfs", work, b"tmpfs", 0, f"size={kilobytes + 64}k".encode()),
    ):
        if call() != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for path, content in held.items():
        (root / "work" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "work" / path).write_bytes(content)
    os.chdir(root / "work")


# A case -------------------------------------------------------------------------------------------


def check(world: World, command: Command, fault: Fault) -> str | None:
    """Run a command with a fault and without; say which part of the promise was broken, or None."""
    ran, expected = world.attempt(command, fault.begin), world.expected[command.name]
    if ran.code == 0:
        if "Traceback" in ran.err:
            return f"a traceback on standard error: {ran.err.strip()[-300:]!r}"
    elif wrong := children.one_line(ran):
        return wrong
    elif fault.harmless:
        return f"refused ({ran.err.strip()}), and could be done"
    seen, whole = children.without_times(world.work), []
    for made in command.makes:
        now, then, before = (_below(made, of) for of in (seen, expected, world.before))
        if now != before and _alike(now, then, fault):
            whole.append(made)
        elif now != before and not command.resumes:
            return f"{made} is neither absent nor complete: {_differences(now, then)}"
        elif ran.code == 0 and now != then and fault.kind != SMALL:  # whose folder is gone with the child
            return f"success, but {made} is not as it should be: {_differences(now, then)}"
    others = {name: content for name, content in world.before.items() if name.split("/")[0] not in command.makes}
    if lost := [name for name, content in others.items() if seen.get(name) != content]:
        return f"{lost[0]} was there before and is not as it was"
    if ran.code != 0 or fault.kind == SMALL or left(world):
        force = bool(whole) and not command.resumes
        again = world.again(command, lambda root: None, *(["--force"] if force else []))
        if again.code != 0:
            return f"without the fault: exit {again.code}: {again.err.strip()[-300:]!r}"
        seen = children.without_times(world.work)
        if force:  # which pages say
            seen |= {
                name: content for name, content in expected.items() if name in ("r.json", "p.html") and name in seen
            }
    if not _alike(seen, expected, fault):
        return f"in the end there are other files: {_differences(seen, expected)}"
    if temporary := left(world):
        return f"left behind: {', '.join(str(path.relative_to(world.root)) for path in temporary)}"
    if children.disk(world.inputs) != world.inputs_before:
        return "an input was changed"
    return None


def left(world: World) -> list[Path]:
    """List what is temporary and still there."""
    hidden = [path for name in ("work", "cache") for path in (world.root / name).rglob(".*")]
    hidden = [path for path in hidden if path.name != ".checksums.json"]
    # matplotlib deletes its own when its process ends, which a forked child does not come to.
    return hidden + [path for path in (world.root / "tmp").iterdir() if not path.name.startswith("matplotlib-")]


def _below(made: str, of: Mapping[str, str]) -> dict[str, str]:
    return {name: content for name, content in of.items() if name.split("/")[0] == made}


def _alike(a: Mapping[str, str], b: Mapping[str, str], fault: Fault) -> bool:
    """Compare what two runs made.

    Where memory failed, batches are cut elsewhere, so that last bits differ; and `bench` reports an edit for which
    there was not enough as one that failed.
    """
    if "memory" not in fault.kind and fault.kind != "address space":
        return a == b
    return {name for name in a if "/edits/" not in name} == {name for name in b if "/edits/" not in name}


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    return sorted({name for name, _ in set(a.items()) ^ set(b.items())})[:4]


@click.command()
@click.option("--cases", type=int, help="Of each kind, drawn from all.  [default: all]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draw.")
@click.option("--kinds", help="Only these, with commas.")
@click.option("--commands", "names", help="Only these, with commas.")
@click.option("--out", type=click.Path(path_type=Path), help=f"The report.  [default: {REPORTS.name}/faults.json]")
def main(cases: int | None, seed: int, kinds: str | None, names: str | None, out: Path | None) -> None:
    """Run commands while the system fails, and count how often the promise was kept."""
    tally, library = Tally(PROMISE), ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.calls_seen.restype = ctypes.c_long
    chosen = None if kinds is None else {kind.strip() for kind in kinds.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        world = World(Path(folder), None if names is None else names.split(","))
        all_of: dict[str, list[tuple[Command, Fault]]] = {}
        for command in world.commands:
            for fault in faults_of(world, library, command, chosen):
                all_of.setdefault(fault.kind, []).append((command, fault))
        for kind, every in all_of.items():
            drawn = (
                every if cases is None or cases >= len(every) else random.Random(f"{seed}{kind}").sample(every, cases)
            )
            for command, fault in drawn:
                wrong = check(world, command, fault)
                tally.count(kind, {"command": command.name, **fault.about}, wrong)
    tally.finish(out, seed=seed, drawn=cases, of={kind: len(every) for kind, every in all_of.items()})


if __name__ == "__main__":
    main()
