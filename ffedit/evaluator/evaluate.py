"""Ask a model all the questions of some facts, in batches, and score the answers; once before an edit and once after.

The same prompts and the same old objects are used both times: where a fact names no old object, what the model says
before the edit stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from ffedit import readout, replay
from ffedit.anatomy import Editable
from ffedit.errors import FactError
from ffedit.evaluator.scores import FactScores, Report, Scores, combined, mean_scores
from ffedit.facts import Fact, Probe
from ffedit.progress import Progress, silent
from ffedit.tokens import Encoded, decode, encode, pad

# Of the generic text on which drift is measured; another seed than any that an edit uses.
DRIFT_SEED = 77_000
DRIFT_ROWS, DRIFT_TOKENS = 16, 32
SAID_TOKENS = 8


class Applicable(Protocol):
    """What can be applied to a model for a while: an `Edit`."""

    def applied(self, editable: Editable) -> AbstractContextManager[None]:
        """The model with the edit, and without it afterwards."""
        ...


@dataclass(frozen=True)
class _Questions:
    """One fact's prompts in tokens; each pair is (new object, old or true object) after one prompt."""

    fact: Fact
    prompt: tuple[Encoded, Encoded]
    paraphrases: tuple[tuple[Encoded, Encoded], ...]
    neighbors: tuple[tuple[Encoded, Encoded], ...]
    same_subject: tuple[tuple[Encoded, Encoded], ...]


class Evaluation:
    """The questions of some facts, prepared on the model before any edit, to be asked as often as wanted.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
    """

    def __init__(self, editable: Editable, facts: Sequence[Fact]) -> None:
        if not facts:
            raise FactError("no facts to evaluate; give at least one")
        self.editable = editable
        asked = {text for fact in facts for text in (fact.text, *fact.paraphrase_texts)}
        self._questions = [self._prepare(fact, asked) for fact in facts]

    def _prepare(self, fact: Fact, asked: set[str]) -> _Questions:
        new = fact.new_object
        if fact.previous is None:
            encoded = encode(self.editable.tokenizer, fact.text, span=fact.span, max_tokens=self.editable.max_tokens)
            own = readout.with_own_answer(self.editable, encoded)
            old = decode(self.editable.tokenizer, own.target_ids).strip() or new
        else:
            old = fact.previous

        def probes(some: Sequence[Probe]) -> tuple[tuple[Encoded, Encoded], ...]:
            # A probe whose own fact is edited in this batch is expected to move.
            return tuple(self._pair(p.prompt, new, p.target) for p in some if p.prompt not in asked)

        return _Questions(
            fact,
            self._pair(fact.text, new, old),
            tuple(self._pair(text, new, old) for text in fact.paraphrase_texts),
            probes([replace(p, target=p.target or old) for p in fact.neighbor_probes]),
            probes(fact.same_subject_probes),
        )

    def _pair(self, prompt: str, new: str, true: str | None) -> tuple[Encoded, Encoded]:
        """The prompt with the new object, and with the true one (the model's own answer where there is none)."""
        tokenizer, limit = self.editable.tokenizer, self.editable.max_tokens
        first = encode(tokenizer, prompt, new, max_tokens=limit)
        if true is None:
            return first, readout.with_own_answer(self.editable, encode(tokenizer, prompt, max_tokens=limit))
        return first, encode(tokenizer, prompt, true, max_tokens=limit)

    def scores(self) -> tuple[FactScores, ...]:
        """Ask everything of the model as it is now."""
        pairs = [pair for q in self._questions for pair in (q.prompt, *q.paraphrases, *q.neighbors, *q.same_subject)]
        texts = list(dict.fromkeys(e for pair in pairs for e in pair))
        log_probs = readout.answer_log_probs(self.editable, texts)
        probability = {e: float(lp.double().mean().exp()) for e, lp in zip(texts, log_probs, strict=True)}
        spoken = self._spoken()
        return tuple(self._score(q, probability, spoken) for q in self._questions)

    def _spoken(self) -> dict[Encoded, tuple[int, ...]]:
        """What the model says freely where it matters: after the fact's prompt and after same-subject prompts."""
        asked = [e for q in self._questions for e in (q.prompt[0], *(true for _, true in q.same_subject))]
        asked = list(dict.fromkeys(asked))
        count = max(SAID_TOKENS, *(len(e.target_ids) for e in asked))
        said = readout.continuations(self.editable, [e.ids[: e.answer] for e in asked], count)
        return {e: tuple(ids) for e, ids in zip(asked, said, strict=True)}

    def _score(
        self, q: _Questions, probability: dict[Encoded, float], spoken: dict[Encoded, tuple[int, ...]]
    ) -> FactScores:
        def rate(pairs: Sequence[tuple[Encoded, Encoded]], wins: Callable[[float, float], bool]) -> float | None:
            return fmean(wins(probability[a], probability[b]) for a, b in pairs) if pairs else None

        def gap(pairs: Sequence[tuple[Encoded, Encoded]], sign: int) -> float | None:
            return fmean(sign * (probability[a] - probability[b]) for a, b in pairs) if pairs else None

        def says(e: Encoded) -> bool:
            return spoken[e][: len(e.target_ids)] == e.target_ids

        efficacy = rate([q.prompt], lambda new, old: new > old)
        paraphrase = rate(q.paraphrases, lambda new, old: new > old)
        specificity = rate(q.neighbors, lambda new, true: true > new)
        scores = Scores(
            efficacy=efficacy,
            paraphrase=paraphrase,
            specificity=specificity,
            same_subject=fmean(says(true) for _, true in q.same_subject) if q.same_subject else None,
            score=combined(efficacy, paraphrase, specificity),
            generation=float(says(q.prompt[0])),
            efficacy_magnitude=gap([q.prompt], 1),
            paraphrase_magnitude=gap(q.paraphrases, 1),
            specificity_magnitude=gap(q.neighbors, -1),
            same_subject_magnitude=gap(q.same_subject, -1),
        )
        said = decode(self.editable.tokenizer, spoken[q.prompt[0]], special=False)
        return FactScores(q.fact, scores, " ".join(said.split()))


