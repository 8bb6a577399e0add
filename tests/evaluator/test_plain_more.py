"""The other metrics against plain loops of their definitions: one prompt, one token and one whole pass at a time.

CounterFact+ (2305.17553), portability (KnowEdit 2401.01286, MQuAKE 2305.14795), the unrelated questions of zsRE, and
ROME's sampled text (2202.05262): how it is drawn, the entropy of its n-grams and its TF-IDF cosine with references.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import zoo
from changing import changed
from reference_scores import PlainScores, mean

from ffedit import Fact
from ffedit.evaluator import Evaluation
from ffedit.inference import generation
from ffedit.model.editable import Editable

FACTS = [
    Fact(
        "Eiffel tower",
        "the {} is located in",
        "the old Rome",
        "Paris",
        neighbors=[
            {"prompt": "Marie Curie stands in", "target": "France"},
            {"prompt": "the city of red river is", "target": "the old Spain ."},
            {"prompt": "the old tower is located in", "target": "the new Rome"},
        ],
        portability=[
            {"prompt": "the city of {} is", "target": "Paris .", "kind": "Reasoning"},
            {"prompt": "Nile river stands in", "target": "Egypt and", "kind": "Reasoning"},
            {"prompt": "Mount Everest stands in", "target": "Rome", "aliases": ["Spain", "Italy ."], "kind": "Alias"},
            {"prompt": "{} stands in", "target": "the Paris"},
        ],
        locality=[
            {"prompt": "red river stands in", "target": "Madrid ."},
            {"prompt": "the city of Anna Karenina is", "target": "the old Spain ."},
            "Nile river stands in",
            "Leo Tolstoy stands in",  # which the second fact changes
        ],
        generation=["the {} is", "{} stands in", "the {} is"],
        references=["Rome is the old city of the tower.", "The tower stands in Rome; a tower in the old city"],
    ),
    Fact(
        "Leo Tolstoy",
        "{} stands in",
        "Italy",
        "Germany",
        neighbors=["Nile river stands in", {"prompt": "Mount Everest stands in", "target": "Italy ."}],
        portability=[{"prompt": "the language of {} is", "target": "Italian", "kind": "Reasoning"}],
        locality=["the new tower stands in", {"prompt": "Marie Curie stands in", "target": "France"}],
        generation=["{} lives in the"],
        references=["Leo Tolstoy lives in Italy and speaks Italian", "a big city in Italy, by the river"],
    ),
]


class Plain(PlainScores):
    """What a model says of `FACTS` now, held against what it said when it was first asked."""

    def __init__(self, editable: Editable) -> None:
        super().__init__(editable.model, editable.tokenizer, FACTS)
        self.first: dict[str, Any] = {}
        self.most = editable.max_tokens

    def argmax(self, prompt: str, answer: str) -> list[int]:
        """The likeliest token in the place of each token of a given answer."""
        ids, start = self.tokens(prompt, answer)
        likeliest = self.logits(ids).argmax(-1).tolist()
        return [likeliest[i - 1] for i in range(start, len(ids))]

    def greedy(self, prompt: str, count: int) -> list[int]:
        """The next tokens of free greedy generation."""
        ids = list(self.tokenizer(prompt)["input_ids"])
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(ids) - count :]

    def kept(self, what: str, value: Any) -> Any:
        """What was found when this was asked first."""
        return self.first.setdefault(what, value)

    def with_edit(self, fact: Fact) -> dict[str, float | None]:
        """CounterFact+: neighborhood success where the edit's sentence stands in front."""
        pairs = []
        for probe in fact.probes("neighbors"):
            if not self.edits(probe, fact, fact.relation):
                prompt = f"{fact.text} {fact.target}. {probe.prompt}"
                pairs.append([self.answer(prompt, str(o))[0] for o in (probe.target, fact.target)])
        return {
            "neighbor_with_edit": mean([float(true < new) for true, new in pairs]),
            "neighbor_with_edit_magnitude": mean([math.exp(-true) - math.exp(-new) for true, new in pairs]),
        }

    def portability(self, fact: Fact) -> tuple[dict[str, float | None], dict[str, float]]:
        """Whether any accepted answer is said, and the share of the first one's tokens; over all, and by kind."""
        said, tokens, kinds = [], [], [probe.kind for probe in fact.portability]
        for probe in fact.probes("portability"):
            said.append(float(any(self.says(probe.prompt, name) for name in (str(probe.target), *probe.aliases))))
            tokens.append(fmean(self.answer(probe.prompt, str(probe.target))[1]))
        found = {"portability": said, "portability_token_accuracy": tokens}
        by_kind = {
            f"{name}/{kind}": fmean(v for v, own in zip(values, kinds, strict=True) if own == kind)
            for name, values in found.items()
            for kind in kinds
            if kind is not None
        }
        return {name: mean(values) for name, values in found.items()}, by_kind

    def locality(self, fact: Fact) -> dict[str, float | None]:
        """Unrelated questions: the tokens of the given answer (ROME), and what was said before the edit (KnowEdit)."""
        given, same, argmax = [], [], []
        for probe in fact.probes("locality"):
            if self.edits(probe, fact, None):
                continue
            own = self.tokenizer.decode(self.kept(f"own {probe.prompt}", self.greedy(probe.prompt, 1)))
            answer = probe.target or own
            if probe.target:
                given.append(fmean(self.answer(probe.prompt, answer)[1]))
            ids, start = self.tokens(probe.prompt, answer)
            now = self.greedy(probe.prompt, len(ids) - start)
            same.append(float(now == self.kept(f"said {probe.prompt}", now)))
            now = self.argmax(probe.prompt, answer)
            before = self.kept(f"argmax {probe.prompt}", now)
            argmax.append(fmean(a == b for a, b in zip(now, before, strict=True)))
        return {"locality_token_accuracy": mean(given), "locality": mean(same), "locality_argmax": mean(argmax)}

    def sampled(self, prompt: str, numbers: Sequence[float]) -> list[int]:
        """From the five likeliest tokens, by inverting their distribution, to 100 tokens with the prompt."""
        ids = list(self.tokenizer(prompt)["input_ids"])
        size = len(ids)
        for number in numbers[: min(100, self.most + 1) - size]:
            likeliest = self.logits(ids)[-1].softmax(-1).topk(5)
            shares = (likeliest.values / likeliest.values.sum()).tolist()
            place = next((i for i in range(5) if sum(shares[: i + 1]) > number), 4)
            ids.append(int(likeliest.indices[place]))
        return ids[size:]

    def text(self, ids: Sequence[int]) -> str:
        """Words with spaces between, without special tokens."""
        return " ".join(zoo.WORDS[i] if i < len(zoo.WORDS) else f"w{i - len(zoo.WORDS)}" for i in ids if i > 2)


