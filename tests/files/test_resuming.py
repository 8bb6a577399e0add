"""Long work goes on where it was stopped: with the same settings only, without what was half written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ffedit import EditError
from ffedit.files.placing import claimed
from ffedit.files.resuming import Journal, json_lines, load_state, read_journal, save_state


def test_a_journal_is_continued_with_its_own_settings_only(tmp_path: Path) -> None:
    path, settings = tmp_path / "new" / "a.jsonl", {"layer": 1, "run": {"seed": 0, "layers": (1, 2)}}
    Journal(path, settings).add({"fact": 1}, {"fact": 2})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"fact": 3')  # a kill
    again = Journal(path, settings)
    assert again.lines == [{"fact": 1}, {"fact": 2}]
    again.add({"fact": "ä"})
    assert Journal(path, settings).lines == again.lines == [{"fact": 1}, {"fact": 2}, {"fact": "ä"}]
    with pytest.raises(EditError, match=r"run.seed 0 there, 1 now; layer 1 there, None now") as caught:
        Journal(path, {"run": {**settings["run"], "seed": 1}})  # type: ignore[dict-item]
    assert "\n" not in str(caught.value)
    path.write_text(path.read_text(encoding="utf-8").replace('{"fact": 1', '{"fact"'), encoding="utf-8")
    with pytest.raises(EditError, match="line 2: damaged"):
        Journal(path, settings)


def test_a_journal_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EditError, match="cannot be"):
        Journal(tmp_path / "file" / "a.jsonl", {})
    assert read_journal(tmp_path / "none.jsonl") == []


def test_a_state_is_replaced_whole_and_read_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.safetensors"
    tensors = {"ids": torch.arange(3, dtype=torch.int32), "a": torch.randn(3, 4, dtype=torch.float64).T}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5), "half": torch.randn(5).bfloat16()}
    for done in (1, 2):
        save_state(path, tensors, {"done": done})
    again, values = load_state(path, "delete it")
    assert again.keys() == tensors.keys() and values == {"done": 2}
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(EditError, match=r"state\.safetensors: delete it"):
        load_state(path, "delete it")


def test_a_folder_is_claimed_by_one_process_and_left_clean(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(tmp_path / "out"), pytest.raises(EditError, match="another run"), claimed(tmp_path / "out"):
            pass
        assert not list((tmp_path / "out").iterdir())


def test_a_journal_that_is_deleted_or_torn_meanwhile_begins_anew_with_its_settings(tmp_path: Path) -> None:
    path, settings = tmp_path / "a.jsonl", {"layer": 1}
    one, two = Journal(path, settings), Journal(path, settings)
    path.unlink()  # as `ffedit cache clear` does
    one.add({"fact": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"fact": 2')  # by a process that was killed
    two.add({"fact": 3})
    assert Journal(path, settings).lines == [{"fact": 1}, {"fact": 3}]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3, "the settings stand there once"
    path.write_text(json_lines([{"fact": 1}]), encoding="utf-8")
    with pytest.raises(EditError, match="does not say which settings"):
        Journal(path, settings)


def test_a_claimed_folder_is_cleared_of_what_killed_processes_left(tmp_path: Path) -> None:
    (tmp_path / ".report.json.abcdefgh.unfinished").mkdir()
    (tmp_path / ".lock").touch()  # of a killed process
    with claimed(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert not list(tmp_path.iterdir())