@torch.no_grad()
def next_token_log_probs(editable: Editable, rows: Sequence[Sequence[int]]) -> Tensor:
    """Log-probabilities of the next token all along `rows` of equal length, [tokens, vocabulary], on the CPU."""
    ids = pad(rows)
    reads = torch.cartesian_prod(torch.arange(len(ids)), torch.arange(ids.shape[1]))
    return replay.forward(editable, ids, reads).float().log_softmax(-1).cpu()


def evaluate(
    editable: Editable, facts: Sequence[Fact], edit: Applicable | None = None, progress: Progress = silent
) -> Report:
    """Score `facts` on the model as it is, and again with `edit` applied; the model is left as it was.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
        EditError: the edit does not belong to this model.
    """
    evaluation = Evaluation(editable, facts)
    progress("measuring", 0, 2)
    before = evaluation.scores()
    progress("measuring", 1, 2)
    if edit is None:
        return Report(mean_scores(f.scores for f in before), None, before, None)
    generic = readout.own_text(editable, DRIFT_ROWS, min(DRIFT_TOKENS, editable.max_tokens), DRIFT_SEED)
    usual = next_token_log_probs(editable, generic)
    with edit.applied(editable):
        after = evaluation.scores()
        changed = next_token_log_probs(editable, generic)
    drift = float((usual.exp() * (usual - changed)).sum(-1).mean())
    progress("measuring", 2, 2)
    return Report(
        mean_scores((f.scores for f in before), perplexity=_perplexity(usual, generic)),
        mean_scores((f.scores for f in after), drift, _perplexity(changed, generic)),
        before,
        after,
    )


def _perplexity(log_probs: Tensor, rows: Sequence[Sequence[int]]) -> float:
    """Of `rows` of equal length, each but its first token, from `next_token_log_probs`."""
    ids = pad(rows)
    found = log_probs.reshape(*ids.shape, -1)[:, :-1].gather(-1, ids[:, 1:, None])
    return float((-found.double().mean()).exp())
