"""A model with other weights, for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ffedit.model.editable import Editable


@contextmanager
def changed(editable: Editable, size: float = 0.4) -> Iterator[None]:
    value = editable.memories[1].value
    kept = value.clone()
    value.add_(size * torch.randn(value.shape, generator=torch.Generator().manual_seed(3)))
    try:
        yield
    finally:
        value.copy_(kept)
