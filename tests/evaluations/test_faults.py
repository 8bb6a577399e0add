"""The drivers of faults and flips, with few cases: whatever the system refuses, and whatever is damaged, is said."""

from __future__ import annotations

import json
from pathlib import Path

import faults
import flips
import pytest
from shell import fork

pytestmark = pytest.mark.skipif(not hasattr(faults.os, "fork"), reason="cases are forked")
KINDS = ("all calls from one on fail", "a call fails once", "few open files", "files of a largest size", "no home")
READ = (
    "edit: manifest,edit: tensors,statistics,undo: originals.safetensors,benchmark: results.jsonl,benchmark: manifest"
)


def test_the_driver_of_system_faults_finds_none(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    chosen = [word for kind in KINDS for word in ("--kind", kind)]
    words = ["--cases", "1", *chosen, "--course", "export checkpoint", "--course", "stats", "--out", str(out)]
    done = fork(lambda: faults.main(words, standalone_mode=False))
    assert done.code == 0, done
    assert json.loads(out.read_text())["cases"] == dict.fromkeys(KINDS, 1)


def test_the_driver_of_system_faults_tells_a_refusal_from_a_fault() -> None:
    assert faults._wrong(faults.Ran(70, "Traceback (most recent call last)", 1.0), "few open files") is not None
    assert faults._wrong(faults.Ran(1, "error: the disk is full\n", 1.0), "few open files") is None
    assert faults._wrong(faults.Ran(1, "error: the disk is full\n", 1.0), "no hard links") is not None


def test_the_driver_of_damaged_files_finds_none(tmp_path: Path) -> None:
    out = tmp_path / "flips.json"
    words = ["--cases", "10", "--cuts", "5", "--kinds", READ, "--out", str(out)]
    done = fork(lambda: flips.main(words, standalone_mode=False))
    assert done.code == 0, done
    assert all(sum(ends.values()) == 15 for ends in json.loads(out.read_text())["ends"].values())
