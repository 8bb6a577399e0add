"""Text that a model says by itself begins as its texts do, is drawn as is said, and is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zoo
from making import made
from safetensors.torch import load_file, save_file

from ffedit import Corpus
from ffedit.files import cache
from ffedit.inference import own_text as own
from ffedit.inference.own_text import contexts, first_words, own_text, sampled
from ffedit.inference.text import begin_rows, identity
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable

CHAT = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"


def begun(start: str, **more: Any) -> Editable:
    return find_and_verify(zoo.model("gpt2"), zoo.begun(start, **more), "gpt2")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return what texts go on from."""
    ran: list[list[int]] = []
    continuations = own.continuations

    def noted(editable: Editable, rows: Sequence[list[int]], *rest: Any, **more: Any) -> Any:
        ran.extend(rows)
        return continuations(editable, rows, *rest, **more)

    monkeypatch.setattr(own, "continuations", noted)
    return ran


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Editable:
    """A model of pieces of words that is taken to speak the neutral text; its tokenizer puts nothing in front."""
    monkeypatch.setattr(own, "neutral", lambda _: torch.zeros(9))
    return find_and_verify(zoo.model("llama", 420), zoo.bytes_bpe(), "reader")


# How it begins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "ids"), [("<s>", [0]), ("<s> </s>", [0, 1])])
def test_sampled_text_goes_on_from_what_the_tokenizer_puts_in_front_and_keeps_it(
    start: str, ids: list[int], prompts: list[list[int]]
) -> None:
    rows = own_text(begun(start), 4, 8, seed=5)
    assert prompts == [ids] * 4 and all(row[: len(ids)] == ids and len(row) == 8 for row in rows)
    assert len({tuple(row) for row in rows}) > 1


def test_sampled_text_follows_the_token_between_documents_and_leaves_it_out(prompts: list[list[int]]) -> None:
    editable = zoo.shared("gpt2")
    assert editable.tokenizer.bos_token_id is None and editable.tokenizer.eos_token_id == 1
    rows = own_text(editable, 4, 8, seed=5)
    assert prompts == [[1]] * 4
    numbers = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    said = own.continuations(editable, [[1]] * 4, 8, numbers)
    assert rows == said


def test_the_mark_of_a_chat_is_no_beginning(prompts: list[list[int]]) -> None:
    """BOS and EOS are what the template writes around a turn, as in SmolLM2: no text begins with them."""
    editable = begun("", chat_template=CHAT)
    assert editable.tokenizer.bos_token_id == 0 and editable.start_tokens == []
    rows = own_text(editable, 16, 8, seed=5)
    assert all(len(prompt) == 1 and prompt[0] > 2 for prompt in prompts) and len({p[0] for p in prompts}) > 8
    assert [row[:1] for row in rows] == prompts, "the word that the rest follows is part of the text"


def test_where_the_neutral_text_is_spoken_it_begins_with_one_of_its_words(
    reader: Editable, prompts: list[list[int]]
) -> None:
    rows = own_text(reader, 6, 12, seed=5)
    said = [reader.tokenizer.decode(prompt) for prompt in prompts]
    assert all(text[0] == "\n" and text[1:] in first_words() for text in said) and len(set(said)) > 2
    begun_with = [reader.tokenizer.decode(row)[: len(text) - 1] for row, text in zip(rows, said, strict=True)]
    assert begun_with == [text[1:] for text in said], "the line break is no part of it"
    assert [len(row) for row in rows] == [12] * 6 and len(first_words()) > 2000 and len(set(first_words())) > 200


# Contexts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["", "<s>", "<s> </s>"])
def test_contexts_are_what_the_model_would_say(start: str) -> None:
    editable = begun(start)
    found = contexts(editable, 6, (3, 7), seed=2)
    assert found == contexts(editable, 6, (3, 7), seed=2) != contexts(editable, 6, (3, 7), seed=3)
    assert found and all(text == " ".join(text.split()) and "<s>" not in text for text in found)
    before = editable.start_tokens or [0]  # BOS, which is between documents where nothing is in front
    for text in found:
        ids = [*before, *editable.tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert len(ids) - len(before) <= 7
        with torch.no_grad():
            likeliest = editable.model(torch.tensor([ids])).logits[0].topk(5).indices
        assert all(ids[i] in likeliest[i - 1] for i in range(len(before), len(ids)))


def test_contexts_begin_with_a_word_even_behind_bos(monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]) -> None:
    monkeypatch.setattr(own, "neutral", lambda _: torch.zeros(9))
    editable = find_and_verify(zoo.model("llama", 420), zoo.bytes_bpe(bos=True), "reader")
    found = contexts(editable, 4, (9,), seed=0)
    assert all(prompt[0] == 0 and editable.tokenizer.decode(prompt[1:]) in first_words() for prompt in prompts)
    assert len(found) == len(prompts) == 4
    own_text(editable, 4, 9, seed=0)
    assert prompts[4:] == [[0]] * 4, "and no other text does"


# Kept ---------------------------------------------------------------------------------------------


def test_sampled_text_is_exactly_as_long_as_asked_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    editable, corpus = zoo.shared("gpt2"), Corpus(tokens=130)
    name, beginning = identity(editable, corpus)
    ids = sampled(editable, corpus, name)
    assert len(ids) == 130 and len(cache.entries()) == 1
    monkeypatch.setattr(own, "continuations", None)
    assert sampled(editable, corpus, name).equal(ids)
    assert identity(editable, Corpus(tokens=200))[1] == beginning != identity(editable, Corpus(seed=1))[1]


def test_rows_of_own_text_are_kept_but_not_those_of_an_edited_model(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.build("gpt2")
    rows = own_text(editable, 3, 8, seed=5)
    assert rows == own_text(editable, 3, 8, seed=5, kept=False) != own_text(editable, 3, 8, seed=6)
    with made(editable, {1: 1}).applied(editable):
        own_text(editable, 3, 8, seed=7)
    assert len(cache.entries()) == 2
    kept = next(path for path in cache.entries() if load_file(path)["ids"].tolist()[:8] == rows[0])
    for damaged in (rows[0], rows[0] * 4, [*rows[0], *rows[1]]):
        save_file({"ids": torch.tensor(damaged, dtype=torch.int32)}, kept)
        assert own_text(editable, 3, 8, seed=5) == rows
    monkeypatch.setattr(own, "continuations", None)
    assert own_text(editable, 3, 8, seed=5) == rows


def test_sampling_goes_on_where_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "SAMPLED_ROWS", 2)
    editable, corpus = zoo.shared("gpt2"), Corpus(tokens=300)
    whole, drawn = sampled(editable, corpus, "whole"), []

    def stop(stage: str, done: int, total: int) -> None:
        drawn.append(done)
        if len(drawn) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampled(editable, corpus, "halted", stop)
    assert sampled(editable, corpus, "halted", stop).equal(whole)
    assert drawn == [128, 256, 300], "nothing is sampled twice"
    assert len({tuple(row) for row in whole[:256].view(-1, 64).tolist()}) == 4, "each batch has a seed of its own"


def test_sampled_rows_are_the_rows_that_are_run() -> None:
    """Nothing is cut between a row's tokens: what a row of statistics holds was said in one go."""
    editable, corpus = begun("<s> </s>"), Corpus("sampled", 4 * 64)
    flat = begin_rows(editable, sampled(editable, corpus, "text"))
    assert flat.view(-1, 64).tolist() == own_text(editable, 5, 64, corpus.seed + 1000)[:4]
