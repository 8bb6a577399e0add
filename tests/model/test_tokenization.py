"""From characters to tokens and back: one tokenisation of the whole text decides everything."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from speaking import speaking
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ffedit.errors import FactError
from ffedit.facts.fact import Fact
from ffedit.inference import generation
from ffedit.inference.batching import batches
from ffedit.model.editable import Editable
from ffedit.model.tokenization import encode, joined, pad, plain_ids, special_tokens

TOKENIZERS = {
    "words": zoo.words(),
    "words+bos": zoo.words(True),
    "bytes": zoo.bytes_bpe(),
    "bytes+bos": zoo.bytes_bpe(True),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=list(TOKENIZERS))


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(FactError) as caught:
        encode(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Joining ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "answer", "whole"),
    [
        ("Paris is in", "France", "Paris is in France"),
        ("Paris is in ", "France", "Paris is in France"),
        ("Paris is in", " France ", "Paris is in France"),
        ("Paris is in ", " France", "Paris is in France"),
        ("Paris is in\n", "France", "Paris is in\nFrance"),
        ("", "France", "France"),
        ("東京は", "日本", "東京は日本"),
        ("首都 Tokyo は", "Japan", "首都 Tokyo はJapan"),
        ("The city is", "東京", "The city is東京"),
        ("서울은", "한국", "서울은 한국"),
        ('He said "', "Rome", 'He said "Rome'),
        ('He said "yes"', "Rome", 'He said "yes" Rome'),
        ("He said “", "Rome", "He said “Rome"),
        ("He said “yes”", "Rome", "He said “yes” Rome"),
        ("It is (", "Rome", "It is (Rome"),
        ("It is (big)", "Rome", "It is (big) Rome"),
        ("the dogs'", "home", "the dogs' home"),
        ("Paris -", "France", "Paris - France"),
        ("Austria-", "Hungary", "Austria-Hungary"),
        ("Q: city? A:", "Rome", "Q: city? A: Rome"),
    ],
)
def test_prompt_and_answer_are_joined_as_they_are_written(prompt: str, answer: str, whole: str) -> None:
    assert joined(prompt, answer) == whole


# The answer ---------------------------------------------------------------------------------------


@every_tokenizer
@pytest.mark.parametrize("space", ["", " "])
def test_the_answer_is_what_follows_in_the_whole_tokenisation(tokenizer: PreTrainedTokenizerBase, space: str) -> None:
    found = encode(tokenizer, "Paris is the capital of" + space, "the old France")
    assert list(found.ids) == tokenizer("Paris is the capital of the old France")["input_ids"]
    assert list(found.ids[: found.answer]) == tokenizer("Paris is the capital of")["input_ids"]
    assert tokenizer.decode(found.target_ids).strip() == "the old France"


def test_a_closing_eos_is_no_part_of_the_answer() -> None:
    tokenizer = zoo.words()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    found = encode(tokenizer, "Paris is in", "France")
    assert tokenizer.decode(found.target_ids) == "France" and found.ids[-1] != 1


def test_a_merge_across_the_border_belongs_to_the_answer() -> None:
    vocab = {"a": 0, "-": 1, "b": 2, "-b": 3, "-bb": 4, "x": 5}
    backend = Tokenizer(models.BPE(vocab, [("-", "b"), ("-b", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = encode(tokenizer, "a-", "bb")
    assert found.text == "a-bb" and found.ids == (0, 4) and found.target_ids == (4,)
    assert "no token stands before" in refusal(tokenizer, "-", "bb")


def test_an_answer_of_no_token_is_refused() -> None:
    tokenizer = zoo.words()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    assert "no token" in refusal(tokenizer, "Paris is in", "\u200b")


def test_characters_that_the_tokenizer_does_not_know_are_refused() -> None:
    assert "does not know" in refusal(zoo.words(), "Paris is in", "東京")
    assert "東京" in refusal(zoo.words(), "東京 is in", "France", span=(0, 2))
    assert encode(zoo.bytes_bpe(), "東京 is in", "日本", span=(0, 2)).subject is not None


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    text = refusal(zoo.words(), "the " * 70, "Rome", max_tokens=64)
    assert "71 tokens" in text and "64" in text
    assert len(encode(zoo.words(), "the " * 63, "Rome", max_tokens=64).ids) == 64


# The subject --------------------------------------------------------------------------------------


@every_tokenizer
@pytest.mark.parametrize(
    "prompt", ["{} is a city", "the old {} is a city", "the city of {}", '"{}" is a city', "{}, Italy, is"]
)
def test_the_subjects_tokens_are_found_by_characters_and_a_word_of_it_by_its_last_token(
    tokenizer: PreTrainedTokenizerBase, prompt: str
) -> None:
    fact = Fact("Eiffel tower", prompt, "Rome")
    found = encode(tokenizer, fact.text, "Rome", fact.span)
    assert found.subject is not None and len(found.ends) == found.subject[1] - found.subject[0]
    assert tokenizer.decode(found.ids[slice(*found.subject)]).strip() == "Eiffel tower"
    assert found.subject_last == found.subject[1] - 1
    site = replace(found, fact_token="Eiffel").site
    assert tokenizer.decode(found.ids[found.subject[0] : site + 1]).strip() == "Eiffel"
    for token in ("tower", "Eiffel tower", -1, len(found.ends) - 1, "subject_last"):
        assert replace(found, fact_token=token).site == found.subject_last
    with pytest.raises(FactError, match="not a word of the subject 'Eiffel tower'"):
        _ = replace(found, fact_token="city").site


@every_tokenizer
def test_the_occurrence_asked_for_is_found(tokenizer: PreTrainedTokenizerBase) -> None:
    places = []
    for occurrence in (0, 1):
        fact = Fact("Rome", "Rome is old , Rome is", "big", occurrence=occurrence)
        found = encode(tokenizer, fact.text, "big", fact.span)
        assert found.subject is not None
        assert tokenizer.decode(found.ids[slice(*found.subject)]).strip() == "Rome"
        places.append(found.subject)
    assert places[0][1] <= places[1][0]


def test_a_subject_inside_another_word_is_not_taken_for_it() -> None:
    fact = Fact("Rome", "the Romelike city Rome is", "big")
    found = encode(zoo.bytes_bpe(), fact.text, "big", fact.span)
    before = zoo.bytes_bpe()("the Romelike city")["input_ids"]
    assert found.subject is not None and found.subject[0] == len(before)


def test_a_subject_of_no_token_is_refused() -> None:
    tokenizer = zoo.words()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("Rome", "")
    assert "the subject 'Rome' gives no token" in refusal(tokenizer, "Rome is", "big", span=(0, 4))


# Reading the model out ----------------------------------------------------------------------------

PROMPTS = [
    ("Paris is in", "the old France"),
    ("Rome", "Italy"),
    ("Leo Tolstoy wrote the big book of", "Anna Karenina"),
]


def test_the_log_probability_of_an_answer_is_the_sum_over_all_its_tokens() -> None:
    rows = [encode(zoo.words(), *pair) for pair in PROMPTS]
    logits = torch.randn(sum(len(row.target_ids) for row in rows), zoo.VOCAB)
    targets = [i for row in rows for i in row.target_ids]
    single = [float(line.log_softmax(-1)[i]) for line, i in zip(logits, targets, strict=True)]
    expected = [sum(single[:3]), single[3], sum(single[4:])]
    assert generation.answer_sums(logits, rows).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "gemma3", "mpt"])
def test_greedy_continuations_are_those_of_generate_up_to_an_end(family: str) -> None:
    editable = zoo.shared(family)
    rows = [[3, 14, 15], [9], [26, 53, 58], [3, 14, 15, 9, 26, 53]]
    found = generation.continuations(editable, rows, 6)
    for row, said in zip(rows, found, strict=True):
        ids = torch.tensor([row])
        whole = editable.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
        )
        assert generation.until([whole[0, len(row) :].tolist()], editable.ends) == [said]


@pytest.mark.parametrize("family", ["gpt2", "qwen3_next"])
def test_rows_that_ended_are_not_run_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.shared(family)  # the second is not resumable: whole rows run
    rows = [[3, 14, 15], [9, 26, 53], [26, 53, 58], [58, 9, 3]]
    monkeypatch.setattr(Editable, "ends", frozenset())
    whole = generation.continuations(editable, rows, 6)
    ends = {whole[0][1], whole[1][3]}
    monkeypatch.setattr(Editable, "ends", frozenset(ends))
    ran: list[int] = []
    hook = editable.model.register_forward_pre_hook(
        lambda _, args, given: ran.append(len(given["input_ids"])), with_kwargs=True
    )
    try:
        found = generation.continuations(editable, rows, 6)
    finally:
        hook.remove()
    assert found == generation.until(whole, ends) and sorted(map(len, found)) != [6] * 4
    assert ran == [sum(len(said) > step for said in found) or 4 for step in range(max(map(len, found)))]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """By evenly spaced numbers, as often as their probability says, to one draw; the impossible are never drawn."""
    logits = torch.tensor([-torch.inf, 1.0, 0.0, 2.0, -torch.inf])
    numbers = (torch.arange(1000, dtype=torch.float64) / 1000)[:, None]
    chosen = generation.drawn(numbers)(logits.expand(1000, 5), 0)
    counts = torch.bincount(chosen[:, 0], minlength=5)
    assert chosen.shape == (1000, 1) and (counts - 1000 * logits.softmax(0)).abs().max() <= 1


@pytest.mark.parametrize(
    ("start", "end", "before", "after"),
    [("", "", [], []), ("<s>", "", [0], []), ("<s> </s>", "", [0, 1], []), ("<s> <s>", "</s>", [0, 0], [1]),
     ("", "</s>", [], [1])],
)  # fmt: skip
def test_a_tokenizer_says_how_its_texts_begin_and_end(
    start: str, end: str, before: list[int], after: list[int]
) -> None:
    tokenizer = zoo.begun(start, end, chat_template="<s>{{ messages }}")
    assert tokenizer.bos_token_id == 0 and special_tokens(tokenizer) == (before, after)
    assert plain_ids(tokenizer, "the city") == tokenizer("the city")["input_ids"][len(before) :][:2]


def test_special_tokens_that_cannot_be_told_from_the_text_are_none() -> None:
    def cut(text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [0, 7, 8] if add_special_tokens else [9]}

    assert special_tokens(cut) == ([], [])  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_that_fills_the_context_can_still_be_continued(family: str) -> None:
    editable = zoo.shared(family)
    prompt = encode(editable.tokenizer, "the " * editable.max_tokens, max_tokens=editable.max_tokens)
    said = generation.continuations(editable, [prompt.ids], 8)[0]
    assert said and said[0] == generation.continuations(editable, [prompt.ids], 1)[0][0]
    assert generation.with_own_answers(editable, [prompt])[0].target_ids


def test_the_models_own_answer_is_its_first_word_whole() -> None:
    editable = speaking("gpt2")
    for text in ("Paris is in", "Leo Tolstoy wrote", "the river"):
        prompt = encode(editable.tokenizer, text)
        own = generation.with_own_answers(editable, [prompt])[0]
        assert own.ids[: own.answer] == prompt.ids and own.target_ids
        assert len(editable.tokenizer.decode(own.target_ids[:-1]).split()) <= 1
        assert list(own.target_ids) == generation.continuations(editable, [prompt.ids], len(own.target_ids))[0]


@pytest.mark.parametrize(
    ("said", "word"), [(" 東京 x", " 東京"), ("東。", "東"), ("กข", "กข"), ("🗼", "🗼"), (" Rome.", " Rome")]
)
def test_a_first_word_is_not_cut_inside_a_character(said: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = zoo.bytes_bpe()
    editable: Any = SimpleNamespace(tokenizer=tokenizer, ends=set(), special=set())
    prompt = encode(tokenizer, "the city is")
    monkeypatch.setattr(generation, "continuations", lambda *_: [plain_ids(tokenizer, said)])
    (own,) = generation.own_answers(editable, [prompt])
    assert own is not None and tokenizer.decode(own.target_ids).rstrip() == word
    monkeypatch.setattr(generation, "continuations", lambda *_: [plain_ids(tokenizer, "東")[:1]])
    assert generation.own_answers(editable, [prompt]) == [None], "the first byte alone is no word"


def test_rows_are_padded_on_the_right_and_batched_within_the_budget() -> None:
    assert pad([[5, 6], [7]]).tolist() == [[5, 6], [7, 0]]
    lengths = [3, 9, 1, 4, 40]
    some = list(batches(lengths, 20))
    assert sorted(i for batch in some for i in batch) == list(range(5))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 20 for b in some)
