"""The metrics of CounterFact the plain way: one prompt at a time, whole forward passes, written from the definitions.

Meng et al. 2022, arXiv 2202.05262, section 3.3: the new and the old object are compared by the mean negative
log-likelihood of their tokens after a prompt. Nothing here comes from ffedit but what a fact is; ffedit is held against
it in the tests, and timed against it in `scoring.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import fmean, harmonic_mean
from typing import Any

import torch
from torch import Tensor

from ffedit import Fact, Probe


class PlainScores:
    """What a model says about some facts, without batches, caches or padding.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        facts: that are edited together.
    """

    def __init__(self, model: Any, tokenizer: Any, facts: Sequence[Fact]) -> None:
        self.model, self.tokenizer, self.facts = model, tokenizer, facts
        self.edited = {text.strip() for fact in facts for text in (fact.text, *fact.texts("paraphrases"))}
        self.usual: dict[str, Tensor] = {}

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of the next token at every position, [tokens, vocabulary], in float64."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits.double()

    def tokens(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """The ids of prompt and answer, and where the answer begins."""
        text = f"{prompt.rstrip()} {answer}"
        coded = self.tokenizer(text, return_offsets_mapping=True)
        edge = len(prompt.rstrip())
        start = next(i for i, (a, b) in enumerate(coded["offset_mapping"]) if b > max(a, edge))
        return list(coded["input_ids"]), start

    def answer(self, prompt: str, answer: str) -> tuple[float, list[bool]]:
        """Mean negative log-likelihood of the answer's tokens, nats, and which of them are the argmax."""
        ids, start = self.tokens(prompt, answer)
        log_probs = self.logits(ids).log_softmax(-1)
        places = range(start, len(ids))
        nll = -fmean(float(log_probs[i - 1, ids[i]]) for i in places)
        return nll, [int(log_probs[i - 1].argmax()) == ids[i] for i in places]

    def says(self, prompt: str, answer: str) -> bool:
        """Whether greedy generation, token by token, gives the answer's tokens."""
        ids, start = self.tokens(prompt, answer)
        given = ids[:start]
        for expected in ids[start:]:
            given.append(int(self.logits(given)[-1].argmax()))
            if given[-1] != expected:
                return False
        return True

    def text(self, prompt: str, answer: str) -> list[int]:
        """Forty greedy tokens after a prompt, or fewer where the text ends."""
        ids, start = self.tokens(prompt, answer)
        given, ends = ids[:start], {self.tokenizer.eos_token_id, self.model.generation_config.eos_token_id}
        for _ in range(40):
            said = int(self.logits(given)[-1].argmax())
            if said in ends:
                break
            given.append(said)
        return given[start:]

    def degenerate(self, ids: Sequence[int]) -> float:
        """Share of the tokens that are special, or the last of four that occurred before in the text."""
        fours = [tuple(ids[max(0, i - 3) : i + 1]) for i in range(len(ids))]
        special = set(self.tokenizer.all_special_ids)
        return fmean(ids[i] in special or (i > 3 and fours[i] in fours[3:i]) for i in range(len(ids)))

    def entropy(self, ids: Sequence[int]) -> float:
        """Of pairs and threes of words, weighed by two and by four thirds and halved; bits."""
        words = re.findall(r"\w+|[^\w\s]", self.tokenizer.decode(ids))
        found = 0.0
        for n, weight in ((2, 2 / 3), (3, 4 / 3)):
            runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            shares = [runs.count(run) / len(runs) for run in set(runs)]
            found -= weight / 2 * sum(share * math.log2(share) for share in shares)
        return found

    def gives(self, prompt: str, answer: str, other: str) -> bool:
        """Whether it says the answer, and not a longer object that begins with it."""
        longer = other != answer and other.startswith(answer)
        return self.says(prompt, answer) and not (longer and self.says(prompt, other))

    def divergence(self, prompt: str, answer: str) -> float:
        """KL of the next-token distribution after a neighbor, from the one seen there first; nats."""
        ids, start = self.tokens(prompt, answer)
        now = self.logits(ids[:start])[-1].log_softmax(-1)
        before = self.usual.setdefault(prompt, now)
        return float((before.exp() * (before - now)).sum())

    def edits(self, probe: Probe, of: Fact, relation: str | None) -> bool:
        """Whether a prompt of a fact asks for another edited one: of that relation or, if unknown, with that object."""
        for fact in self.facts:
            same = fact.relation == relation if relation and fact.relation else fact.previous == probe.target
            if same and fact != of and re.search(rf"(?<!\w){re.escape(fact.subject)}(?!\w)", probe.prompt):
                return True
        return probe.prompt.strip() in self.edited

    def scores(self, fact: Fact) -> dict[str, float | None]:
        """Of one fact, whose old object and probes' answers are all given, but perhaps those of locality."""
        new, old = fact.new_object, str(fact.previous)
        neighbors = [
            (p.prompt, str(p.target)) for p in fact.probes("neighbors") if not self.edits(p, fact, fact.relation)
        ]
        same = [(p.prompt, str(p.target)) for p in fact.probes("same_subject") if not self.edits(p, fact, None)]
        far = [(p.prompt, p.target) for p in fact.probes("locality") if p.target and not self.edits(p, fact, None)]
        own, other = self.answer(fact.text, new), self.answer(fact.text, old)
        paraphrases = [(self.answer(x, new), self.answer(x, old)) for x in fact.texts("paraphrases")]
        near = [(self.answer(x, true)[0], self.answer(x, new)[0]) for x, true in neighbors]
        beside = [(self.answer(x, true)[0], self.answer(x, new)[0]) for x, true in same]
        efficacy = float(own[0] < other[0])
        paraphrase = mean([a[0] < b[0] for a, b in paraphrases])
        specificity = mean([a < b for a, b in near])
        three = [efficacy, paraphrase, specificity]
        texts = [ids for x in (fact.text, *fact.texts("paraphrases")) if (ids := self.text(x, new))]
        return {
            "efficacy": efficacy,
            "paraphrase": paraphrase,
            "specificity": specificity,
            "score": None if None in three else harmonic_mean([float(rate or 0) for rate in three]),
            "efficacy_magnitude": math.exp(-own[0]) - math.exp(-other[0]),
            "paraphrase_magnitude": mean([math.exp(-a[0]) - math.exp(-b[0]) for a, b in paraphrases]),
            "specificity_magnitude": mean([math.exp(-a) - math.exp(-b) for a, b in near]),
            "same_subject_magnitude": mean([math.exp(-a) - math.exp(-b) for a, b in beside]),
            "teacher_forced": float(all(own[1])),
            "token_accuracy": mean(own[1]),
            "paraphrase_token_accuracy": mean([fmean(a[1]) for a, _ in paraphrases]),
            "generation": float(self.gives(fact.text, new, old)),
            "paraphrase_generation": mean([self.gives(x, new, old) for x in fact.texts("paraphrases")]),
            "same_subject": mean([self.gives(x, true, new) for x, true in same]),
            "locality_token_accuracy": mean([fmean(self.answer(x, true)[1]) for x, true in far]),
            "degenerate": mean([self.degenerate(ids) for ids in texts]),
            "greedy_entropy": mean([self.entropy(ids) for ids in texts]),
            "knew": float(self.gives(fact.text, old, new)),
            "divergence": mean([self.divergence(x, true) for x, true in neighbors]),
        }

    def all(self) -> list[dict[str, float | None]]:
        """The scores of every fact."""
        return [self.scores(fact) for fact in self.facts]


def mean(values: Sequence[float]) -> float | None:
    """None where there is nothing to average."""
    return fmean(values) if values else None
