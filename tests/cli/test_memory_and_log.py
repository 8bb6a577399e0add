"""A full memory and a log on a full disk: one line, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shell import shell

from ffedit.cli.run import read_recipe
from ffedit.errors import EditError
from ffedit.files import cache

TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(TORCH), RuntimeError("can't start new thread")])
def test_a_memory_that_fails_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(cache, "sizes", fail)
    done = shell(capsys, "cache", "list")
    assert done.code == 1 and done.err.startswith("error: not enough memory (") and done.err.count("\n") == 1
    assert done.err.endswith("--device, or a smaller model\n")
    monkeypatch.setattr(cache, "sizes", lambda: {}["no such"])
    with pytest.raises(KeyError):
        shell(capsys, "cache", "list")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_on_a_full_disk_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    done = shell(capsys, "cache", "list", "--log", "/dev/full")
    assert done.code == 0 and done.err == "" and "0 files" in done.out


def test_a_recipe_with_a_control_character_or_a_date_that_is_none(tmp_path: Path) -> None:
    for content in ("model: a\x1a\n", "seed: 2001-13-45\n"):
        (tmp_path / "r.yaml").write_text(content)
        with pytest.raises(EditError, match=r"r\.yaml: not YAML") as caught:
            read_recipe(tmp_path / "r.yaml")
        assert "\n" not in str(caught.value)
