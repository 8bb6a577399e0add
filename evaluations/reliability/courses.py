"""What `kill.py`, `together.py` and `faults.py` share: commands on tiny models in a folder, each in a forked process.

All modules are imported once, and every run is forked from there. In all runs the clock stands still, so that files
with times in them are equal to the bit, and what verifies an export is forked too instead of started anew. Unfinished
work is saved as often as can be.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parents[2]
sys.path.insert(0, str(HERE / "tests" / "helpers"))
WAITED = 120.0  # seconds, after which a run counts as hanging
_clock = time.perf_counter

FACT = {"subject": "Eiffel tower", "prompt": "the {} is located in", "target": "Rome", "previous": "Paris"}
OTHER = {"subject": "Nile river", "prompt": "the {} is located in", "target": "France", "previous": "Egypt"}
TEXT = "the Eiffel tower is located in Paris . Marie Curie stands in France . the city of old tower is Rome . "
QUICK = [f"--set=value.{name}" for name in ("steps=20", "step_size=0.2", "penalty_decay=0.7")]
APPLY = ["apply", "fact.json", "--model=model", "--corpus=corpus.txt", "--layers=1", *QUICK]
EXPORT = ["export", "edit", "--model=model", "--out=result"]


@dataclass(frozen=True)
class Course:
    """A command, and the files and folders that it makes."""

    name: str
    words: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    replaces: bool = False  # outputs of another edit are there before


COURSES = {
    course.name: course
    for course in (
        Course("apply", (*APPLY, "--out=new", "--export=result", "--json=result.json"), ("new", "result")),
        Course("apply over another", (*APPLY, "--out=new", "--export=result", "--force"), ("new", "result"), True),
        Course("export checkpoint", (*EXPORT,), ("result",)),
        Course("export over another", (*EXPORT, "--force"), ("result",), True),
        Course("export adapter", (*EXPORT, "--format=adapter"), ("result",)),
        Course(
            "export gguf",
            ("export", "gguf-edit", "--model=tiny.gguf", "--out=result.gguf"),
            ("result.gguf",),
        ),
        Course(
            "export gguf as a checkpoint",
            ("export", "gguf-edit", "--model=tiny.gguf", "--out=result"),
            ("result",),
        ),
        Course(
            "export gguf adapter",
            ("export", "gguf-edit", "--model=tiny.gguf", "--format=adapter", "--out=result.gguf"),
            ("result.gguf",),
        ),
        Course("undo", ("undo", "exported", "--out=result"), ("result",)),
        Course("stats", ("stats", "--model=model", "--layers=0-1", "--corpus=corpus.txt", "--out=result"), ("result",)),
        Course("stats into the cache", ("stats", "--model=model", "--layers=0-1", "--tokens=256", "--corpus=sampled")),
        Course(
            "bench",
            (
                *("bench", "facts.json", "--model=model", "--corpus=corpus.txt", "--layers=1", "--no-full"),
                *("--mode=sequential", "--methods=alphaedit", "--out=result", *QUICK),
            ),
        ),
        Course("locate", ("locate", "facts.json", "--model=model", "--aggregate", "--json=result.json", "--samples=2")),
        Course("conversion", ("ask", "the Eiffel tower is in", "--model=tiny.gguf", "--tokens=1")),
        Course("cache clear", ("cache", "clear")),
    )
}


def imported() -> None:
    """Import what the commands use."""
    import click.testing  # noqa: F401
    import peft  # noqa: F401
    import torch

    import ffedit.exporter.verification  # noqa: F401
    from ffedit.benchmark import editing, report, run  # noqa: F401
    from ffedit.cli import COMMANDS, cli

    for name in COMMANDS:
        cli.get_command(None, name)  # type: ignore[arg-type]
    torch.set_num_threads(1)


def stop_clock() -> None:
    """Let every clock of this process stand still, and save unfinished work as often as can be."""
    from ffedit.editor import statistics, value
    from ffedit.inference import precision

    precision.least_seconds = lambda _: 1.0
    statistics.ROWS_PER_BATCH, statistics.SAVED_EVERY, value.SAVED_EVERY = 1, 1, -1.0
    for name in ("time", "perf_counter", "monotonic"):
        setattr(time, name, lambda: 1e9)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("ffedit") and hasattr(module, "perf_counter"):
            module.perf_counter = lambda: 1e9  # type: ignore[attr-defined]


def prepare(folder: Path, with_gguf: bool = True) -> Path:
    """Make the folder that every case begins with: models, facts, edits, an exported checkpoint."""
    import gguf_making
    import shell
    import zoo

    (start := folder / "start").mkdir(parents=True)
    shell.save_model(zoo.trained("gpt2", True), start / "model")
    (start / "corpus.txt").write_text(TEXT * 8)
    (start / "fact.json").write_text(json.dumps(FACT))
    (start / "facts.json").write_text(json.dumps([FACT, OTHER]))
    on_gguf = ["apply", "fact.json", "--model=tiny.gguf", "--corpus=corpus.txt", "--layers=1", *QUICK]
    must(start, [*APPLY, "--out=edit", "--export=exported"])
    must(start, [*APPLY, "--seed=1", "--out=other", "--export=other-exported"])
    if with_gguf:
        gguf_making.write_gguf(start / "tiny.gguf", *gguf_making.parts())
        must(start, [*on_gguf, "--out=gguf-edit", "--force"])
    clear(start)
    return start


def clear(folder: Path) -> None:
    """Begin with an empty cache and an empty folder of temporary files."""
    for name in ("cache", "tmp"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()


def begin(start: Path, folder: Path, course: Course) -> Path:
    """Make the folder of a case, as it is before the course."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder, copy_function=os.link)
    if course.replaces:
        shutil.copytree(folder / "other", folder / "new")
        shutil.copytree(folder / "other-exported", folder / "result")
    if course.name == "cache clear":
        for kind in ("moments", "gguf/folder"):
            (folder / "cache" / kind).mkdir(parents=True)
            (folder / "cache" / kind / "file").write_text(kind)
    return folder


