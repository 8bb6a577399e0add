"""Spoiled files and options: each is read, or refused in one line; nothing else is raised, written, or waited for.

    python evaluations/reliability/fuzz.py --cases 20000 --out evaluations/reports/reliability/fuzz.json

Of every kind in `fuzzing.KINDS`, valid files are spoiled and read by the functions that the commands read them with.
One case in ten goes through the command line in this process, where a spoiled file or a spoiled value of an option has
to end with exit code 0, 1 or 2, at most one line of error, no control character on the terminal, and no file left
behind by a refusal; no model is loaded there. A case may take `LONGEST` seconds, and all of them `MOST` bytes of
address space more than the imports.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import click
import fuzzing
import hypothesis
import hypothesis.strategies as st
from fuzzing import Case, Damage
from tally import REPORTS, Tally

PROMISE = (
    "A damaged file or option is read, or refused in one line with exit code 1 or 2: no traceback, no file left "
    "behind, bounded time and memory."
)
LONGEST, MOST = 20, 4 << 30
SHARE = 10  # of the cases, one in so many goes through the command line
NUMBER = st.integers(0, 2**32 - 1)


class Slow(BaseException):
    """A case took longer than `LONGEST` seconds."""


class Runner:
    """Runs cases, counts them, and counts a fault of one description once in full and then by number."""

    def __init__(self, tally: Tally, scratch: Path) -> None:
        self.tally, self.files, self.elsewhere = tally, scratch / "files", scratch / "elsewhere"
        self.slowest, self.known = 0.0, dict[str, int]()
        for folder in (self.files, self.elsewhere):
            folder.mkdir()

    def read(self, case: Case) -> None:
        """Let the readers read one spoiled input."""
        self._count(case[0], case, lambda: fuzzing.read_case(case, self.files))

    def run(self, case: Case, which: int) -> None:
        """Run a command on one spoiled input, or with a spoiled value of an option."""
        name, where, damages = case
        commands = fuzzing.KINDS[name].commands
        if which % 2 and commands:
            fuzzing.write_case(case, self.files)
            only = list(self.files.iterdir())
            target = only[0] if len(only) == 1 and name == "facts" else self.files
            words = [word.format(target) for word in commands[where % len(commands)]]
            self._count(f"{name}, by the command line", case, lambda: fuzzing.run_case(words, self.elsewhere))
        else:
            words = fuzzing.option_words(where, damages[0][2])
            self._count("value of an option", words, lambda: fuzzing.run_case(words, self.elsewhere))

    def _count(self, kind: str, case: Any, work: Any) -> None:
        started = time.perf_counter()
        try:
            with limited():
                fault = work()
        except Slow:
            fault = f"took more than {LONGEST} s"
        self.slowest = max(self.slowest, time.perf_counter() - started)
        if fault is not None:
            about = fault.split(": ")[0] if " at " in fault else fault
            self.known[about] = self.known.get(about, 0) + 1
        self.tally.count(kind, case, fault)


@contextmanager
def limited() -> Iterator[None]:
    """Interrupt what takes longer than `LONGEST` seconds."""

    def stop(number: int, frame: Any) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bound_memory() -> None:
    """Let an allocation fail that needs more than `MOST` bytes beyond what is taken now."""
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST, resource.RLIM_INFINITY))


def drawn(runner: Runner, cases: int, seed: int) -> None:
    """Run cases that Hypothesis draws."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.sampled_from(list(fuzzing.KINDS)), NUMBER, fuzzing.damages, NUMBER)
    def draw(name: str, where: int, damages: Sequence[Damage], which: int) -> None:
        if runner.tally.cases.total() >= cases:
            return
        case = name, where, damages
        if which % SHARE:
            runner.read(case)
        else:
            runner.run(case, which // SHARE)

    draw()


@click.command(help=__doc__)
@click.option("--cases", default=20_000, type=click.IntRange(1))
@click.option("--seed", default=0)
@click.option("--out", type=click.Path(path_type=Path), default=REPORTS / "fuzz.json")
def main(cases: int, seed: int, out: Path) -> None:
    """Draw cases, run them, and write the report."""
    warnings.simplefilter("ignore")  # numpy's, of numbers near the largest
    scratch = Path(tempfile.mkdtemp(prefix="fuzz"))
    os.environ.update(FFEDIT_CACHE=str(scratch / "cache"), HF_HUB_OFFLINE="1", COLUMNS="100")
    tally = Tally(PROMISE)
    runner = Runner(tally, scratch)
    for kind in fuzzing.KINDS.values():  # imports what readers import when they are first called
        kind.make()
    with redirect_stderr(io.StringIO()):
        for name in fuzzing.KINDS:
            fuzzing.read_case((name, 0, []), runner.files)
    gc.collect()
    bound_memory()
    drawn(runner, cases, seed)
    shutil.rmtree(scratch, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    tally.finish(out, seed=seed, slowest_seconds=runner.slowest, faults=runner.known, peak_megabytes=peak)


if __name__ == "__main__":
    main()
