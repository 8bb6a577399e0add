"""Explain the wrong answers of an edited model: the edit's key failed, or its value.

An edit of one layer adds Δ = Σ_i δ_i u_iᵀ to the value matrix, and so (u_iᵀ k) δ_i to the layer's output at every
token, where k is the token's key. At the subject of fact i, u_iᵀ k should be 1 in any wording (*reach*), and 0
elsewhere (*leak*). So two things can fail, and forcing separates them: in the unedited model, δ_i is added in full at
the subject's last token, and nothing else is changed.

- The forced answer is right: another wording says the new object, another fact of the subject is kept. So the value is
  good, and the *key* failed: with the edit, the subject got another share of δ_i, or other tokens got some.
- The forced answer is wrong, too. The *value* failed: δ_i does not produce the new object in this wording, or changes
  the other fact itself.

Only leak can change the answer to a neighbor's prompt, so there the key failed. Answers are judged as by the metrics
`generation`, `paraphrase_generation`, `same_subject` and `neighbor_generation`; for the last two, only prompts count
that were answered right before the edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank
from ffedit.editor.edit import Edit, check_edit
from ffedit.editor.key import read_at, read_behind
from ffedit.errors import EditError, FactError
from ffedit.evaluator.generations import SAID_TOKENS, Generations, new_object, prompt_of, true_object
from ffedit.evaluator.metrics import says_new, says_true
from ffedit.evaluator.prompts import Pair, Questions, edited_together, questions
from ffedit.facts.fact import Fact, FactLike, as_facts
from ffedit.facts.fact_token import FactToken
from ffedit.facts.text import counted, occurrences, quoted
from ffedit.inference.contexts import Context
from ffedit.inference.generation import Intervention
from ffedit.model.editable import Editable, check_model
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import add_at
from ffedit.model.tokenization import Encoded, decode
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

Part: TypeAlias = Literal["key", "value"]
# The metrics whose prompts are explained: those of the new object, and those of an answer that should stay.
NEW, KEPT = ("generation", "paraphrase_generation"), ("same_subject", "neighbor_generation")


@dataclass(frozen=True)
class WrongAnswer:
    """A prompt that the edit got wrong, and which part of the edit failed there."""

    score: str  # name of the metric that counts it as wrong
    subject: str  # subject of the fact whose prompt it is
    prompt: str  # the wording
    answer: str  # the right answer
    says: str  # what the edited model says
    failed: Part | None  # None where it is not explained
    forced: str | None = None  # what the unedited model says with δ in full at the subject; None for a neighbor
    # uᵀk at the subject; for a neighbor, the largest in size over its tokens and the edit's subjects
    reach: float | None = None
    written: str = ""  # subject that u belongs to
    token: str = ""  # token where k is read
    position: int | None = None  # index of that token in the prompt, special tokens in front included
    reason: str = ""  # why it is not explained


@dataclass(frozen=True)
class Explanation(Displayed):
    """Answers that an edit got wrong, and which part of it failed: `key` or `value`."""

    wrong: tuple[WrongAnswer, ...]  # fact by fact
    asked: Mapping[str, int]  # by metric, the number of prompts that the edit could get wrong
    reason: str = ""  # why nothing is explained

    def __repr__(self) -> str:
        if self.reason:
            return f"Explanation: none, since {self.reason}"
        failed = ", ".join(f"{part} {sum(wrong.failed == part for wrong in self.wrong)}" for part in ("key", "value"))
        return f"Explanation of {len(self.wrong)} wrong of {sum(self.asked.values())} answers: {failed}"

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By metric, the number of prompts `asked`, of `wrong` answers, and of those where `key` and `value` failed."""
        counts = {}
        for score, asked in self.asked.items():
            failed = [wrong.failed for wrong in self.wrong if wrong.score == score]
            parts = {"key": failed.count("key"), "value": failed.count("value")}
            counts[score] = {"asked": asked, "wrong": len(failed), **parts}
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {"reason": self.reason, "counts": self.counts, "wrong": [asdict(wrong) for wrong in self.wrong]}


