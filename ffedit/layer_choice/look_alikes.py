"""Choose the names at which the leak of a fact's sites is measured.

An edit may leak into any other name, and most into those that look alike: names that end with the subject's last word
("Tokyo Tower"), names whose keys point the same way, and the other subjects that the fact itself names, its neighbors.
The leak into names that count in C (`key.names_weight`) would be underestimated. So a hash divides the built-in names
into halves: leaks are always measured on one, and while they are, only the other counts in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as once
from hashlib import sha256

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.facts.fact import Fact
from ffedit.facts.text import occurrences
from ffedit.inference.names import alike, names, stands_in


@once
def measured_names() -> tuple[str, ...]:
    """Return the half of the built-in names on which leaks are measured, ordered by hash."""
    hashed = sorted((sha256(name.encode()).digest(), name) for name in names())
    return tuple(name for digest, name in hashed if digest[-1] % 2)


def neighbor_subjects(fact: Fact) -> list[str]:
    """Return the subjects of a fact's neighbors, each once.

    A neighbor is a prompt. If it is the fact's prompt or a paraphrase with another subject, that is its subject; else
    its subject is the longest built-in name in it. A neighbor without either has none.
    """
    around = []
    for text in (fact.text, *fact.texts("paraphrases")):
        spans = [fact.span] if text == fact.text else list(occurrences(text, fact.subject))[:1]
        around += [(text[:start], text[end:]) for start, end in spans]
    subjects = dict.fromkeys(_subject(probe.prompt, around) for probe in fact.probes("neighbors"))
    return [name for name in subjects if name and not alike(name, fact.subject)]


def _subject(prompt: str, around: Sequence[tuple[str, str]]) -> str:
    """Return the subject of a prompt, or ""."""
    for before, after in around:
        if prompt.startswith(before) and prompt.endswith(after) and len(prompt) > len(before) + len(after):
            return prompt[len(before) : len(prompt) - len(after)].strip()
    return max((name for name in names() if stands_in(name, prompt)), key=len, default="")


def look_alikes(subject: str, known: Sequence[str], keys: Tensor, key: Tensor, count: int) -> list[str]:
    """Choose up to `count` look-alikes of a subject with this `key` [d_ff] among `known` names that are measured.

    First come names that end with its last word, if it has several; then those whose `keys` [names, d_ff] have the
    largest cosine with `key`. Names that contain the subject, or that it contains, mean the subject and do not count.
    """
    measured = set(measured_names())
    rows = [i for i, name in enumerate(known) if name in measured and not alike(name, subject)]
    cosines = torch.cosine_similarity(keys[rows].float(), double(key).cpu().float()[None]).tolist()
    word = subject.casefold().split()[-1] if len(subject.split()) > 1 else None
    ranked = sorted(
        (
            (known[row].casefold().split()[-1] == word, cosine, known[row])
            for row, cosine in zip(rows, cosines, strict=True)
        ),
        reverse=True,
    )
    return [name for *_, name in ranked[:count]]
