"""Kill every command that writes, anywhere, and see what is left and whether the next run mends it.

The promise: a result is absent or complete, files that were there are as they were, nothing temporary stays that the next
run does not clear away, and the same command then gives, bit for bit, what a run gives that nobody interrupted.

    python evaluations/reliability/kill.py --cases 300 --calls --out evaluations/reports/reliability/kill.json

Each case runs a command of `courses.py` in a forked process and ends it: at a moment drawn from its whole course, by
SIGKILL, SIGTERM or SIGINT (`--cases`), or right before the n-th call that changes something in the file system, by
SIGKILL, for every n (`--calls`; `--stride 10` tries every tenth). Then the same command runs to its end.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import rich_click as click
from courses import COURSES, Course, Ran, Running, begin, files, imported, must, prepare, ran
from tally import Tally

PROMISE = (
    "A command that is killed at any moment leaves each result absent or complete and all earlier files as they were; the "
    "same command then clears what was left and gives, bit for bit, what an uninterrupted run gives."
)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CALLS = {
    *("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("os.utime", "fcntl.flock"),
}
UNFINISHED = ".unfinished"


@dataclass
class Trial:
    """A course, how it goes when nobody interrupts it, and where its cases happen."""

    course: Course
    start: Path
    folder: Path
    before: dict[str, str] = field(init=False)
    after: dict[str, str] = field(init=False)  # an uninterrupted run
    seconds: float = field(init=False)
    calls: int = field(init=False)

    def __post_init__(self) -> None:
        self.before = files(begin(self.start, self.folder, self.course))
        with mmap.mmap(-1, 8) as counter:
            must(self.folder, self.course.words, counting(counter))
            self.calls = int.from_bytes(counter[:8], "little")
        self.after = files(self.folder)
        self.seconds = must(begin(self.start, self.folder, self.course), self.course.words).seconds
        if files(self.folder) != self.after:
            raise RuntimeError(f"{self.course.name}: two uninterrupted runs differ {self._differing(self.after)}")

    def at_moment(self, share: float, number: int) -> str | None:
        """Send a signal after a share of the course, and return what is wrong then, if anything."""
        running = Running(begin(self.start, self.folder, self.course), self.course.words)
        return self._judge(running.wait(share * self.seconds, number))

    def at_call(self, call: int, number: int = signal.SIGKILL) -> str | None:
        """Send a signal before a call that changes the file system, and return what is wrong then, if anything."""
        begin(self.start, self.folder, self.course)
        return self._judge(ran(self.folder, self.course.words, signalling(call, number)))

    def _judge(self, killed: Ran) -> str | None:
        """Look at what a killed run left, run the command again, and return the first fault."""
        if killed.code not in (0, 130, -signal.SIGKILL, -signal.SIGTERM):
            return f"ended with {killed.code}: {killed.said[-400:]}"
        left = files(self.folder)
        if fault := self._fault_of_left(left):
            return f"after the kill: {fault}"
        again = ran(self.folder, self.course.words)
        if again.code == 1 and "exists already" in again.said:
            there = files(self.folder)
            if not all(self._part(there, name) == self._part(self.after, name) for name in self.course.outputs):
                return f"refused, though not all is there: {again.said[-300:]}"
            if hidden := [name for name in there if UNFINISHED in name and not name.startswith(("cache", "tmp"))]:
                return f"the refusing run left {hidden}"
            again = ran(self.folder, [*self.course.words, "--force"])
        if again.code:
            return f"the same command then ended with {again.code}: {again.said[-400:]}"
        if files(self.folder) != self.after:
            return f"the next run's files differ from an uninterrupted run's: {self._differing(files(self.folder))}"
        return None

    def _fault_of_left(self, left: dict[str, str]) -> str | None:
        """Return what is wrong with what a killed run left, if anything."""
        own = ("cache", "tmp", "result", "new")
        for name, content in self.before.items():
            if name.split("/")[0] not in own and left.get(name) != content:
                return f"{name} is not as it was"
        for name in left:
            if name not in self.before and name.split("/")[0].split(".")[0] not in own and UNFINISHED not in name:
                return f"{name} was not there before"
        for name in self.course.outputs:
            there = self._part(left, name)
            if there and there not in (self._part(self.before, name), self._part(self.after, name)):
                return f"{name} is half: {sorted(there)}"
            if not there and self._part(self.before, name) and not any(UNFINISHED in path for path in left):
                return f"{name} is gone"
        return None

    def _part(self, tree: dict[str, str], name: str) -> dict[str, str]:
        return {path: content for path, content in tree.items() if path == name or path.startswith(f"{name}/")}

    def _differing(self, tree: dict[str, str]) -> list[str]:
        return [name for name in sorted(tree.keys() | self.after.keys()) if tree.get(name) != self.after.get(name)]


def counting(counter: mmap.mmap, then: Callable[[int], None] = lambda call: None) -> Callable[[], None]:
    """Return what lets a process count its calls that change the file system, and call `then` before each."""

    def install() -> None:
        calls = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal calls
            if event in CALLS or (event == "open" and _writes(*arguments)):
                calls += 1
                counter[:8] = calls.to_bytes(8, "little")
                then(calls)

        sys.addaudithook(hook)

    return install


def _writes(path: Any, mode: Any, flags: Any) -> bool:
    """Return True where a file is opened to be created or written."""
    return bool(int(flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and not str(path).startswith("/dev/")


def signalling(at: int, number: int) -> Callable[[], None]:
    """Return what lets a process send itself a signal before its n-th call that changes the file system."""

    def then(call: int) -> None:
        if call == at:
            os.kill(os.getpid(), number)

    return counting(mmap.mmap(-1, 8), then)


def moments(names: Iterable[str], cases: int, seed: int) -> list[tuple[str, float, int]]:
    """Draw cases: a course, a share of its duration, and a signal; all courses in turn."""
    drawn = random.Random(seed)
    return [(name, drawn.random(), drawn.choice(SIGNALS)) for name in islice(cycle(names), cases)]


@click.command()
@click.option("--cases", default=300, help="Signals at drawn moments, over all courses.")
@click.option("--calls/--no-calls", default=True, help="Kill before every call that changes the file system, too.")
@click.option("--stride", default=1, help="Only every so manieth of these calls.")
@click.option("--course", "names", multiple=True, type=click.Choice(list(COURSES)), help="Only these courses.")
@click.option("--seed", default=0)
@click.option("--out", type=click.Path(path_type=Path))
def main(cases: int, calls: bool, stride: int, names: tuple[str, ...], seed: int, out: Path | None) -> None:
    """Kill commands at moments and at calls, and count the broken promises."""
    imported()
    tally, chosen = Tally(PROMISE), list(names or COURSES)
    work = Path(tempfile.mkdtemp(prefix="ffedit-kill-"))
    try:
        start = prepare(work)
        trials = {name: Trial(COURSES[name], start, work / "case") for name in chosen}
        for name, share, number in moments(chosen, cases, seed):
            case = {"course": name, "share": round(share, 4), "signal": signal.Signals(number).name}
            tally.count(f"{name}, at a moment", case, trials[name].at_moment(share, number))
        for name, trial in trials.items() if calls else ():
            for call in range(1, trial.calls + 1, stride):
                tally.count(f"{name}, at a call", {"course": name, "call": call}, trial.at_call(call))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tally.finish(out, seed=seed, calls={name: trial.calls for name, trial in trials.items()}, stride=stride)


if __name__ == "__main__":
    main()
