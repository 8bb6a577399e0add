"""Choose the names at which the leak of a fact's sites is measured.

An edit may leak into any other name, and most into those that look alike: names that end with the subject's last word
("Tokyo Tower"), names whose keys point the same way, and the other subjects that the fact itself names, its neighbors.
A leak into names that count in C (`key.names_weight`) would be too small. So the built-in names are divided in two
halves by a hash of the name: one is measured, always, and only the other counts in C where a leak is measured.
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
    """Return the half of the built-in names that is measured, in an order by their hash."""
    hashed = sorted((sha256(name.encode()).digest(), name) for name in names())
    return tuple(name for digest, name in hashed if digest[-1] % 2)


def neighbor_subjects(fact: Fact) -> list[str]:
    """Return the subjects of a fact's neighbors, each once.

    A neighbor is a prompt. Its subject stands where this fact's does in the prompt or a paraphrase with the same words
    around it; or else it is the longest built-in name in the prompt. Where neither is there, it has none.
    """
    around = []
    for text in (fact.text, *fact.texts("paraphrases")):
        spans = [fact.span] if text == fact.text else list(occurrences(text, fact.subject))[:1]
        around += [(text[:start], text[end:]) for start, end in spans]
    found = dict.fromkeys(_subject(probe.prompt, around) for probe in fact.probes("neighbors"))
    return [name for name in found if name and not alike(name, fact.subject)]


def _subject(prompt: str, around: Sequence[tuple[str, str]]) -> str:
    """Return the subject of a prompt, or ""."""
    for before, after in around:
        if prompt.startswith(before) and prompt.endswith(after) and len(prompt) > len(before) + len(after):
            return prompt[len(before) : len(prompt) - len(after)].strip()
    return max((name for name in names() if stands_in(name, prompt)), key=len, default="")


def look_alikes(subject: str, known: Sequence[str], keys: Tensor, key: Tensor, count: int) -> list[str]:
    """Choose `count` look-alikes of a subject with this `key` [d_ff] among the measured of the `known` names.

    First come those that end with its last word, where it has more than one; then those whose `keys` [names, d_ff] have
    the largest cosine with its own. Names that are words of the subject, or that it is words of, are the same name.
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
