"""What drivers share: a tiny model with everything that commands read, and commands in forked children.

A child is forked from one process that has imported everything, so that a command takes tenths of a second; what it
writes to its streams is read back. Exports are verified in the same process, by the code that the fresh one runs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[2]
sys.path[:0] = [str(HERE / "tests" / "helpers")]

import matplotlib.pyplot  # noqa: F401  # imported before the children are forked
import peft  # noqa: F401
import torch
import transformers
import zoo
from gguf_making import parts, write_gguf
from shell import FACT, PROBES, save_model, trained_folder

import ffedit
from ffedit.cli import COMMANDS, invoke, module_of
from ffedit.exporter import exporting, verification
from ffedit.exporter.subprocess_check import Checked, Task

ANOTHER = {"subject": "Marie Curie", "prompt": "{} stands in", "target": "Spain", "previous": "France"}
NUMBERS = ["value.steps=20", "value.step_size=0.2", "value.penalty_decay=0.7", "prompts.contexts=2"]
SHORT = [word for number in NUMBERS for word in ("--set", number)]
LONGEST = 120  # seconds of a command
# What differs between two runs of the same command: times, and the hash of what they stand in.
VARIES = re.compile(rb"[0-9a-f.+-]{2,}|[0-9]")


@dataclass(frozen=True)
class Ran:
    """The end of a command."""

    code: int  # negative: the signal that ended it
    out: str
    err: str


def words(*words: str | Path | Iterable[str]) -> list[str]:
    """Join words of a command line, and lists of them."""
    return [w for word in words for w in ([str(word)] if isinstance(word, str | Path) else word)]


def prepare(verifying: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Import what commands import, and let this process and its children compute with one thread.

    They verify what they export themselves, inside the context `verifying`.
    """
    for name in COMMANDS:
        importlib.import_module(f"ffedit.cli.{module_of(name)}")
    for name in (
        "benchmark.run",
        "layer_choice.choose",
        "inspector.views",
        "display.html.result",
        "display.terminal.show",
    ):
        importlib.import_module(f"ffedit.{name}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def check(task: Task) -> Checked:
        with verifying():
            return verification.CHECKS[task.kind](task)

    exporting.check_fresh = check
    sys.modules["ffedit.cli"]._show.__globals__["Console"] = lambda **_: _Plain()


class _Plain:
    """Standard error without the width of a terminal."""

    def print(self, text: object, **_: object) -> None:
        print(text, file=sys.stderr, flush=True)


def run(arguments: list[str], folder: Path, before: Callable[[], object] = lambda: None) -> Ran:
    """Run `ffedit` on `arguments` in a forked child that is in `folder`, after `before` was called there."""
    streams = [os.memfd_create(name) for name in ("out", "err")]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        code = 70
        try:
            signal.alarm(LONGEST)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(streams[0], 1)
            os.dup2(streams[1], 2)
            os.chdir(folder)
            warnings.simplefilter("ignore")
            before()
            code = invoke(arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = []
    for stream in streams:
        size = os.lseek(stream, 0, os.SEEK_END)
        texts.append(os.pread(stream, size, 0).decode(errors="replace"))
        os.close(stream)
    return Ran(code, *texts)


def one_line(ran: Ran) -> str | None:
    """Say what is wrong with how a command ended that is not one line and exit 1 or 2; None for nothing."""
    lines = ran.err.strip().splitlines()
    if ran.code not in (1, 2):
        return f"exit {ran.code}: {ran.err.strip()[-400:]!r}; 1 or 2 was expected"
    if len(lines) != 1 or "Traceback" in ran.err or not lines[0].startswith("error: ") or len(lines[0]) < 20:
        return f"{ran.err.strip()[-400:]!r}; one line was expected"
    return None


def make(folder: Path) -> None:
    """Fill a folder with what commands read: models, facts, a text, an edit, a checkpoint, statistics."""
    folder.mkdir(parents=True)
    trained_folder(folder / "base")
    save_model(zoo.trained("gpt2", True), folder / "base")
    write_gguf(folder / "tiny.gguf", *parts())
    (folder / "fact.json").write_text(json.dumps({**FACT, **PROBES}))
    (folder / "facts.json").write_text(json.dumps([FACT, ANOTHER]))
    base, text = folder / "base", ["--corpus", str(folder / "corpus.txt")]
    fact = words("apply", folder / "fact.json", "--layers", "1", text, SHORT, "-q", "--force", "-m")
    for command in (
        words(fact, base, "--out", "edit", "--export", "edited", "--save-recipe", "recipe.yaml"),
        words(fact, folder / "tiny.gguf", "--out", "gguf-edit"),
        words("stats", "-m", base, text, "--layers", "1", "--out", "statistics", "-q"),
    ):
        ran = run(command, folder, lambda: os.environ.update(FFEDIT_CACHE=str(folder / "cache")))
        assert ran.code == 0, ran
    shutil.rmtree(folder / "cache")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def disk(folder: Path) -> dict[str, str]:
    """Return all that lies in a folder: by its path, "folder" or a hash of the content."""
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


def without_times(folder: Path) -> dict[str, str]:
    """Return what `disk` does, with numbers and hashes left out of texts: those of two equal runs are equal."""
    seen = disk(folder)
    for name in seen:
        path = folder / name
        if path.suffix in (".json", ".jsonl", ".html", ".md", ".yaml"):
            seen[name] = hashlib.sha256(VARIES.sub(b"", path.read_bytes())).hexdigest()
        elif path.suffix == ".safetensors":  # whose header may hold times
            content = path.read_bytes()
            end = 8 + int.from_bytes(content[:8], "little")
            header = json.dumps(json.loads(content[8:end]), sort_keys=True).encode()  # whose order varies, too
            seen[name] = hashlib.sha256(VARIES.sub(b"", header) + content[end:]).hexdigest()
        elif path.name == "log":  # which grows with each run
            seen[name] = "log"
        elif path.suffix == ".gguf":
            seen[name] = str(path.stat().st_size)
    return seen


assert Path(ffedit.__file__).is_relative_to(HERE), ffedit.__file__
