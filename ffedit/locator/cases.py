"""Encode the facts to trace, and record the clean and corrupted runs of a batch of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.errors import FactError, ModelError, choices
from ffedit.facts.fact import Fact
from ffedit.inference import generation, replay
from ffedit.inference.batching import batch_budget, grouped
from ffedit.locator.corruption import Corruption, Noise, replacements
from ffedit.locator.result import TOKENS, Kind, Metric, Part, Tokens
from ffedit.model.editable import Editable
from ffedit.model.hooks import replace_output
from ffedit.model.tokenization import Encoded, pad

# Budget of a batch: numbers of each recorded kind (tokens × d_model × layers), and at once in a feed-forward layer
# (tokens × d_ff). On a CPU, LEAST_NUMBERS fill the matrix products; a GPU needs more, 1 / SHARES of its free memory.
LEAST_NUMBERS, SHARES = 2**20, 64


@dataclass(frozen=True)
class Run:
    """Settings of a trace."""

    kind: Kind  # what is restored
    corruption: Corruption  # corruption of the subject
    samples: int  # number of corrupted runs
    window: int  # layers restored together; 1 for states
    sever: Part | None  # the kind of modules that cannot respond at the restored token, or None
    metric: Metric  # what is measured
    seed: int  # seed of the corruption
    layers: tuple[int, ...] | None = None  # the layers to restore at; None: all
    tokens: Tokens = "all"  # the tokens to restore at

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, get_args(Kind)),
            ("sever", self.sever, (None, *get_args(Part))),
            ("metric", self.metric, get_args(Metric)),
            ("tokens", self.tokens, TOKENS),
        ):
            if value not in known:
                raise FactError(f"{name} {value!r} is not known; known are {choices(value, known)}")
        object.__setattr__(self, "samples", FactError.whole("samples", self.samples, 1))  # JSON takes no numpy ints

    @property
    def parts(self) -> set[str]:
        """Kinds of modules whose outputs are restored or kept at their corrupted values."""
        return {part for part in (self.kind, self.sever) if part is not None and part != "state"}


@dataclass(frozen=True)
class Case:
    """Tokenised fact."""

    fact: Fact
    answers: tuple[Encoded, ...]  # the prompt with the traced answer, and, for a logit difference, with the new object
    others: tuple[tuple[int, ...], ...]  # token ids of the replacing subjects; empty if noise is added
    samples: int  # number of corrupted runs

    @property
    def encoded(self) -> Encoded:
        """Return the prompt with the traced answer."""
        return self.answers[0]

    @property
    def subject(self) -> tuple[int, int]:
        """First token of the subject and the one after its last."""
        assert self.encoded.subject is not None
        return self.encoded.subject

    @property
    def rows(self) -> int:
        """Number of rows in a recording: for each answer the clean run, then the corrupted ones."""
        return len(self.answers) * (1 + self.samples)


@dataclass(frozen=True, eq=False)
class Batch:
    """Recorded runs of several cases."""

    cases: tuple[Case, ...]
    recording: replay.Recording  # all rows of the cases, case by case
    first: tuple[int, ...]  # index of each case's first row
    log_probs: Tensor  # log-probability of each row's answer, [rows], nats, float64
    known: tuple[bool, ...]  # by case, whether the clean model generates the traced answer

    def row(self, case: int, answer: int, sample: int) -> int:
        """Return the row of a corrupted run; sample −1 is the clean run."""
        return self.first[case] + answer * (1 + self.cases[case].samples) + 1 + sample

    def log_probs_of(self, case: int) -> Tensor:
        """Return `log_probs` of one case, the clean run first, then the corrupted ones, [1 + samples, answers]."""
        rows = self.log_probs[self.first[case] : self.first[case] + self.cases[case].rows]
        return rows.view(len(self.cases[case].answers), -1).T


def prepare(editable: Editable, facts: Sequence[Fact], indices: Sequence[int], run: Run) -> list[Case]:
    """Encode the facts with these `indices`; for one without a previous object, the model generates the answer.

    FactError where a prompt or object does not fit, or a fact lacks what the run needs.
    """
    limit = editable.max_tokens
    chosen = [facts[i] for i in indices]
    prompts = [editable.encode(f.text, span=f.span, max_tokens=limit) for f in chosen if f.previous is None]
    generated = iter(generation.with_own_answers(editable, prompts))
    subjects = sorted({fact.subject for fact in facts})
    cases = []
    for fact in chosen:
        old = next(generated) if fact.previous is None else editable.encode(fact.text, fact.previous, fact.span, limit)
        answers: tuple[Encoded, ...] = (old,)
        if run.metric == "logit_difference":
            answers = (old, editable.encode(fact.text, fact.new_object, fact.span, limit))
            if answers[1].ids[: answers[1].answer] != old.ids[: old.answer]:
                raise FactError(
                    f"{fact.text!r} gives other tokens before {fact.target!r} than before the old object, so their "
                    "logits cannot be compared; trace a probability"
                )
        others: list[tuple[int, ...]] = []
        if run.corruption.name == "replacement":
            others = replacements(editable, fact, old, subjects, run.samples, run.seed)
        cases.append(Case(fact, answers, tuple(others), len(others) or run.samples))
    return cases


def numbers_at_once(editable: Editable) -> int:
    """Return how many numbers of each kind a batch may hold."""
    return batch_budget(editable, LEAST_NUMBERS, SHARES)


def batches(editable: Editable, cases: Sequence[Case]) -> Iterator[list[int]]:
    """Yield batches of case indices: cases of similar length, within the budget."""

    def tokens(members: Sequence[int]) -> int:
        longest = max(len(e.ids) for i in members for e in cases[i].answers)
        return sum(cases[i].rows for i in members) * longest

    order = sorted(range(len(cases)), key=lambda i: (len(cases[i].encoded.ids), cases[i].subject))
    return grouped(order, tokens, numbers_at_once(editable) // (editable.d_model * len(editable.layers)))


@torch.no_grad()
def run_batch(editable: Editable, cases: Sequence[Case], run: Run, noise: Noise | None) -> Batch:
    """Record the clean and the corrupted runs of `cases` in one pass; ModelError where they are not finite."""
    texts = [answer for case in cases for answer in case.answers for _ in range(1 + case.samples)]
    ids = pad([e.ids[:-1] for e in texts])
    first = [0, *accumulate(case.rows for case in cases)]
    drawn: list[tuple[int, int, int, Tensor]] = []
    for begin, case in zip(first, cases, strict=False):
        start, end = case.subject
        for row in range(begin, begin + case.rows, 1 + case.samples):
            if noise is None:
                ids[row + 1 : row + 1 + case.samples, start:end] = torch.tensor(case.others)
            else:
                values = noise.draw(case.samples, end - start, editable.d_model, run.seed)
                drawn.append((row, start, end, values))

    def corrupt(embedded: Tensor) -> Tensor:
        corrupted = embedded.clone()
        for row, start, end, values in drawn:
            corrupted[row + 1 : row + 1 + len(values), start:end] += values.to(embedded)
        return corrupted

    with replace_output(editable.embedding, corrupt):
        recording = replay.record(editable, ids, generation.answer_reads(texts), run.parts)
    for begin, case in zip(first, cases, strict=False):
        states = [state[begin : begin + case.rows, : len(case.encoded.ids) - 1] for state in recording.states]
        bad = next((i for i, state in enumerate(states) if not torch.isfinite(state).all()), None)
        if bad is not None:
            where = f"enters layer {bad}" if bad < len(editable.layers) else "leaves the last layer"
            raise ModelError(
                f"the model gives numbers that are not finite on {case.fact.text!r}: the first such state {where}; "
                "check the weights, or compute in a wider dtype"
            )
    log_probs = double(generation.answer_sums(recording.logits, texts)).cpu()
    if not torch.isfinite(recording.logits).all():
        raise ModelError(
            "the model's states are finite, but its logits are not: the unembedding overflows; use a wider dtype"
        )
    greedy = recording.logits.argmax(-1).cpu().split([len(e.target_ids) for e in texts])
    known = tuple(tuple(greedy[i].tolist()) == case.encoded.target_ids for i, case in zip(first, cases, strict=False))
    return Batch(tuple(cases), recording, tuple(first[:-1]), log_probs, known)
