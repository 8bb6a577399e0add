"""The drivers of faults and flips, with few cases: whatever the system refuses, and whatever is damaged, is said."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import flips
import pytest
from shell import fork, process

DRIVERS = Path(__file__).parents[2] / "evaluations" / "reliability"
KINDS = "full disk from a call on,a call fails once,too many files once,no home,memory fails from a call on"
READ = (
    "edit: manifest,edit: tensors,statistics,undo: originals.safetensors,benchmark: results.jsonl,benchmark: manifest"
)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="faults come from a C library")
def test_the_driver_of_system_faults_finds_none(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    done = process(
        DRIVERS / "faults.py", "--cases", "1", "--kinds", KINDS, "--commands", "checkpoint,stats", "--out", out
    )
    assert done.code == 0, done
    assert json.loads(out.read_text())["cases"] == dict.fromkeys(sorted(KINDS.split(",")), 1)


@pytest.mark.skipif(sys.platform == "win32", reason="cases are forked")
def test_the_driver_of_damaged_files_finds_none(tmp_path: Path) -> None:
    out = tmp_path / "flips.json"
    words = ["--cases", "10", "--cuts", "5", "--kinds", READ, "--out", str(out)]
    done = fork(lambda: flips.main(words, standalone_mode=False))
    assert done.code == 0, done
    assert all(sum(ends.values()) == 15 for ends in json.loads(out.read_text())["ends"].values())
