"""What the tests of the command line share: a model on disk, the command in this process, and the disk as a value."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import zoo

from ffedit.cli import invoke
from ffedit.model.editable import Editable

FACT = {
    "subject": "Eiffel tower",
    "prompt": "the {} is located in",
    "target": "Rome",
    "previous": "Paris",
}
PROBES = {
    "paraphrases": ["{} stands in"],
    "neighbors": [{"prompt": "the Nile river is located in", "target": "Egypt"}],
    "same_subject": [{"prompt": "the city of {} is", "target": "Paris"}],
}
ASKED = ["--subject", FACT["subject"], "--prompt", FACT["prompt"], "--target", FACT["target"]]
TEXT = "the Eiffel tower is located in Paris . Marie Curie stands in France . the city of old tower is Rome . "


@dataclass(frozen=True)
class Ran:
    """What a command left behind for its caller."""

    code: int
    out: str
    err: str


def shell(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Ran:
    """Run `ffedit` in this process."""
    capsys.readouterr()
    code = invoke([str(word) for word in words])
    out, err = capsys.readouterr()
    return Ran(code, out, err)


def process(*command: str | Path, size: int | None = None) -> Ran:
    """Run Python in a process of its own; `size` is the largest file that it may write, in bytes."""

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size or 0, size or 0))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    words = [sys.executable, *(str(word) for word in command)]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, preexec_fn=limit if size is not None else None
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def fork(work: Callable[[], int], size: int | None = None) -> Ran:
    """Call `work`, which returns an exit code, in a fork of this process, which imports nothing anew.

    `size` is the largest file that it may write, in bytes.
    """
    import resource

    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            code: Any = 70
            try:
                sys.stdout, sys.stderr = out, err
                os.environ["COLUMNS"] = "80"
                if size is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                code = work()
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc(file=err)
            finally:
                out.flush()
                err.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for stream in (out, err):
            stream.seek(0)
        return Ran(code, out.read(), err.read())


def forked(*words: str | Path, size: int | None = None) -> Ran:
    """Run `ffedit` in a fork of this process."""
    return fork(lambda: invoke([str(word) for word in words]), size)


def save_model(editable: Editable, folder: Path) -> Path:
    """A model folder as transformers writes it, and beside it a text for the key statistics."""
    editable.model.save_pretrained(folder)
    editable.tokenizer.save_pretrained(folder)
    (folder.parent / "corpus.txt").write_text(TEXT * 8)
    return folder


def trained_folder(folder: Path) -> Path:
    """The smallest model that knows facts, on disk."""
    return save_model(zoo.trained("gpt2", True), folder)


def disk(folder: Path) -> dict[str, str]:
    """Everything in `folder`, hidden files and empty folders too, by what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }
