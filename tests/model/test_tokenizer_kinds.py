"""The subject and the answer are found in every kind of tokenizer, in any script; or the fact is refused."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import kinds
import pytest
from kinds import CASES, KINDS, SENTENCES, Slow, kind
from learning import learned
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from writing import ALONE, quick

import ffedit
from ffedit.errors import FactError
from ffedit.facts.fact import Fact
from ffedit.inference import generation
from ffedit.inference.corpus import Corpus
from ffedit.model.tokenization import Encoded, decode, encode, plain_ids, special_tokens, tokenised

MERGED = ("share a token", "no token stands before", "does not know")
LOSSY = ("byte level, NFC", "byte level, NFD", "word pieces")  # they change the characters themselves


def asked(tokenizer: PreTrainedTokenizerBase, case: tuple[str, str, str]) -> Encoded | None:
    """A case in tokens; None where it is refused, for a reason that holds."""
    prompt, subject, answer = case
    start = prompt.index("{}")
    try:
        return encode(tokenizer, prompt.format(subject), answer, (start, start + len(subject)))
    except FactError as error:
        assert any(reason in str(error) for reason in MERGED), error
        return None


def plain(text: str) -> str:
    """`text` as no tokenizer but that of word pieces changes it: case, composition and white space aside."""
    return "".join(unicodedata.normalize("NFD", text.casefold()).split()).replace("\ufffd", "")


def letters(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    """How many characters `ids` give whole; more bytes may hide some that were told before."""
    return max(len(plain(decode(tokenizer, ids[:count], special=False))) for count in range(len(ids) + 1))


@pytest.mark.parametrize("name", [name for name in (*KINDS, "ByT5") if name != "word pieces"])
def test_the_subject_and_the_answer_are_found_whole(name: str) -> None:
    tokenizer, found = kind(name), 0
    for prompt, subject, answer in CASES:
        one = asked(tokenizer, (prompt, subject, answer))
        if one is None or tokenizer.unk_token_id in one.ids:
            continue
        found += 1
        whole = tokenizer(one.text)["input_ids"]
        assert list(one.ids) == whole[: len(whole) - (whole[-1] == tokenizer.eos_token_id)]
        before = len(plain(prompt.partition("{}")[0]))
        assert one.subject is not None
        first, last = one.subject[0], one.subject_last
        # Nothing of the subject comes earlier, its last token is the one that ends it.
        assert letters(tokenizer, one.ids[:first]) <= before <= letters(tokenizer, one.ids[: first + 1]), one
        assert (
            letters(tokenizer, one.ids[:last]) < before + len(plain(subject)) <= letters(tokenizer, one.ids[: last + 1])
        ), one
        assert letters(tokenizer, one.ids[: one.answer]) <= len(plain(prompt.format(subject)))
        assert plain(decode(tokenizer, one.target_ids)).endswith(plain(answer)), one
    assert found >= 9, "most cases can be used"


def test_word_pieces_drop_accents_and_are_found() -> None:
    tokenizer = kind("word pieces")
    for case in (*CASES[:4], *CASES[8:11], *CASES[12:14]):
        one = asked(tokenizer, case)
        assert one is not None and one.subject is not None
        marks = dict.fromkeys(map(ord, "\u0301\u0308"))
        said, target = (plain(decode(tokenizer, ids)) for ids in (one.ids[slice(*one.subject)], one.target_ids))
        assert (said, target) == tuple(plain(text).translate(marks) for text in case[1:])


@pytest.mark.parametrize("name", [name for name in KINDS if name not in LOSSY])
def test_without_offsets_the_same_tokens_are_found(name: str) -> None:
    fast, found = kind(name), 0
    assert isinstance(fast, PreTrainedTokenizerFast)
    slow = Slow(fast)
    assert not slow.is_fast
    for case in CASES:
        one, other = asked(fast, case), asked_slow(slow, case)
        if one is not None and other is not None:
            found += 1
            assert (other.ids, other.answer, other.subject_last) == (one.ids, one.answer, one.subject_last), case
    assert found >= 8


def asked_slow(tokenizer: PreTrainedTokenizerBase, case: tuple[str, str, str]) -> Encoded | None:
    try:
        return asked(tokenizer, case)
    except AssertionError as error:
        assert "reads tokens of" in str(error)
        return None


@pytest.mark.parametrize("case", CASES)
def test_without_offsets_bytes_are_counted(case: tuple[str, str, str]) -> None:
    """Of ByT5 the truth is known: a token is a byte."""
    prompt, subject, answer = case
    one = asked(kind("ByT5"), case)
    before = prompt.partition("{}")[0].encode()
    assert one is not None and one.subject == (len(before), len(before) + len(subject.encode()))
    assert len(one.target_ids) - len(answer.encode()) in (0, 1)


def test_without_offsets_what_cannot_be_read_back_is_refused() -> None:
    for name, text in (
        ("byte level, NFD", "café is in"),
        ("word pieces", "café is in"),
        ("pieces, space never", "ß is"),
    ):
        with pytest.raises(FactError, match="gives no character offsets") as caught:
            encode(Slow(kind(name)), text, "Paris", (0, 1))
        assert "\n" not in str(caught.value)


def test_a_byte_that_is_told_to_be_a_whole_run_is_found_in_it() -> None:
    """Unigram with byte fallback gives all bytes of unknown characters the same offsets."""
    tokenizer = kind("unigram and bytes")
    coarse = tokenizer("古い東京の", return_offsets_mapping=True)["offset_mapping"]
    assert coarse.count((0, 5)) == 15
    found = encode(tokenizer, "古い東京の首都は", "京都", (2, 4))
    assert found.subject is not None
    assert tokenizer.decode(found.ids[slice(*found.subject)]) == "東京"
    assert tokenizer.decode(found.target_ids) == "京都"


def test_every_token_of_a_text_stands_for_some_of_it_in_order() -> None:
    for name in (*KINDS, "ByT5"):
        for text in (prompt.format(subject) for prompt, subject, _ in CASES):
            ids, spans = tokenised(kind(name), text)
            assert len(ids) == len(spans)
            shown = [span for i, span in zip(ids, spans, strict=True) if i not in kind(name).all_special_ids]
            assert all(a <= c and b <= d for (a, b), (c, d) in pairwise(shown))


def test_a_token_beyond_the_subject_is_still_its_last() -> None:
    """One token holds the end of the subject and what follows it: its state is the first that knows the subject."""
    backend = Tokenizer(models.BPE({"東": 0, "京": 1, "は": 2, "日": 3, "京は": 4}, [("京", "は")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = encode(tokenizer, "東京は", "日", (0, 2))
    assert found.ids == (0, 4, 3) and found.subject == (0, 2) and found.target_ids == (3,)
    with pytest.raises(FactError, match="share a token"):
        encode(tokenizer, "東京", "は", (0, 2))


def test_a_normaliser_that_joins_characters_moves_nothing() -> None:
    backend = Tokenizer(models.BPE({"c": 0, "é": 1, "i": 2, "-": 3, "x": 4}, []))
    backend.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = encode(tokenizer, "ce\u0301i-", "x", (0, 3))
    assert found.ids == (0, 1, 2, 3, 4) and found.subject == (0, 2) and found.target_ids == (4,)


# Editing ------------------------------------------------------------------------------------------

ENOUGH = {**ALONE, "steps": 40, "step_size": 0.1, "target_probability": 0.95, "max_delta_norm": 20.0}
LATIN = Fact("Eiffel tower", "the place of the {}", "Rome", "Paris")
JAPANESE = Fact("東京", "古い首都の{}", "奈良", "日本")


class Bare(Slow):
    """A tokenizer with as little as Mistral's own has: no `is_fast`, and `added_tokens_decoder` is a method."""

    def __getattribute__(self, name: str) -> Any:
        return self._missing() if name == "is_fast" else super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        return self._missing() if name == "is_fast" else super().__getattr__(name)

    def _missing(self) -> Any:
        raise AttributeError("is_fast")

    def added_tokens_decoder(self) -> dict[int, Any]:  # type: ignore[override]
        raise NotImplementedError


