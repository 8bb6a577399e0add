"""Edits that were made and undone leave nothing behind: no open file, no thread, no tensor.

`evaluations/reliability/long.py` lays a line through these counts, and through memory, for thousands of edits.
"""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import psutil
import torch
import zoo
from shell import save_model
from storing import BARE
from writing import CORPUS, quick

import ffedit
from ffedit import Edit, Fact


def held() -> tuple[int, int, int]:
    """Open files, threads and live tensors of this process."""
    gc.collect()
    # By type: `isinstance` would wake what loads lazily.
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return len(os.listdir("/proc/self/fd")), psutil.Process().num_threads(), tensors


def test_what_is_held_does_not_grow(verified_here: object, tmp_path: Path) -> None:
    editable = ffedit.load(save_model(zoo.trained("gpt2", True), tmp_path / "base"))
    stats = ffedit.collect_stats(editable, [1], corpus=CORPUS)
    before, counts = zoo.snapshot(editable), []
    for number in range(9):
        subject, place = zoo.KNOWN[number % len(zoo.KNOWN)]
        fact = Fact(subject, zoo.TEMPLATES[0], "Rome" if place != "Rome" else "Spain")
        edit = ffedit.edit(editable, [fact], "rome", layers=[1], config=quick(**BARE, steps=1), stats=stats)
        edit.save(tmp_path / "edit", force=True)
        edit = Edit.load(tmp_path / "edit")
        ffedit.evaluate(editable, [fact], edit)
        edit.apply_(editable)
        edit.undo_(editable)
        folder = ffedit.export(editable, edit, tmp_path / "edited", verify="tensors").folder
        edit.undo_(ffedit.load(folder))
        ffedit.undo(folder, tmp_path / "undone", verify="tensors")
        for made in (folder, tmp_path / "undone"):
            shutil.rmtree(made)
        del fact, edit
        if number % 4 == 0:  # the first fills caches
            counts.append(held())
    assert zoo.unchanged(editable, before)
    assert counts[1] == counts[2], f"files, threads and tensors: {counts}"
