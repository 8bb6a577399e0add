"""Two thousand spoiled files and options, read or refused in one line (`evaluations/reliability/fuzz.py` has more)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fuzzing
import hypothesis
import hypothesis.strategies as st
import pytest
from fuzzing import Damage

NUMBER = st.integers(0, 2**32 - 1)
# YAML is read a hundred times as slowly as JSON, and a table by a library of its own.
CASES = {name: 60 if name in ("recipe", "table of facts") else 280 for name in fuzzing.KINDS}


def times(cases: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", fuzzing.KINDS)
def test_a_spoiled_file_is_read_or_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    @times(CASES[kind])
    @hypothesis.given(NUMBER, fuzzing.damages)
    def spoil(variant: int, damages: Sequence[Damage]) -> None:
        fault = fuzzing.read_case((kind, variant, damages), tmp_path)
        assert fault is None, fault

    assert fuzzing.read_case((kind, 0, []), tmp_path) is None
    spoil()


@pytest.mark.parametrize("kind", [name for name, kind in fuzzing.KINDS.items() if kind.commands])
def test_a_command_refuses_a_spoiled_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    files, elsewhere = tmp_path / "files", tmp_path / "elsewhere"
    files.mkdir()
    elsewhere.mkdir()

    @times(20)
    @hypothesis.given(NUMBER, fuzzing.damages)
    def spoil(variant: int, damages: Sequence[Damage]) -> None:
        fuzzing.write_case((kind, variant, damages), files)
        target = next(files.iterdir()) if kind == "facts" else files
        words = fuzzing.KINDS[kind].commands
        fault = fuzzing.run_case([word.format(target) for word in words[variant % len(words)]], elsewhere)
        assert fault is None, fault

    spoil()


def test_a_command_refuses_a_spoiled_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    @times(120)
    @hypothesis.given(NUMBER, NUMBER)
    def spoil(where: int, what: int) -> None:
        words = fuzzing.option_words(where, what)
        fault = fuzzing.run_case(words, tmp_path)
        assert fault is None, (words, fault)

    spoil()
