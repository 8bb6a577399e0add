"""A tiny model of any family that reads and writes any text."""

from __future__ import annotations

import zoo

from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable


def speaking(family: str, bos: bool = False) -> Editable:
    """A model with the byte-level tokenizer."""
    tokenizer = zoo.bytes_bpe(bos)
    return find_and_verify(zoo.model(family, vocab_size=len(tokenizer)), tokenizer, family)
