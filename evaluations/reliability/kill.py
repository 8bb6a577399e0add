"""Kill every command that writes, anywhere, and see what is left and whether the next run mends it.

The promise: a result is absent or complete, files that were there are as they were, nothing temporary stays that the
next run does not clear away, and the same command then gives, bit for bit, what an uninterrupted run gives.

    python evaluations/reliability/kill.py --cases 300 --calls --out evaluations/reports/reliability/kill.json

Each case runs a command of `courses.py` in a forked process and ends it: at a moment drawn from its whole course, by
SIGKILL, SIGTERM or SIGINT (`--cases`), and with `--calls` right before the n-th call that changes something in the file
system, for every n by SIGKILL and for every tenth by SIGINT, and inside the writing of every file, when it has some
bytes. Then the same command runs to its end.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import rich_click as click
from courses import COURSES, Course, Ran, Running, begin, files, imported, must, prepare, ran
from tally import Tally

PROMISE = (
    "If a command is killed at any moment, each result is absent or complete and all earlier files are unchanged. The "
    "same command then removes leftovers and gives, bit for bit, the result of an uninterrupted run."
)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CALLS = {
    *("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("os.utime", "fcntl.flock"),
}
UNFINISHED = ".unfinished"
VERIFIER = "the process that verifies the export did not finish"
TORN = 7  # bytes of a file that are written before a kill


@dataclass
class Trial:
    """A course, how it goes when nobody interrupts it, and where its cases happen."""

    course: Course
    start: Path
    folder: Path
    before: dict[str, str] = field(init=False)
    after: dict[str, str] = field(init=False)  # an uninterrupted run
    seconds: float = field(init=False)
    calls: bytes = field(init=False)  # the kind of each call that changes the file system, as of `noting`

    def __post_init__(self) -> None:
        self.before = files(begin(self.start, self.folder, self.course))
        with mmap.mmap(-1, 100_000) as kinds:
            must(self.folder, self.course.words, noting(kinds))
            self.calls = kinds[1:].rstrip(b"\0")
        self.after = files(self.folder)
        self.seconds = must(begin(self.start, self.folder, self.course), self.course.words).seconds
        if files(self.folder) != self.after:
            raise RuntimeError(
                f"{self.course.name}: two uninterrupted runs differ {self._differing(files(self.folder))}"
            )

    def at_moment(self, share: float, number: int) -> str | None:
        """Send a signal after a share of the course, and return what is wrong then, if anything."""
        running = Running(begin(self.start, self.folder, self.course), self.course.words)
        return self._judge(running.wait(share * self.seconds, number))

    def at_call(self, call: int, number: int = signal.SIGKILL) -> str | None:
        """Send a signal before a call that changes the file system, and return what is wrong then, if anything."""
        begin(self.start, self.folder, self.course)
        return self._judge(ran(self.folder, self.course.words, signalling(call, number)))

    def at_write(self, call: int) -> str | None:
        """Kill inside the first write into the file that a call opens, and return what is wrong then, if anything."""
        begin(self.start, self.folder, self.course)
        return self._judge(ran(self.folder, self.course.words, tearing(call)))

    def _judge(self, killed: Ran) -> str | None:
        """Return the first fault of how a killed run ended, and of what came after it."""
        # A forked process that verifies the export counts its calls, too; if it dies, the export says so and ends.
        verifier = killed.code == 4 and VERIFIER in killed.said
        if not verifier and killed.code not in (0, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGXFSZ):
            return f"ended with {killed.code}: {killed.said[-400:]}"
        return self.fault_of_next_run()

    def fault_of_next_run(self) -> str | None:
        """Look at what a disturbed run left, run the command again, and return the first fault."""
        if fault := self._fault_of_left(files(self.folder)):
            return f"after the first run: {fault}"
        again = ran(self.folder, self.course.words)
        if again.code == 1 and "exists already" in again.said:
            there = files(self.folder)
            # Of two results, the one that is moved first may be there alone.
            if not all(self.part(there, name) in ({}, self.part(self.after, name)) for name in self.course.outputs):
                return f"refused, though what is there is not complete: {again.said[-300:]}"
            if hidden := [name for name in there if UNFINISHED in name and not name.startswith(("cache", "tmp"))]:
                return f"the refusing run left {hidden}"
            for name in self.course.outputs:
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            again = ran(self.folder, self.course.words)
        if again.code:
            return f"the same command then ended with {again.code}: {again.said[-400:]}"
        if files(self.folder) != self.after:
            return f"the next run's files differ from an uninterrupted run's: {self._differing(files(self.folder))}"
        return None

    def _fault_of_left(self, left: dict[str, str]) -> str | None:
        """Return what is wrong with what a disturbed run left, if anything."""
        own = ("cache", "tmp", "result", "new")
        for name, content in self.before.items():
            if name.split("/")[0] not in own and left.get(name) != content:
                return f"{name} is not as it was"
        for name in left:
            if name not in self.before and name.split("/")[0].split(".")[0] not in own and UNFINISHED not in name:
                return f"{name} was not there before"
        for name in self.course.outputs:
            there = self.part(left, name)
            if there and there not in (self.part(self.before, name), self.part(self.after, name)):
                return f"{name} is half: {sorted(there)}"
            if not there and self.part(self.before, name) and not any(UNFINISHED in path for path in left):
                return f"{name} is gone"
        return None

    def part(self, tree: dict[str, str], name: str) -> dict[str, str]:
        """Return what belongs to one output."""
        return {path: content for path, content in tree.items() if path == name or path.startswith(f"{name}/")}

    def _differing(self, tree: dict[str, str]) -> list[str]:
        return [name for name in sorted(tree.keys() | self.after.keys()) if tree.get(name) != self.after.get(name)]


def watching(then: Callable[[int, str, tuple[Any, ...]], None]) -> Callable[[], None]:
    """Return what lets a process call `then` before each call that changes the file system, with its number from 1."""

    def install() -> None:
        calls = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal calls
            if event in CALLS or (event == "open" and _writes(*arguments)):
                calls += 1
                then(calls, event, arguments)

        sys.addaudithook(hook)

    return install


def _writes(path: Any, mode: Any, flags: Any) -> bool:
    """Return True where a file is opened to be created or written."""
    return bool(int(flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and not str(path).startswith("/dev/")


def noting(kinds: mmap.mmap) -> Callable[[], None]:
    """Return what lets a process note the kind of each of its calls: 1, or 2 where it opens a file to write into it."""

    def then(call: int, event: str, arguments: tuple[Any, ...]) -> None:
        kinds[call] = 2 if event == "open" else 1

    return watching(then)


def signalling(at: int, number: int) -> Callable[[], None]:
    """Return what lets a process send itself a signal before its n-th call."""

    def then(call: int, event: str, arguments: tuple[Any, ...]) -> None:
        if call == at:
            os.kill(os.getpid(), number)

    return watching(then)


def tearing(at: int) -> Callable[[], None]:
    """Return what kills a process when it has written some bytes of the file that its n-th call opens, or a later one.

    The number of calls before it differs a little between runs: locks are tried again.
    """

    def then(call: int, event: str, arguments: tuple[Any, ...]) -> None:
        if call >= at and event == "open":
            path, _, flags = arguments
            there = os.path.getsize(path) if flags & os.O_APPEND and os.path.exists(path) else 0
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (there + TORN, there + TORN))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

    return watching(then)


Case = tuple[str, dict[str, Any], Callable[[], "str | None"]]  # kind, what repeats it, and the case itself


def at_moments(trials: dict[str, Trial], count: int, seed: int) -> Iterator[Case]:
    """Draw cases: a course, a share of its duration, and a signal; all courses in turn."""
    drawn = random.Random(seed)
    for name, trial in islice(cycle(trials.items()), count):
        share, number = drawn.random(), drawn.choice(SIGNALS)
        case = {"course": name, "share": round(share, 4), "signal": signal.Signals(number).name}
        yield f"{name}, at a moment", case, partial(trial.at_moment, share, number)


def at_calls(trials: dict[str, Trial], stride: int) -> Iterator[Case]:
    """Return the cases at calls: a kill before each, an interrupt before every tenth, and a kill inside each write."""
    for name, trial in trials.items():
        for call in range(1, len(trial.calls) + 1, stride):
            yield f"{name}, before a call", {"course": name, "call": call}, partial(trial.at_call, call)
        for call in range(1, len(trial.calls) + 1, 10 * stride):
            case = {"course": name, "interrupted call": call}
            yield f"{name}, interrupted before a call", case, partial(trial.at_call, call, signal.SIGINT)
        for call in [call for call, kind in enumerate(trial.calls, 1) if kind == 2][::stride]:
            yield f"{name}, in a write", {"course": name, "torn call": call}, partial(trial.at_write, call)


@click.command()
@click.option("--cases", default=300, help="Signals at drawn moments, over all courses.")
@click.option("--calls/--no-calls", default=True, help="Also at every call that changes the file system.")
@click.option("--stride", default=1, help="Only every so manieth of these calls.")
@click.option("--course", "names", multiple=True, type=click.Choice(list(COURSES)), help="Only these courses.")
@click.option("--minutes", type=float, help="Begin no case after so many minutes; the report says how many were left.")
@click.option("--seed", default=0)
@click.option("--out", type=click.Path(path_type=Path))
def main(
    cases: int, calls: bool, stride: int, names: tuple[str, ...], minutes: float | None, seed: int, out: Path | None
) -> None:
    """Kill commands at moments and at calls, and count the broken promises."""
    imported()
    tally, left = Tally(PROMISE), 0
    work = Path(tempfile.mkdtemp(prefix="ffedit-kill-"))
    try:
        start = prepare(work)
        trials = {name: Trial(COURSES[name], start, work / "case") for name in names or COURSES}
        for kind, case, judge in chain(at_moments(trials, cases, seed), at_calls(trials, stride) if calls else ()):
            if minutes is not None and time.perf_counter() - tally.started > 60 * minutes:
                left += 1
            else:
                tally.count(kind, case, judge())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tally.finish(out, seed=seed, calls={name: len(trial.calls) for name, trial in trials.items()}, cases_left=left)


if __name__ == "__main__":
    main()
