"""The text that ships: read by models that speak it, and by no other."""

from __future__ import annotations

import math

import pytest
import torch
import zoo
from writing import collect_moments

from ffedit import Corpus
from ffedit.files import cache
from ffedit.inference import text as texts
from ffedit.inference.text import nats_per_character, neutral_text


def test_the_neutral_text_is_a_text_of_many_words() -> None:
    text = neutral_text()
    assert len(text) > 30_000 and len(set(text.split())) > 2_000
    assert "\ufffd" not in text and "<|" not in text


def test_nats_per_character_are_those_of_the_whole_text() -> None:
    editable = zoo.shared("gpt2", True)
    text = "the old tower stands in Rome and the red river flows through Paris . "
    ids = torch.tensor([editable.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        scores = editable.model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    said = editable.tokenizer.decode(ids[0, 1:], skip_special_tokens=True)
    assert nats_per_character(editable, text) == pytest.approx(-float(scores.sum()) / len(said), rel=1e-4)
    assert nats_per_character(editable, "") == math.inf


def test_a_text_of_unknown_words_is_not_spoken() -> None:
    editable = zoo.shared("gpt2", True)
    assert editable.tokenizer.unk_token_id is not None
    assert nats_per_character(editable, neutral_text()) == math.inf
    assert texts.neutral(editable) is None


def test_statistics_take_neutral_text_where_it_is_spoken_and_else_sampled_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    editable = zoo.shared("gpt2", True)
    memory = editable.memories[0]
    assert collect_moments(editable, memory, Corpus(tokens=300)).source.startswith("text sampled from the model")
    monkeypatch.setattr(texts, "nats_per_character", lambda *_: 1.0)
    cache.clear()
    spoken = collect_moments(editable, memory, Corpus(tokens=300))
    assert spoken.source.startswith("the neutral text that ships") and spoken.count == 300
    sampled = collect_moments(editable, memory, Corpus("sampled", 300))
    assert sampled.source.startswith("text sampled from the model") and not torch.equal(sampled.sum, spoken.sum)
    monkeypatch.setattr(texts, "nats_per_character", lambda *_: 1.01)
    assert texts.neutral(editable) is not None, "what was spoken is kept"
    cache.clear()
    assert texts.neutral(editable) is None


def test_a_damaged_entry_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.shared("gpt2", True)
    monkeypatch.setattr(texts, "nats_per_character", lambda *_: 0.5)
    ids = texts.neutral(editable)
    (kept,) = cache.entries()
    kept.write_bytes(kept.read_bytes()[:20])
    again = texts.neutral(editable)
    assert ids is not None and again is not None and torch.equal(ids, again)
