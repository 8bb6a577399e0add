"""The pass over all memories, and the same found one text at a time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
import zoo
from torch import Tensor

from ffedit import Corpus
from ffedit.inspector.memory_pass import Pass, Settings, collect, started
from ffedit.inspector.rows import NOTHING, Row, RowStore, rows_of
from ffedit.model.editable import Stack
from ffedit.model.fingerprint import fingerprint
from ffedit.model.hooks import capture

# ReLU, GELU, and a SwiGLU gate.
FAMILIES = ("opt", "gpt2", "llama")
TOP = 7


def documents(count: int, seed: int = 0) -> list[str]:
    """Short texts, many of which begin alike."""
    rng, words = Random(seed), zoo.WORDS[3:40]
    return [
        " ".join(
            [*rng.choice((("the", "old"), ("in",), ("Paris", "of", "a"))), *rng.choices(words, k=rng.randint(0, 9))]
        )
        for _ in range(count)
    ]


def written(path: Path, texts: list[str]) -> Corpus:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Corpus(path, tokens=100_000)


def made(family: str, corpus: Corpus, folder: Path, **settings: Any) -> tuple[Stack, Pass, RowStore]:
    stack = zoo.shared(family)
    about: dict[str, Any] = {"fingerprint": fingerprint(stack), "stack": stack.kind, "corpus": "", "tokens": 0}
    settings = {"top": TOP, "positions": 40} | settings
    state = started(stack, {**about, "settings": asdict(Settings(**settings))})
    folder.mkdir(exist_ok=True)
    return stack, state, collect(stack, rows_of(stack, corpus), corpus.tokens, state, folder)


@torch.no_grad()
def plain(family: str, texts: list[str]) -> tuple[list[Row], Tensor, list[int]]:
    """All different prefixes, m of every layer there [prefixes, layers, d_ff], and what follows each first: one row at
    a time, nothing thrown away."""
    editable = zoo.shared(family)
    found: dict[Row, tuple[Tensor, int]] = {}
    for text in texts:
        ids = editable.tokenizer(text)["input_ids"]
        if len(ids) < 2:
            continue
        modules = {layer: editable.memories[layer].module for layer in range(zoo.DEPTH)}
        with capture(modules, inputs=True) as seen:
            editable.model(input_ids=torch.tensor([ids]))
        keys = torch.stack([seen[layer].reshape(len(ids), -1) for layer in range(zoo.DEPTH)], 1)
        for end in range(len(ids) - 1):
            found.setdefault(tuple(ids[: end + 1]), (keys[end], ids[end + 1]))
    return list(found), torch.stack([m for m, _ in found.values()]), [following for _, following in found.values()]


def told(state: Pass, store: RowStore, layer: int) -> list[list[tuple[Row, float]]]:
    """The triggers of every key of a layer, as prefixes with coefficients."""
    one = state.triggers[layer]
    return [
        [(store.context(place).ids, m) for place, m in zip(places, ms, strict=True) if place != NOTHING]
        for places, ms in zip(one.positions.tolist(), one.coefficients.tolist(), strict=True)
    ]