def begun_twice() -> PreTrainedTokenizerFast:
    """A tokenizer that puts BOS in front of a text twice."""
    tokenizer = kinds.byte_level(bos=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    bos = str(tokenizer.bos_token)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} {bos} $A", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
    )
    return tokenizer


JOURNEYS: dict[str, tuple[str, Any, str, Fact]] = {
    "pieces": ("llama", lambda: kinds.pieces(fallback=True, bos=True), "Latin", LATIN),
    "slow, without what others have": ("gpt2", lambda: Bare(kinds.pieces(bos=True, size=900)), "Latin", LATIN),
    "lower case": ("gpt2", lambda: kinds.byte_level(bos=True, normalizer=normalizers.Lowercase()), "Latin", LATIN),
    "BOS twice": ("gpt2", begun_twice, "Latin", LATIN),
    "slow, Japanese": ("gpt2", ByT5Tokenizer, "Japanese", JAPANESE),
    "bytes, Japanese": ("gpt2", lambda: kinds.byte_level(260, bos=True), "Japanese", JAPANESE),
}


def sentences(tokenizer: PreTrainedTokenizerBase, script: str) -> list[tuple[int, ...]]:
    """All that is known in one script, each with an end."""
    return [(*encode(tokenizer, *one).ids, tokenizer.eos_token_id) for one in SENTENCES[script]]


@pytest.mark.parametrize("journey", list(JOURNEYS))
def test_a_fact_is_edited_in_any_tokens(journey: str) -> None:
    family, make, script, fact = JOURNEYS[journey]
    tokenizer = make()
    editable = learned(family, tokenizer, sentences(tokenizer, script))
    trace = ffedit.locate(editable, fact, samples=2)
    assert trace.known and trace.effects.shape == (3, len(trace.tokens))
    edit = ffedit.edit(editable, [fact], "rome", layers=[1], config=quick(**ENOUGH), stats=Corpus(tokens=200))
    lowered = journey == "lower case"
    old, new = (said.lower() if lowered else said for said in (str(fact.previous), fact.target))
    with edit.applied(editable):
        assert generation.completions(editable, [fact.text], 24) == [new]
    assert generation.completions(editable, [fact.text], 24) == [old]
    assert generation.completions(editable, [fact.text], editable.max_tokens) == [old], "as far as the context goes"
    report = ffedit.evaluate(editable, [fact], edit)
    assert report.before.generation == 0 and report.after is not None and report.after.generation == 1


@pytest.mark.parametrize("name", [*KINDS, "ByT5"])
def test_every_kind_of_tokenizer_says_how_its_texts_begin(name: str) -> None:
    tokenizer = kind(name)
    before, after = special_tokens(tokenizer)
    text = "the city of Paris"
    assert tokenizer(text)["input_ids"] == [*before, *plain_ids(tokenizer, text), *after]
