"""Ask a model for objects by greedy generation, and keep what it says."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ffedit
from ffedit.errors import FactError
from ffedit.inference import generation
from ffedit.model.tokenization import Encoded, decode, encode

# Asks (prompt, object) pairs: whether the model says each object.
Ask = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]


def holds(text: str, object: str) -> bool:
    """Return whether `text`, a model's answer, begins with the whole `object`, and no letter or digit follows."""
    text = text.lstrip()
    return text.startswith(object) and not text[len(object) : len(object) + 1].isalnum()


class Answers:
    """Asks a model greedily, and keeps what it says in a file."""

    def __init__(self, editable: ffedit.Editable, path: Path | None = None) -> None:
        self.editable, self.path = editable, path
        self.said: dict[str, list[int]] = {}
        if path is not None and path.exists():
            self.said = json.loads(path.read_text(encoding="utf-8"))

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Return whether the model says each object after its prompt: its tokens, and then no letter or digit."""
        encoded = [encoded_pair(self.editable, prompt, object) for prompt, object in pairs]
        asked = [(prompt, e) for (prompt, _), e in zip(pairs, encoded, strict=True) if e is not None]
        # Most answers fail at their first token; only the others are generated to their end, a prompt's longest last.
        self._ask({prompt: e for prompt, e in asked if prompt not in self.said}, 1)
        by_length: dict[int, dict[str, Encoded]] = defaultdict(dict)
        for prompt, e in sorted(asked, key=lambda pair: len(pair[1].target_ids)):
            ids = tuple(self.said[prompt])
            if ids == e.target_ids[: len(ids)]:
                by_length[len(e.target_ids) + 1][prompt] = e
        for count, texts in by_length.items():
            self._ask(texts, count)
        if asked and self.path is not None:
            self.path.write_text(json.dumps(self.said), encoding="utf-8")
        return [
            e is not None and self._says(e, object, self.said[prompt])
            for (prompt, object), e in zip(pairs, encoded, strict=True)
        ]

    def _ask(self, texts: Mapping[str, Encoded], count: int) -> None:
        if texts:
            answers = generation.continuations(self.editable, [e.ids[: e.answer] for e in texts.values()], count)
            self.said.update(zip(texts, answers, strict=True))

    def _says(self, e: Encoded, object: str, ids: Sequence[int]) -> bool:
        size = len(e.target_ids)
        if tuple(ids[:size]) != e.target_ids:
            return False
        before = decode(self.editable.tokenizer, e.ids[: e.answer])
        return holds(decode(self.editable.tokenizer, [*e.ids[: e.answer], *ids[: size + 1]])[len(before) :], object)


def both(quick: Ask, exact: Ask) -> Ask:
    """Return an `Ask` that puts to `exact` only the pairs that `quick` affirms."""

    def ask(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        likely = [pair for pair, affirmed in zip(pairs, quick(pairs), strict=True) if affirmed]
        confirmed = set(itertools.compress(likely, exact(likely)))
        return [pair in confirmed for pair in pairs]

    return ask


def encoded_pair(editable: ffedit.Editable, prompt: str, object: str) -> Encoded | None:
    """Encode a prompt and its answer; None if the tokenizer does not know all of their words."""
    try:
        e = encode(editable.tokenizer, prompt, object)
    except FactError:
        return None
    # The first token may be a BOS that serves as the unknown token, too.
    return None if editable.tokenizer.unk_token_id in e.ids[1:] else e
