"""The public names: listed, documented, and importable."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import ffedit

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    documented = re.findall(r"^::: ffedit\.(\w+)$", PAGE, re.MULTILINE)
    assert sorted(documented) == sorted(name for name in ffedit.__all__ if name != "__version__")


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    assert dir(ffedit) == sorted(ffedit.__all__)
    for name in ffedit.__all__:
        assert inspect.getdoc(getattr(ffedit, name)), name
