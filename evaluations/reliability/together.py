"""Run several commands at once on one cache, one output or one folder of results.

The promise: nothing is corrupted and nothing hangs; each process does its work, or says in one line why it cannot; what
is there afterwards is, bit for bit, what one process alone would have made; a killed process's lock holds up nobody.

    python evaluations/reliability/together.py --cases 60 --out evaluations/reports/reliability/together.json

Each case starts two to eight processes, each after a drawn delay. Before some, a process is killed that held a lock.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import rich_click as click
from courses import COURSES, Course, Ran, Running, begin, files, imported, must, prepare
from kill import signalling
from tally import Tally

PROMISE = (
    "Up to eight processes that share a cache, an output or a folder of results corrupt nothing and do not hang. Each "
    "succeeds or gives its reason in one line, and the result equals, bit for bit, that of one process alone."
)
REFUSALS = ("exists already", "another run works", "cannot be written")
CLEAR = COURSES["cache clear"]


@dataclass(frozen=True)
class Scene:
    """Commands that run at once in one folder, in turn."""

    name: str
    courses: tuple[Course, ...]
    killed_at: int = 0  # the call that changes the file system before which a process was killed earlier; 0: none was

    def begin(self, start: Path, folder: Path) -> None:
        """Make the folder, with the lock of a killed process where that is meant."""
        begin(start, folder, self.courses[0])
        if self.killed_at:
            left = Running(folder, self.courses[0].words, signalling(self.killed_at, signal.SIGKILL)).wait()
            if left.code != -signal.SIGKILL or not any(name.endswith(".lock") for name in files(folder)):
                raise RuntimeError(f"{self.name}: no lock was left ({left.code})")


def of(*names: str) -> tuple[Course, ...]:
    """Return courses by their names."""
    return tuple(COURSES[name] for name in names)


SCENES = {
    scene.name: scene
    for scene in (
        Scene("one cache: statistics", of("stats into the cache")),
        Scene("one cache: traces", of("locate")),
        Scene("one cache: a conversion", of("conversion")),
        Scene("one cache: all of these", of("stats into the cache", "locate", "conversion")),
        Scene("one cache, which is cleared", (*of("locate", "stats into the cache", "conversion"), CLEAR)),
        Scene("one output: apply", of("apply")),
        Scene("one output: apply over another", of("apply over another")),
        Scene("one output: export", of("export checkpoint")),
        Scene("one output: export over another", of("export over another")),
        Scene("one output: a GGUF file", of("export gguf")),
        Scene("one folder of results", of("bench")),
        Scene("one folder of results, with a stale lock", of("bench"), 30),
        Scene("one cache, with a stale lock", of("conversion"), 12),
    )
}


def fault(scene: Scene, start: Path, folder: Path, delays: list[float]) -> str | None:
    """Run a scene once, as many processes as `delays` in seconds, and return what is wrong, if anything."""
    expected = alone(scene, start, folder)
    scene.begin(start, folder)
    running = [
        Running(folder, course.words, delay=delay) for course, delay in zip(cycle(scene.courses), delays, strict=False)
    ]
    ended = [process.wait() for process in running]
    for process in ended:
        if wrong := _wrong(process):
            return wrong
    if not any(process.code == 0 for process in ended):
        return f"none succeeded: {[process.said for process in ended]}"
    if CLEAR in scene.courses:  # everything may have been cleared in the end
        for course in scene.courses[:-1]:
            must(folder, course.words)
    there = files(folder, ordered=False)
    if differing := [name for name in sorted(there.keys() | expected.keys()) if there.get(name) != expected.get(name)]:
        return f"what is left differs from what one process makes: {differing}"
    return None


def _wrong(process: Ran) -> str | None:
    """Return what is wrong with how a process ended, if anything."""
    if process.code == 0:
        return None
    if process.code != 1 or len(process.said.strip().splitlines()) != 1:
        return f"ended with {process.code}: {process.said[-600:]}"
    return None if any(words in process.said for words in REFUSALS) else f"refused: {process.said}"


_ALONE: dict[str, dict[str, str]] = {}


def alone(scene: Scene, start: Path, folder: Path) -> dict[str, str]:
    """Return the files that the commands of a scene leave one after another."""
    if scene.name not in _ALONE:
        begin(start, folder, scene.courses[0])
        for course in scene.courses:
            if course is not CLEAR:
                must(folder, course.words)
        _ALONE[scene.name] = files(folder, ordered=False)
    return _ALONE[scene.name]


@click.command()
@click.option("--cases", default=60, help="Groups of processes.")
@click.option("--scene", "names", multiple=True, type=click.Choice(list(SCENES)), help="Only these scenes.")
@click.option("--seed", default=0)
@click.option("--out", type=click.Path(path_type=Path))
def main(cases: int, names: tuple[str, ...], seed: int, out: Path | None) -> None:
    """Run commands at once, and count the broken promises."""
    imported()
    tally, drawn, processes = Tally(PROMISE), random.Random(seed), 0
    work = Path(tempfile.mkdtemp(prefix="ffedit-together-"))
    try:
        start = prepare(work)
        for name in islice(cycle(names or SCENES), cases):
            delays = [
                round(drawn.choice([0.0, drawn.random()]), 3)
                for _ in range(drawn.randint(max(2, len(SCENES[name].courses)), 8))
            ]
            processes += len(delays)
            tally.count(name, {"scene": name, "delays": delays}, fault(SCENES[name], start, work / "case", delays))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tally.finish(out, seed=seed, processes=processes)


if __name__ == "__main__":
    main()
