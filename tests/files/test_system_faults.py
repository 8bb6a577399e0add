"""What a file system or a user without a home refuses costs nothing, or one line."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ffedit import EditError
from ffedit.files import atomic, cache


def test_a_file_system_without_permissions_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    atomic.write_text(tmp_path / "a.txt", "whole")
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_a_user_without_a_home_is_told_where_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any, **__: Any) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("FFEDIT_CACHE")
    monkeypatch.setattr(cache, "user_cache_path", nowhere)
    with pytest.raises(EditError, match=r"home directory.*FFEDIT_CACHE"):
        cache.folder()


def test_a_clock_that_is_years_ahead_deletes_no_entry_that_was_just_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used = cache.path("texts", "used", ".txt")
    cache.write(used, lambda made: made.write_text("a"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3 * 365 * cache.DAY)
    cache.write(cache.path("texts", "other", ".txt"), lambda made: made.write_text("b"))
    assert used.exists()


def test_what_libraries_raise_at_a_write_is_named_as_the_disk_s() -> None:
    with pytest.raises(OSError, match="No space left"), atomic.os_errors():
        raise Exception("No space left on device (os error 28)")  # as tokenizers does
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError) as caught, atomic.os_errors():
        raise full
    assert caught.value is full