def explain(
    editable: Editable, facts: FactLike | Iterable[FactLike], edit: Edit, *, progress: Progress = silent
) -> Explanation:
    """Return, for each prompt of `facts` that `edit` gets wrong, whether its key or its value failed.

    The model is left unchanged. An edit of several layers or of experts, and one without keys (fine-tuning), is not
    explained, nor is a prompt in which the subject does not occur; the result says why. Where the subject occurs
    several times in another prompt than the fact's own, δ is forced at its first occurrence.

    Args:
        editable: the unedited model.
        facts: the facts that were edited, one or several.
        edit: the edit.
        progress: progress callback.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
        EditError: the edit does not belong to this model, or is applied already.
    """
    check_model(editable)
    check_edit(edit)
    facts = as_facts(facts)
    edit.check(editable)
    try:
        parts = take_apart(editable, edit)
    except EditError as error:
        return Explanation((), {}, str(error))
    prompts = questions(editable, facts, edited_together(facts, edit))
    before = _generate(editable, (case for q in prompts for case in _cases(q) if case.score in KEPT), progress)
    cases = [[case for case in _cases(q) if case.score in NEW or case.right(before)] for q in prompts]
    with edit.applied(editable):
        after = _generate(editable, chain.from_iterable(cases), progress)
    wrong: list[WrongAnswer] = []
    for i, (fact, asked) in enumerate(zip(facts, cases, strict=True), 1):
        wrong += _explained(editable, parts, fact, [case for case in asked if not case.right(after)], after)
        progress("explaining", i, len(facts))
    scores = [case.score for case in chain.from_iterable(cases)]
    return Explanation(tuple(wrong), {score: scores.count(score) for score in (*NEW, *KEPT) if score in scores})


@dataclass(frozen=True, eq=False)
class Parts:
    """An edit of one dense layer by its subjects: Δ = Σ_i δ_i u_iᵀ, where u_iᵀ k*_j is 1 if i = j and 0 otherwise."""

    ff: FeedForward  # the layer
    subjects: tuple[str, ...]  # the subject of each of n keys
    deltas: Tensor  # δ_i = Δ k*_i, [d_model, n], float64
    rows: Tensor  # u_iᵀ, [n, d_ff], float64
    token: FactToken  # the token at which keys were read
    behind: frozenset[str]  # subjects that are sinks at the start of a text, where the token behind is edited

    def index(self, subject: str) -> int:
        """Return the index of the subject; FactError where it has no key, or several."""
        if (count := self.subjects.count(subject)) != 1:
            raise FactError(f"the edit has {counted(count, 'key')} for {quoted(subject)}, where one was expected")
        return self.subjects.index(subject)


def take_apart(editable: Editable, edit: Edit) -> Parts:
    """Divide an edit among its subjects; EditError where it is not of one dense layer, or has no keys.

    With K the keys that were solved for and Δ = L R, δ_i are the columns of Δ K, and u_iᵀ the rows of (R K)⁺ R.
    """
    if len(edit.layers) != 1:
        raise EditError(f"the edit changes {counted(len(edit.layers), 'layer')}, so no layer has all of δ")
    ff = editable.feed_forward[edit.layers[0]]
    if ff.mixture is not None:
        raise EditError("the edit changes experts, which a token may or may not be routed to")
    ((at, update),) = edit.updates.items()
    K, subjects = double(edit.keys[at]), tuple(edit.subjects(at))
    if not isinstance(update, LowRank) or not K.shape[1]:
        raise EditError("the edit was not solved for keys (fine-tuned, or the difference of two checkpoints)")
    if len(subjects) != K.shape[1]:
        raise EditError("the edit does not say to which subjects its keys belong")
    parts = edit.provenance.get("parts", [edit.provenance])
    tokens: set[FactToken] = {part.get("config", {}).get("key", {}).get("fact_token", "subject_last") for part in parts}
    if len(tokens) > 1:
        raise EditError("the edit is a sum of edits that write at different tokens")
    left, right = double(update.left), double(update.right)
    behind = frozenset(solved["subject"] for part in parts for solved in part.get("solved", ()) if solved.get("behind"))
    return Parts(ff, subjects, left @ (right @ K), torch.linalg.pinv(right @ K) @ right, tokens.pop(), behind)


