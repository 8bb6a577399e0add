"""What the tests of the editor share: two facts, a small corpus, short optimisations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ffedit import Edit, EditConfig, Fact
from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.methods import METHODS, set_number
from ffedit.editor.statistics import collect
from ffedit.editor.write import write as write_facts
from ffedit.inference.corpus import Corpus
from ffedit.model.editable import Editable
from ffedit.model.memory import KeyValueMemory

FACT = Fact("Eiffel tower", "the {} is located in", target="Rome", previous="Paris")
SECOND = Fact("Marie Curie", "{} stands in", target="Spain", previous="France")
CORPUS = Corpus(tokens=600)
FAMILIES = [("gpt2", True), ("gpt_neo", False), ("llama", True)]
families = pytest.mark.parametrize(("family", "bos"), FAMILIES)


# The key and the metric of the published equations, but for a little of the spread over contexts.
PLAIN_KEY = {"mention_share": 0.0, "names_weight": 0.0, "context_weight": 0.03}


def quick(**numbers: Any) -> EditConfig:
    """A short optimisation with a plain key, with other numbers as `with_numbers` takes them."""
    return with_numbers(EditConfig(), **{"contexts": 2, "steps": 5, "target_probability": 0.6, **PLAIN_KEY, **numbers})


def with_numbers(config: EditConfig, **numbers: Any) -> EditConfig:
    """`config` with other numbers: of prompts, key and value by field, of a method as method_field."""
    records = {
        field.name: record for record in ("prompts", "key", "value") for field in fields(getattr(config, record))
    }
    for name, value in numbers.items():
        method, _, field = name.partition("_")
        if name in records:
            names = [f"{records[name]}.{name}"]
        elif method == "ft":
            names = [dotted for dotted in (f"ft.{field}", f"ft-l.{field}") if dotted != "ft.bound"]
        else:
            names = [f"{method}.{field}" if method in METHODS else name]
        for dotted in names:
            config = set_number(config, dotted, value)
    return config


# Only the fact's own prompt, and nothing to keep: what is written is what the prompt reads.
ALONE = {"contexts": 0, "kl_weight": 0.0, "weight_decay": 0.0}
STRONG = {**ALONE, "steps": 120, "step_size": 0.1, "max_delta_norm": 10.0}


def write(editable: Editable, *facts: Fact, layer: int = 1, method: str = "rome", **numbers: Any) -> Edit:
    return write_facts(editable, facts or (FACT,), method, [layer], quick(**numbers), CORPUS)


def collect_moments(editable: Editable, memory: KeyValueMemory, corpus: Corpus | None = None) -> KeyMoments:
    """C of one memory."""
    return collect(editable, [memory], corpus)[memory.address]
