"""Every test has its own cache and one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; no test reads or fills the user's."""
    folder = tmp_path / "ffedit-cache"
    monkeypatch.setenv("FFEDIT_CACHE", str(folder))
    return folder
