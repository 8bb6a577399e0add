"""Edits that were made and undone leave nothing behind: no open file, no thread, no tensor.

`evaluations/reliability/long.py` lays a line through these counts, and through memory, for thousands of edits.
"""

from __future__ import annotations

from pathlib import Path

import long
import zoo
from shell import save_model
from writing import CORPUS

import ffedit


def test_what_is_held_does_not_grow(tensors_only: object, tmp_path: Path) -> None:
    editable = ffedit.load(save_model(zoo.trained("gpt2", True), tmp_path / "base"))
    stats = ffedit.collect_stats(editable, [1], corpus=CORPUS)
    before, counts = zoo.snapshot(editable), []
    for number in range(5):
        long.one_edit(editable, stats, number, tmp_path, exports=True)
        if number % 2 == 0:  # the first fills caches
            counts.append({name: count for name, count in long.counted(True).items() if name != "resident bytes"})
    assert zoo.unchanged(editable, before)
    assert counts[1] == counts[2], f"files, threads and tensors: {counts}"
