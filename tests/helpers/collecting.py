"""A text to collect statistics over, and whether two collections are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo

from ffedit.algebra.key_moments import KeyMoments
from ffedit.model.memory import Address

Stats = dict[Address, KeyMoments]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of about 1,500 tokens, no row of it like another."""
    generator = torch.Generator().manual_seed(0)
    words = [zoo.WORDS[3 + int(i)] for i in torch.randint(len(zoo.WORDS) - 3, (1500,), generator=generator)]
    (path := tmp_path / "text.txt").write_text(" ".join(words))
    return path


def alike(one: Stats, other: Stats) -> bool:
    """Whether both are the same, to the last bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[a].sum, other[a].sum)
        and (one[a].count, one[a].convergence) == (other[a].count, other[a].convergence)
        for a in one
    )
