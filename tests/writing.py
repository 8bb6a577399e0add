"""What the tests of the editor share: two facts, a small corpus, short optimisations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ffedit import Edit, EditConfig, Fact, editor
from ffedit.anatomy import Editable
from ffedit.editor import Corpus

FACT = Fact("Eiffel tower", "the {} is located in", target="Rome", previous="Paris")
SECOND = Fact("Marie Curie", "{} stands in", target="Spain", previous="France")
CORPUS = Corpus(tokens=600)
FAMILIES = [("gpt2", True), ("gpt_neo", False), ("llama", True)]
families = pytest.mark.parametrize(("family", "bos"), FAMILIES)


def quick(**numbers: Any) -> EditConfig:
    """A short optimisation; numbers that the configuration does not know are left out."""
    wanted = {"contexts": 2, "phrasings": 2, "phrasing_tokens": 4, "steps": 5, "attempts": 1, **numbers}
    known = {field.name for field in dataclasses.fields(EditConfig)}
    return EditConfig(**{name: value for name, value in wanted.items() if name in known})


# Only the fact's own prompt, and nothing to keep: what is written is what the prompt reads.
ALONE = {"contexts": 0, "phrasings": 0, "keep": 0.0, "essence": 0.0, "weight_decay": 0.0}
STRONG = {**ALONE, "steps": 120, "attempts": 6, "step_size": 0.1, "clamp": 10.0}


def write(editable: Editable, *facts: Fact, layer: int = 1, method: str = "rome", **numbers: Any) -> Edit:
    return editor.write(editable, facts or (FACT,), method, [layer], quick(**numbers), CORPUS)
