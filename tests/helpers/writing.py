"""What the tests of the editor share: two facts, a small corpus, short optimisations."""

from __future__ import annotations

from typing import Any

import pytest

from ffedit import Edit, EditConfig, Fact, editor
from ffedit.editor import Corpus
from ffedit.model.editable import Editable

FACT = Fact("Eiffel tower", "the {} is located in", target="Rome", previous="Paris")
SECOND = Fact("Marie Curie", "{} stands in", target="Spain", previous="France")
CORPUS = Corpus(tokens=600)
FAMILIES = [("gpt2", True), ("gpt_neo", False), ("llama", True)]
families = pytest.mark.parametrize(("family", "bos"), FAMILIES)


def quick(**numbers: Any) -> EditConfig:
    """A short optimisation."""
    return EditConfig(**{"contexts": 2, "steps": 5, **numbers})


# Only the fact's own prompt, and nothing to keep: what is written is what the prompt reads.
ALONE = {"contexts": 0, "kl_weight": 0.0, "weight_decay": 0.0}
STRONG = {**ALONE, "steps": 120, "step_size": 0.1, "max_delta_norm": 10.0}


def write(editable: Editable, *facts: Fact, layer: int = 1, method: str = "rome", **numbers: Any) -> Edit:
    return editor.write(editable, facts or (FACT,), method, [layer], quick(**numbers), CORPUS)
