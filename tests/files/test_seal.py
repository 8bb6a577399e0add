"""A sealed file with any bit flipped is noticed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from ffedit import EditError
from ffedit.files.resuming import Journal, load_state, read_journal, save_state
from ffedit.files.seal import NAME, check, sealed, unsealed
from ffedit.files.tensor_ranges import write


def flipped(path: Path, seed: int) -> None:
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def test_a_flipped_bit_of_tensors_is_noticed(tmp_path: Path) -> None:
    path, matrix = tmp_path / "a.safetensors", torch.randn(5, 7)
    write(path, {"w": (torch.float32, (5, 7), [matrix[:2], matrix[2:]])})
    check(path)
    whole = path.read_bytes()
    for seed in range(200):
        flipped(path, seed)
        with pytest.raises(ValueError, match="checksum"):
            check(path)
        path.write_bytes(whole)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="checksum"):
        check(path)


def test_a_flipped_bit_of_a_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_state(path, {"sum": torch.randn(9, 9)}, {"seconds": 1.5})
    whole = path.read_bytes()
    for seed in range(100):
        flipped(path, seed)
        with pytest.raises(EditError, match="not a state"):
            load_state(path, "not a state")
        path.write_bytes(whole)
    assert load_state(path, "not a state")[1] == {"seconds": 1.5}


def test_the_same_state_has_the_same_bytes(tmp_path: Path) -> None:
    written = set()
    for i in range(16):  # safetensors alone orders the metadata by lot
        save_state(tmp_path / f"{i}.safetensors", {"sum": torch.ones(3), "ä": torch.ones(2)}, {"of": "Zürich\n\x1f"})
        written.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(written) == 1 and load_state(tmp_path / "0.safetensors", "no")[1] == {"of": "Zürich\n\x1f"}


def test_a_changed_number_of_a_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path).add({"score": 0.125, "name": "Zürich"})
    assert read_journal(path) == [{"score": 0.125, "name": "Zürich"}]
    path.write_text(path.read_text(encoding="utf-8").replace("0.125", "0.135"), encoding="utf-8")
    with pytest.raises(EditError, match="line 1: damaged"):
        read_journal(path)


def test_sealed_json_is_read_back_as_it_was() -> None:
    content = {"b": (1, 2), "a": {10: 0.1, 2: None}, "ü": float("inf")}
    back = json.loads(json.dumps(sealed(content)))
    assert unsealed(back) == {"b": [1, 2], "a": {"10": 0.1, "2": None}, "ü": float("inf")}
    for bare in ([1], {"a": 1}):
        with pytest.raises(ValueError, match="no checksum"):
            unsealed(bare)
    with pytest.raises(ValueError, match="checksum"):
        unsealed({**back, "b": [1, 3]})
    with pytest.raises(ValueError, match="checksum"):
        unsealed({**back, NAME: None})
