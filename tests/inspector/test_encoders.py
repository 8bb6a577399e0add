"""Encoders, and both halves of encoder–decoders, looked into: against one text at a time with hooks, and by command."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import halves
import pytest
import torch
import zoo
from shown import shown
from torch import Tensor, nn

import ffedit
from ffedit import Corpus
from ffedit.display.terminal.memories import memory_view
from ffedit.inspector.rows import rows_of
from ffedit.model.hooks import capture

STACKS = [
    ("bert", "encoder"),
    *((family, half) for family in ("t5", "bart", "marian") for half in ("encoder", "decoder")),
]
START = {"t5": 0, "bart": 2, "marian": 2}
TOP = 6
Spot = tuple[tuple[int, ...], int]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (path := tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in halves.texts()))
    return Corpus(path)


def values_of(family: str, half: str, model: Any) -> Iterator[nn.Module]:
    """Yield the value matrix of each layer."""
    if family == "bert":
        yield from (block.output.dense for block in model.bert.encoder.layer)
    elif family == "t5":
        yield from (block.layer[-1].DenseReluDense.wo for block in model.get_submodule(half).block)
    else:
        yield from (block.fc2 for block in model.model.get_submodule(half).layers)


def read(family: str, half: str, model: Any, states: Tensor) -> Tensor:
    if family == "bert":
        logits = model.cls.predictions(states)
    elif family == "t5":
        logits = model.lm_head(model.get_submodule(half).final_layer_norm(states) * zoo.WIDTH**-0.5)
    else:
        logits = states @ model.model.shared.weight.T + model.final_logits_bias[0]
    return logits


@functools.cache
@torch.no_grad()
def plain(family: str, half: str) -> dict[Spot, Tensor]:
    """m of layer 1 at every position of every text, each text alone and unpadded."""
    model, found = halves.stack_of(family, half).model, dict[Spot, Tensor]()
    for text in halves.texts():
        row = ids = [0, *halves.tokenizer()(text, add_special_tokens=False)["input_ids"], 1]
        value = list(values_of(family, half, model))[1]
        with capture({1: value}, inputs=True) as seen:
            if half == "decoder":
                row = [START[family], *ids]
                model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([row[:-1]]))
            elif family == "bert":
                model(input_ids=torch.tensor([ids]))
            else:
                model.get_encoder()(input_ids=torch.tensor([ids]))
        for at in range(len(ids)):
            found.setdefault((tuple(row), at), seen[1].reshape(len(ids), -1)[at])
    return found


@pytest.mark.parametrize(("family", "half"), STACKS)
def test_a_memory_of_an_encoder_is_what_a_plain_search_finds(family: str, half: str, corpus: Corpus) -> None:
    stack, all_of_it = halves.stack_of(family, half), plain(family, half)
    largest = torch.stack(list(all_of_it.values())).topk(TOP + 1, 0).values
    # Spots of equal strength may come in either order: a T5 decoder starts with the token that the text then has again.
    apart = (largest[-1] > 0) & (largest[:-1] - largest[1:] > 1e-4 * largest[0]).all(0)
    for index in apart.nonzero()[::9, 0].tolist()[:3]:
        view = ffedit.inspect_memory(stack, f"1.{index}", corpus=corpus, top=TOP)
        m = {spot: float(m_of[index]) for spot, m_of in all_of_it.items()}
        best = sorted((spot for spot in m if m[spot] > 0), key=lambda spot: -m[spot])[:TOP]
        strengths = [m[spot] for spot in best]
        assert [one.coefficient for one in view.triggers] == pytest.approx(strengths, rel=1e-5, abs=1e-5)
        value = stack.memories[1].value[:, index]
        p = read(family, half, stack.model, value[None])[0].detach().softmax(-1)
        assert [one.id for one in view.value.top] == p.topk(TOP).indices.tolist()
        assert view.value.max_probability == pytest.approx(float(p.max()), abs=1e-5)
        for one, (ids, at) in zip(view.triggers, best, strict=True):
            words = [halves.tokenizer().decode([i]) for i in ids if i > 1 or i == ids[at]]
            assert one.prefix.last.strip() == halves.tokenizer().decode([ids[at]])
            assert set(f"{one.prefix.text} {one.prefix.after}".split()) <= set(words)
            assert len(one.prefix.text.split()) == sum(i not in halves.tokenizer().all_special_ids for i in ids[:at])
            if half == "decoder":
                assert one.next is not None and one.next.id == ids[at + 1]
                assert one.rank == int((p > p[ids[at + 1]]).sum()) + 1
            else:
                assert one.next is None and one.rank is None
        assert view.note is not None and view.stack == half
        assert view.tokens == sum(len(text.split()) + 2 for text in halves.texts())
    text = shown(memory_view(view))
    assert f"«{view.triggers[0].prefix.last.strip()}»" in text and f"of the {half}" in text
    assert ("place" in text) == (half == "decoder")
    json.dumps(view.to_dict())


def test_a_long_text_is_cut_into_rows_that_are_texts(tmp_path: Path) -> None:
    (path := tmp_path / "long.txt").write_text("the old tower stands in Rome . " * 60)
    for half, start in (("encoder", ()), ("decoder", (2,))):
        rows = list(rows_of(halves.stack_of("bart", half), Corpus(path, tokens=200)))
        assert all(row[: len(start) + 1] == (*start, 0) for row in rows)
        assert all(row[-1] == 1 and len(row) == 64 + len(start) for row in rows[:-1])
        assert sum(len(row) - len(start) for row in rows) == 200
