"""Ask a fresh process whether what was written is what was meant; only then does it count as done.

A process of its own has nothing of this one in its memory: it sees what anybody will see who loads the folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import torch

from ffedit.errors import CheckError
from ffedit.files.fresh_process import run_module


@dataclass(frozen=True)
class Task:
    """What is to be verified."""

    kind: str  # "checkpoint", "undo", "adapter", "gguf", "gguf adapter" or "memory" (of a model that is on no disk)
    folder: str  # what was written
    base: str  # folder that it was made from; for "memory", the file of the expected numbers
    edit: str | None = None  # the edit to undo
    trust_remote_code: bool = False
    threads: int = 1  # of torch; sums depend on it in the last bit


@dataclass(frozen=True)
class Checked:
    """What a fresh process found equal."""

    tensors: int  # number of tensors (or matrices of an adapter)
    logits: bool  # whether logits were compared
    peft: bool | None = None  # whether PEFT loaded the adapter; None where there is none to load


def check_fresh(task: Task) -> Checked:
    """Run `python -m ffedit.exporter.verification` on a task; CheckError where it differs, or could not finish."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if not task.trust_remote_code:  # everything is on the disk, so nothing is to be asked of the hub
        environment["HF_HUB_OFFLINE"] = "1"
    question = json.dumps(asdict(replace(task, threads=torch.get_num_threads())))
    try:
        process = run_module("ffedit.exporter.verification", question, environment)
    except OSError as error:
        raise CheckError(
            f"the process that verifies could not be started ({error.strerror or error}); nothing was written"
        ) from error
    code, lines, problems = process.returncode, process.stdout.strip().splitlines(), process.stderr.strip().splitlines()
    if code or not lines:
        last = (problems or [f"exit code {code}"])[-1]
        raise CheckError(f"the process that verifies the export did not finish ({last}); nothing was written")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise CheckError(f"{answer['error']}; nothing was written")
    return Checked(**answer)