def files(folder: Path, ordered: bool = True) -> dict[str, str]:
    """Return all that is in a folder, hidden files and empty folders too, by hashes of the contents.

    Where processes trace the same facts at once, each adds its lines to the journal in the cache: unless `ordered`,
    only which lines are there matters.
    """
    # A GGUF file's content is kept by the times of the file, which each case's links change.
    return {
        re.sub("^cache/gguf/[0-9a-f]{24}", "cache/gguf/content", str(path.relative_to(folder))): _hash(path, ordered)
        for path in sorted(folder.rglob("*"))
    }


def _hash(path: Path, ordered: bool) -> str:
    if not path.is_file():
        return "folder"
    content = path.read_bytes()
    if path.parent.name == "traces" and not ordered:
        content = b"\n".join(sorted(set(content.split(b"\n"))))
    return hashlib.sha256(content).hexdigest()


@dataclass
class Ran:
    """What a run ended with."""

    code: int  # negative: the signal that killed it; 124 if it was hanging
    said: str
    seconds: float


class Running:
    """A forked process that runs the command line in a folder."""

    def __init__(
        self, folder: Path, words: Sequence[str], before: Callable[[], None] | None = None, delay: float = 0.0
    ) -> None:
        self.started, self._log = _clock(), tempfile.TemporaryFile()  # noqa: SIM115, closed by `wait`
        sys.stdout.flush()
        sys.stderr.flush()
        before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the command begins
        self.pid = os.fork()
        if self.pid == 0:
            time.sleep(delay)
            _run(folder, words, before, self._log.fileno())
        signal.pthread_sigmask(signal.SIG_SETMASK, before_fork)

    def _signal(self, number: int) -> None:
        """Send a signal to the process; an interrupt also to what it has started, as a terminal does."""
        try:
            os.killpg(self.pid, number) if number == signal.SIGINT else os.kill(self.pid, number)
        except ProcessLookupError:  # it is just beginning
            os.kill(self.pid, number)

    def _ended(self, until: float) -> tuple[bool, int]:
        """Wait until the process has ended, or so many seconds after it began; return if it has, and its status."""
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done or _clock() - self.started > until:
                return bool(done), status
            time.sleep(0.001)

    def wait(self, signal_at: float | None = None, number: int = signal.SIGKILL) -> Ran:
        """Wait for the end, with a signal so many seconds after the beginning; end a process that takes too long."""
        ended, status = (False, 0) if signal_at is None else self._ended(signal_at)
        if not ended:
            if signal_at is not None:
                self._signal(number)
            ended, status = self._ended(WAITED)
        seconds, hanging = _clock() - self.started, not ended
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if hanging:
            os.waitpid(self.pid, 0)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")
        self._log.close()
        return Ran(124 if hanging else os.waitstatus_to_exitcode(status), said, seconds)


def ran(folder: Path, words: Sequence[str], before: Callable[[], None] | None = None) -> Ran:
    """Run a command to its end."""
    return Running(folder, words, before).wait()


def must(folder: Path, words: Sequence[str], before: Callable[[], None] | None = None) -> Ran:
    """Run a command that has to succeed."""
    done = ran(folder, words, before)
    if done.code:
        raise RuntimeError(f"{words}: {done.code}\n{done.said}")
    return done


def _run(folder: Path, words: Sequence[str], before: Callable[[], None] | None, log: int) -> None:
    """Run a command in this forked process, and end it."""
    code = 70
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        os.environ |= {"FFEDIT_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1"}
        os.environ |= {"COLUMNS": "100"}
        tempfile.tempdir = None
        sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(at, "wb"), write_through=True) for at in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop_clock()
        from ffedit.cli import invoke
        from ffedit.exporter import subprocess_check

        subprocess_check.subprocess = SimpleNamespace(run=verify_forked)  # type: ignore[assignment]
        if before is not None:
            before()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        code = invoke([*words, *(["--quiet"] if words[0] != "ask" else [])])
    except KeyboardInterrupt:  # just before or after the command
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def verify_forked(command: Sequence[str], input: str, cwd: str, **_: Any) -> subprocess.CompletedProcess[str]:
    """Run `ffedit.exporter.verification` in a fork of this process, in place of `subprocess.run`."""
    from ffedit.exporter import verification

    with tempfile.TemporaryFile("w+", dir="/dev/shm") as answer:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS):  # it is another one's
                    resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
                sys.stdin, sys.stdout = io.StringIO(input), answer  # type: ignore[assignment]
                os.chdir(cwd)
                verification.main()
                answer.flush()
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answer.seek(0)
        return subprocess.CompletedProcess(command, code, answer.read(), "")
