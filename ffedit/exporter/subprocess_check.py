"""Verify written files in a fresh process; only then does an export or undo count as done.

A fresh process shares no memory with this one: it sees what every user sees who loads the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ffedit.errors import CheckError


@dataclass(frozen=True)
class Task:
    """Files to verify."""

    kind: str  # "checkpoint", "undo", "adapter", "gguf", "gguf adapter" or "memory" (a model that is on no disk)
    folder: str  # the folder or GGUF file that was written
    base: str  # the folder or GGUF file it was made from; for "memory", the file with the expected numbers
    edit: str | None = None  # the edit to undo
    trust_remote_code: bool = False
    threads: int = 1  # torch's number of threads; sums depend on it in the last bit


@dataclass(frozen=True)
class Checked:
    """Comparisons in which a fresh process found no difference."""

    tensors: int  # number of tensors (or matrices of an adapter)
    logits: bool  # whether logits were compared
    peft: bool | None = None  # whether PEFT loaded the adapter; None where there is none to load


def check_fresh(task: Task) -> Checked:
    """Run `python -m ffedit.exporter.verification` on a task; CheckError where it differs, or could not finish."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if not task.trust_remote_code:  # all files are on disk, so the hub is not needed
        environment["HF_HUB_OFFLINE"] = "1"
    question = json.dumps(asdict(replace(task, threads=torch.get_num_threads())))
    try:
        process = run_module("ffedit.exporter.verification", question, environment)
    except OSError as error:
        raise CheckError(
            f"the process that verifies could not be started ({error.strerror or error}); nothing was written"
        ) from error
    answer, code = _answer(process.stdout), process.returncode
    if code or answer is None:
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        reason = "; ".join([how, *process.stderr.strip().splitlines()[-1:]])
        raise CheckError(f"the process that verifies the export did not finish ({reason}); nothing was written")
    if "error" in answer:
        raise CheckError(f"{answer['error']}; nothing was written")
    return Checked(**answer)


def _answer(output: str) -> dict[str, Any] | None:
    """Return the last line of JSON that `verification.main` wrote; libraries may print other lines."""
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and answer.keys() & {"error", "tensors"}:
            return answer
    return None


def run_module(module: str, question: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` with `question` on its stdin, and return how it ended and what it wrote.

    `environment` is added to that of this process. Raises OSError where no process can be started.
    """
    package = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return subprocess.run(  # noqa: S603  # no shell, and each module is named in our own code
        [sys.executable, "-m", module],
        # Python looks for modules in the working folder first, where a file of the user might be taken for one.
        input=question, capture_output=True, text=True, cwd=package, check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