@dataclass(frozen=True)
class _Case:
    """A prompt that the edit may get wrong, with its right answer."""

    score: str
    pair: Pair

    @property
    def text(self) -> Encoded:
        return self.pair.new if self.score in NEW else self.pair.true

    def right(self, generations: Generations) -> bool:
        return (says_new if self.score in NEW else says_true)(self.pair, generations)


def _cases(q: Questions) -> Iterator[_Case]:
    for score, pairs in zip((*NEW, *KEPT), ([q.own], q.paraphrases, q.same_subject, q.neighbors), strict=True):
        yield from (_Case(score, pair) for pair in pairs)


def _generate(
    editable: Editable, cases: Iterable[_Case], progress: Progress = silent, intervene: Intervention = nullcontext
) -> Generations:
    """Continue the prompts of `cases` with the model in its current state, as far as reports show."""
    requests = ((new_object if case.score in NEW else true_object)(case.pair, SAID_TOKENS) for case in cases)
    generations = Generations(editable, requests, progress)
    generations.finish(intervene)
    return generations


def _explained(
    editable: Editable, parts: Parts, fact: Fact, cases: Sequence[_Case], after: Generations
) -> Iterator[WrongAnswer]:
    """Yield the wrong answers of one fact, explained; `after` is what the edited model says."""
    sites: dict[_Case, Encoded] = {}
    reasons: dict[_Case, str] = {}
    for case in cases:
        if case.score != "neighbor_generation":
            try:
                sites[case] = _with_subject(editable, parts, fact, case)
            except FactError as error:
                reasons[case] = str(error)
    index = parts.index(fact.subject) if sites else 0
    at = {prompt_of(text): text.site for text in sites.values()}
    forced = _generate(editable, sites, intervene=adding(parts.ff, parts.deltas[:, index], at))
    for case in cases:
        answer, says = after.answer(case.text), after.begun(case.text)
        wrong = WrongAnswer(case.score, fact.subject, case.pair.prompt, answer, says, None)
        if case in reasons:
            yield replace(wrong, reason=reasons[case])
        elif case in sites:
            failed: Part = "key" if case.right(forced) else "value"
            wrong = replace(wrong, failed=failed, forced=forced.begun(case.text))
            yield _with_reach(editable, parts, case, wrong, [sites[case].site], [index])
        else:
            positions, subjects = range(case.text.answer), range(len(parts.subjects))
            yield _with_reach(editable, parts, case, replace(wrong, failed="key"), positions, subjects)


def _with_subject(editable: Editable, parts: Parts, fact: Fact, case: _Case) -> Encoded:
    """Return a case's text with its subject located; FactError where the subject does not occur, or has no key."""
    parts.index(fact.subject)
    is_own = case.score == "generation"
    span = fact.span if is_own else next(occurrences(case.pair.prompt, fact.subject), None)
    if span is None:
        raise FactError(f"{quoted(fact.subject)} does not occur in it")
    encoded = editable.encode(case.pair.prompt, fact.new_object, span, editable.max_tokens)
    text = replace(case.text, subject=encoded.subject, fact_token=parts.token)
    return (read_behind(text) or text) if fact.subject in parts.behind and not text.site else text


def adding(ff: FeedForward, delta: Tensor, sites: Mapping[Context, int]) -> Intervention:
    """Add `delta` [d_model] to the layer's output at one token of each prompt; `sites` has its position, by prompt."""

    def intervene(prompts: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
        at = torch.tensor([sites[tuple(prompt)] for prompt in prompts])
        return add_at(ff.module, at, delta)

    return intervene


def _with_reach(
    editable: Editable, parts: Parts, case: _Case, wrong: WrongAnswer, positions: Sequence[int], subjects: Sequence[int]
) -> WrongAnswer:
    """Add to `wrong` the uᵀk of largest size over `positions` in the prompt and `subjects` of the edit."""
    ends = [replace(case.text, answer=position + 1, fact_token="last") for position in positions]
    keys, _ = read_at(editable, parts.ff, ends)
    reaches = double(keys.cpu()) @ parts.rows[list(subjects)].T
    row, column = divmod(int(reaches.abs().argmax()), len(subjects))
    return replace(
        wrong,
        reach=float(reaches[row, column]),
        written=parts.subjects[subjects[column]],
        token=decode(editable.tokenizer, [case.text.ids[positions[row]]]),
        position=positions[row],
    )