def entropy(text: str) -> float:
    """½ (⅔ H₂ + 4⁄3 H₃), H the entropy of the n-grams' frequencies in bits."""
    words, found = text.split(), []
    for n, weight in ((2, 2 / 3), (3, 4 / 3)):
        grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
        shares = [grams.count(gram) / len(grams) for gram in sorted(set(grams))]
        found.append(weight * -sum(share * math.log2(share) for share in shares))
    return sum(found) / 2


def cosine(said: str, references: Sequence[str], documents: Sequence[str]) -> float:
    """Of TF-IDF vectors as scikit-learn's vectorizer makes them by default, fitted on `documents`."""

    def terms(text: str) -> list[str]:
        apart = "".join(c if c.isalnum() or c == "_" else " " for c in text.lower())
        return [term for term in apart.split() if len(term) > 1]

    vocabulary = sorted({term for document in documents for term in terms(document)})
    held = np.array([[term in terms(document) for document in documents] for term in vocabulary])
    idf = np.log((1 + len(documents)) / (1 + held.sum(1))) + 1
    a, b = (idf * [terms(text).count(term) for term in vocabulary] for text in (said, " ".join(references)))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def same(found: Mapping[str, Any], expected: Mapping[str, float | None]) -> None:
    for name, value in expected.items():
        assert found[name] == (None if value is None else pytest.approx(value, abs=1e-5)), name


@pytest.mark.parametrize(("family", "bos"), [("gpt_neo", True), ("llama", False)])
def test_neighbors_behind_the_edit_portability_and_locality(family: str, bos: bool) -> None:
    editable = zoo.trained(family, bos)
    plain, evaluation = Plain(editable), Evaluation(editable, FACTS, full=True)

    def expected() -> list[tuple[dict[str, float | None], dict[str, float]]]:
        found = []
        for fact in FACTS:
            follows, kinds = plain.portability(fact)
            found.append(({**plain.with_edit(fact), **follows, **plain.locality(fact)}, kinds))
        return found

    before = expected()
    with changed(editable):
        after, scored = expected(), evaluation.scores()
    assert before != after
    for one, (scores, kinds) in zip((*evaluation.before, *scored), (*before, *after), strict=True):
        same(one.scores.to_dict(), scores)
        same(one.kinds, kinds)
        assert {name for name in one.kinds if name.startswith("portability")} == set(kinds)
    moved = {name for a, b in zip(before, after, strict=True) for name in a[0] if a[0][name] != b[0][name]}
    assert {"neighbor_with_edit_magnitude", "locality", "locality_argmax"} <= moved
    assert before[0][0]["portability"] == 0.5 and before[0][0]["portability_token_accuracy"] == 0.375


def test_sampled_text_its_entropy_and_its_consistency(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.build("llama", True)
    plain, real = Plain(editable), generation.continuations
    drawn: list[tuple[list[float], list[int]]] = []

    def heard(editable: Editable, prompts: Sequence[Sequence[int]], *rest: Any, **given: Any) -> list[list[int]]:
        said = real(editable, prompts, *rest, **given)
        if "numbers" in given:
            drawn.extend(zip(given["numbers"].tolist(), said, strict=True))
        return said

    monkeypatch.setattr(generation, "continuations", heard)
    documents = [text for fact in FACTS for text in fact.references]

    def check(scored: Sequence[Any]) -> list[float]:
        found = []
        for fact, one in zip(FACTS, scored, strict=True):
            texts = []
            for prompt in fact.texts("generation"):
                numbers, said = drawn.pop(0)
                assert plain.sampled(prompt, numbers) == said
                texts.append(plain.text([*plain.tokenizer(prompt)["input_ids"], *said]))
            scores = {
                "entropy": fmean(entropy(text) for text in texts),
                "consistency": cosine(" ".join(texts), fact.references, documents),
            }
            assert len(set(texts)) == len(texts) and 0 < scores["consistency"] < 1 < scores["entropy"]
            same(one.scores.to_dict(), scores)
            found += scores.values()
        assert not drawn
        return found

    evaluation = Evaluation(editable, FACTS, full=True)
    before = check(evaluation.before)
    with changed(editable):
        after = check(evaluation.scores())
    assert all(a != b for a, b in zip(before, after, strict=True))
