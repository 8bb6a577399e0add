"""Errors show the beginning of what was received, however long its words are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ffedit import EditError
from ffedit.errors import brief


def test_long_words_are_cut_and_not_left_out() -> None:
    assert brief(ValueError("x" * 300)) == "x" * 198 + " …"
    assert brief(ValueError("a\n b")) == "a b" and brief(ValueError()) == "ValueError"
    with pytest.raises(EditError, match=r"found '/folder/x+ … \(str\) where a path"):
        EditError.require("/folder/" + "x" * 100, Path, "a path was expected")
    with pytest.raises(EditError, match=r"top is '5+ …; a whole"):
        EditError.whole("top", "5" * 100, 1)
