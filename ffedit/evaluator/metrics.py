"""Metrics: each is one registered function of a fact's prompts and of the model's answers to them.

A metric is a function with a `@metric` row: unit, direction, a few words for tables, source, and the prompts after
which it needs greedy generation. Other packages declare theirs, made in the same way, as entry points of the group
`ffedit.metrics`. Everything else follows from `METRICS`: scores, means, intervals, tables, JSON and `--require`. The
published formulas are in `formulas`.

A fact's score is the mean over the fact's prompts, the score of several facts the mean over facts. A score without
prompts to measure it on is None, never 0 or 1. So is a comparison of equal objects, as where a fact names no old object
and the model says the new one before the edit.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, harmonic_mean
from typing import TYPE_CHECKING, TypeAlias

from ffedit.errors import EditError, FFEditError, brief
from ffedit.evaluator import formulas
from ffedit.facts.fact import MULTI_HOP
from ffedit.files.entry_points import Registry

if TYPE_CHECKING:  # these import torch, which takes seconds; `--require` is checked without
    from ffedit.evaluator.generations import Generations
    from ffedit.evaluator.prompts import Pair, Prompt, Questions
    from ffedit.evaluator.responses import Answer
    from ffedit.inference.contexts import Context
    from ffedit.model.tokenization import Encoded

ROME = "Meng et al. 2022, arXiv 2202.05262"
ZSRE = "Levy et al. 2017, as in arXiv 2210.07229, section 5"
COUNTERFACT_PLUS = "Hoelscher-Obermaier et al. 2023, arXiv 2305.17553"
KNOWEDIT = "Zhang et al. 2024, arXiv 2401.01286"
MQUAKE = "Zhong et al. 2023, arXiv 2305.14795, section 3.3"
WILD = "Yang et al. 2025, arXiv 2502.11177"
FFEDIT = "ffedit"


@dataclass(frozen=True)
class Responses:
    """All outputs of a model on the prompts of some facts.

    Attributes:
        answers: by prompt with object, the log-probability, nats, and the argmax at each token of the object.
        generations: greedy continuations.
        divergences: by neighbor's prompt, KL divergence of the next token from the unedited model, nats.
        sampled: sampled texts about a fact, by its `Questions.generation`.
        weights: weights of the terms of reference texts (`formulas.term_weights`).
    """

    answers: Mapping[Encoded, Answer]
    generations: Generations
    divergences: Mapping[Context, float]
    sampled: Mapping[tuple[Encoded, ...], Sequence[str]]
    weights: Mapping[str, float]

    def argmax(self, text: Encoded) -> tuple[int, ...]:
        """Return the argmax at each token of the object of `text`, after the true tokens before it."""
        return self.answers[text].argmax[: len(text.target_ids)]


# A fact's prompts, the model's answers now, its answers before the edit -> the score of this fact.
Function: TypeAlias = "Callable[[Questions, Responses, Responses], float | None]"


@dataclass(frozen=True)
class Metric:
    """A score of a fact."""

    name: str
    function: Function | None  # computes it; None for a score of the whole model, measured on `drift.GenericText`
    unit: str = ""  # "share", whose intervals stay within 0 and 1; or "probability", "nats", "bits", ...
    direction: str = ""  # "up", "keep" as before the edit, "zero" is best, or "" where no direction is better
    meaning: str = ""  # a few words for tables
    source: str = ""  # the publication
    generates: tuple[str, ...] = ()  # kinds of prompts, fields of `Questions`, after which it needs greedy generation
    full: bool = False  # True if it is measured in full only (`Evaluation`)
    package: str = "ffedit"  # the package that it comes from

    def __call__(self, q: Questions, now: Responses, before: Responses) -> float | None:
        """Compute the score of a fact from its prompts, the model's answers now, and those before the edit."""
        return None if self.function is None else self.function(q, now, before)


def metric(
    unit: str, direction: str, meaning: str, source: str, *, generates: Sequence[str] = (), full: bool = False
) -> Callable[[Function], Metric]:
    """Make a metric of a function, whose name is the score's; the arguments are the attributes of `Metric`."""
    row = unit, direction, meaning, source, tuple(generates), full
    return lambda function: Metric(function.__name__, function, *row)


# Headline scores ---------------------------------------------------------------------------


@metric("share", "up", "new beats old", ROME)
def efficacy(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of edited prompts with nll(new) < nll(old)."""
    return _success([q.own], now, new=True)


@metric("share", "up", "new beats old, reworded", ROME)
def paraphrase(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of other wordings of the fact with nll(new) < nll(old)."""
    return _success(q.paraphrases, now, new=True)


@metric("share", "keep", "neighbors hold", ROME)
def specificity(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of neighbors (other subjects) with nll(true) < nll(new)."""
    return _success(q.neighbors, now, new=False)


@metric("share", "keep", "other facts hold", FFEDIT, generates=["same_subject"])
def same_subject(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of prompts on other facts of the subject that free greedy generation still answers with the true object.

    Any name of an object that the data name counts; otherwise the model's own answer before the edit is compared.
    """
    return _mean([says_true(pair, now.generations) for pair in q.same_subject])


SCORE_PARTS = ("efficacy", "paraphrase", "specificity")


@metric("share", "up", "harmonic mean", ROME)
def score(q: Questions, now: Responses, before: Responses) -> float | None:
    """Harmonic mean of efficacy, paraphrase and specificity; for several facts, of the three means, as published."""
    return harmonic(efficacy(q, now, before), paraphrase(q, now, before), specificity(q, now, before))


def harmonic(*rates: float | None) -> float | None:
    """Return the harmonic mean of the three success rates, a share (ROME, "Score"), up; None where one is missing."""
    measured = [rate for rate in rates if rate is not None]
    return harmonic_mean(measured) if len(measured) == len(rates) else None


@metric("share", "up", "says new object", WILD, generates=["own"])
def generation(q: Questions, now: Responses, before: Responses) -> float:
    """Share of edited prompts after which free greedy generation says the whole new object, or another name of it."""
    return float(says_new(q.own, now.generations))


drift = Metric("drift", None, "nats", "zero", "nats per token", COUNTERFACT_PLUS)


# Magnitudes, and scores on generic text ---------------------------------------------------------


def _magnitude(
    name: str, direction: str, pairs: Callable[[Questions], Sequence[Pair]], new: bool, source: str, full: bool = False
) -> Metric:
    """Make the metric of the mean p(new) − p(true) over `pairs` of a fact; with `new` False, p(true) − p(new)."""

    def function(q: Questions, now: Responses, before: Responses) -> float | None:
        return _mean([formulas.magnitude(*sides) for sides in _log_probs(pairs(q), now, new)])

    return Metric(name, function, "probability", direction, source=source, full=full)


efficacy_magnitude = _magnitude("efficacy_magnitude", "up", lambda q: [q.own], True, ROME)
paraphrase_magnitude = _magnitude("paraphrase_magnitude", "up", lambda q: q.paraphrases, True, ROME)
specificity_magnitude = _magnitude("specificity_magnitude", "keep", lambda q: q.neighbors, False, ROME)
same_subject_magnitude = _magnitude("same_subject_magnitude", "keep", lambda q: q.same_subject, False, FFEDIT)
perplexity = Metric("perplexity", None, "", "keep", "of generic text", "exp of the mean −log p of its tokens")


# The text behind the new object ----------------------------------------------------------------


@metric("share", "zero", "special or repeated", FFEDIT, generates=["own", "paraphrases"])
def degenerate(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of special and repeated tokens in the greedy texts after the prompt and its other wordings."""
    return _mean(map(now.generations.degenerate, _texts(q)))


@metric("share", "zero", "special tokens, new ones", FFEDIT, generates=["own", "paraphrases"])
def special_tokens(q: Questions, now: Responses, before: Responses) -> float | None:
    """Mean rise, over the same texts, of the share of special tokens since before the edit; a fall counts as 0.

    Ordinary text has no special tokens, so one text shows damage that `degenerate`, which is not 0 in small models
    before an edit either, shows over many texts only.
    """
    shares = [(now.generations.special(text), before.generations.special(text)) for text in _texts(q)]
    return _mean([max(0.0, share - usual) for share, usual in shares])


@metric("bits", "keep", "bits, of greedy text", f"{ROME}, for sampled text", generates=["own", "paraphrases"])
def greedy_entropy(q: Questions, now: Responses, before: Responses) -> float | None:
    """Entropy of word bigrams and trigrams in the same greedy texts. It grows with a text's length."""
    return _mean(map(now.generations.entropy, _texts(q)))


# With and without teacher forcing ------------------------------------------------------------


@metric("share", "up", "all tokens, after true ones", WILD)
def teacher_forced(q: Questions, now: Responses, before: Responses) -> float:
    """Share of edited prompts where every token of the new object is the argmax after the true tokens before it.

    A part of the object earns nothing. Greedy generation then says the same tokens, so this differs from `generation`
    only where the model extends the object's last word, or spells the object with other tokens.
    """
    return float(now.argmax(q.own.new) == q.own.new.target_ids)


@metric("share", "up", "tokens, after true ones", ZSRE)
def token_accuracy(q: Questions, now: Responses, before: Responses) -> float:
    """Share of the new object's tokens that are the argmax, teacher-forced: efficacy of zsRE."""
    return formulas.token_accuracy(now.argmax(q.own.new), q.own.new.target_ids)


@metric("difference of shares", "zero", "teacher_forced − generation", WILD, generates=["own"])
def teacher_forced_gap(q: Questions, now: Responses, before: Responses) -> float | None:
    """Difference teacher_forced − generation; not 0 where the model extends the object's last word or respells it."""
    return _difference(teacher_forced, generation, q, now, before)


@metric("difference of shares", "zero", "token_accuracy − generation, as in 2502.11177", WILD, generates=["own"])
def token_accuracy_gap(q: Questions, now: Responses, before: Responses) -> float | None:
    """Difference token_accuracy − generation, as published; it also contains the credit for parts of an object."""
    return _difference(token_accuracy, generation, q, now, before)


@metric("share", "up", "their tokens, after true ones", ZSRE)
def paraphrase_token_accuracy(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of the new object's tokens that are the argmax after other wordings: paraphrase of zsRE."""
    return _token_accuracy([pair.new for pair in q.paraphrases], now)


@metric("share", "up", "said in other wordings", WILD, generates=["paraphrases"])
def paraphrase_generation(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of other wordings after which free greedy generation says the whole new object, or another name of it."""
    return _mean([says_new(pair, now.generations) for pair in q.paraphrases])


@metric("share", "keep", "said of neighbors", WILD, generates=["neighbors"])
def neighbor_generation(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of neighbors after which free greedy generation says their own object: stricter than `specificity`.

    Any name of an object that the data name counts; otherwise the model's own answer before the edit is compared.
    """
    return _mean([says_true(pair, now.generations) for pair in q.neighbors])


# What follows, and what else moved -----------------------------------------------------------


@metric("share", "up", "says what follows", f"{MQUAKE}; {KNOWEDIT}", generates=["portability"])
def portability(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of prompts on what follows from the edit that free greedy generation answers correctly.

    Any name or answer that the data accept counts. A multi-hop question counts once, as answered if any of its wordings
    is. MQuAKE puts examples before its questions; here there are none.
    """
    return _mean([value for _, value in _portable(q, now)])


@metric("share", "up", "its tokens, after true ones", KNOWEDIT)
def portability_token_accuracy(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of the tokens of the first accepted answer that are the argmax, teacher-forced, as KnowEdit publishes."""
    return _token_accuracy([prompt.text for prompt in q.portability], now)


@metric("share", "keep", "unrelated answers hold", FFEDIT, generates=["locality"])
def locality(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of unrelated questions that free greedy generation answers as before the edit."""
    return _mean([_stays(prompt, now, before) for prompt in q.locality])


@metric("share", "keep", "given answers' tokens, after true ones", ZSRE)
def locality_token_accuracy(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of the tokens of their named answers that are the argmax, teacher-forced, as ROME and MEMIT compute it."""
    return _token_accuracy([prompt.text for prompt in q.locality if prompt.named], now)


@metric("share", "keep", "their tokens, after true ones", KNOWEDIT)
def locality_argmax(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of their answers' tokens at which the argmax is as before the edit, even if it is another token."""
    texts = [prompt.text for prompt in q.locality]
    return _mean([formulas.token_accuracy(now.argmax(text), before.argmax(text)) for text in texts])


@metric("share", "keep", "neighbors, behind the edit", COUNTERFACT_PLUS, full=True)
def neighbor_with_edit(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of neighbors with nll(true) < nll(new) after the edit's sentence."""
    return _success(q.with_edit, now, new=False)


neighbor_with_edit_magnitude = _magnitude(
    "neighbor_with_edit_magnitude", "keep", lambda q: q.with_edit, False, COUNTERFACT_PLUS, full=True
)


@metric("nats", "zero", "nats, on neighbors", COUNTERFACT_PLUS)
def divergence(q: Questions, now: Responses, before: Responses) -> float | None:
    """Mean KL(before ‖ after) of the next token after those neighbors whose distributions are kept."""
    return _mean(moved(q, now))


@metric("bits", "keep", "bits, of sampled text", ROME, full=True)
def entropy(q: Questions, now: Responses, before: Responses) -> float | None:
    """Entropy of bigrams and trigrams in sampled text about the subject."""
    return _mean([formulas.generation_entropy(text) for text in now.sampled[q.generation]])


@metric("cosine", "up", "sampled text like references", ROME, full=True)
def consistency(q: Questions, now: Responses, before: Responses) -> float | None:
    """TF-IDF cosine of sampled text with the fact's references; document frequencies are over all facts' references."""
    texts, references = now.sampled[q.generation], q.fact.references
    return formulas.reference_consistency(" ".join(texts), references, now.weights) if texts and references else None


@metric("share", "", "says old object", FFEDIT, generates=["own"])
def knew(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of facts that name an old object for which free greedy generation says it."""
    return float(now.generations.says(q.own.true, q.own.new)) if q.own.named else None


@metric("share", "keep", "answers kept on purpose", FFEDIT, generates=["keep"])
def keep(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of the fact's `keep` prompts, on which it was optimised, that free greedy generation answers as it should.

    Any name of an answer that the fact names counts; otherwise the model's own answer before the edit is compared.
    """
    return _mean([says_answer(prompt, now.generations) for prompt in q.keep])


@metric("share", "up", "said in `also`", FFEDIT, generates=["also"])
def also(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of `also`, wordings on which the edit was optimised, after which generation says the whole new object."""
    return _mean([says_new(pair, now.generations) for pair in q.also])


@metric("share", "up", "said in other languages", FFEDIT, generates=["cross_lingual"])
def cross_lingual(q: Questions, now: Responses, before: Responses) -> float | None:
    """Share of the fact's prompts in other languages after which the model says any name of the new object there."""
    return _mean([says_answer(prompt, now.generations) for prompt in q.cross_lingual])


# The registry --------------------------------------------------------------------------------


def _added(point: str, package: str, loaded: object) -> Metric:
    """Check what an entry point of another package holds: a `Metric`, or a plain function, named by the entry point."""
    if not callable(loaded):
        raise FFEditError(f"{type(loaded).__name__} was found; a function was expected")
    added = loaded if isinstance(loaded, Metric) else Metric(point, loaded)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", added.name) or added.name in ("to_dict", "from_dict"):
        raise FFEditError(
            f"{added.name!r} is not a name that a score can have; small letters, digits and _ were expected"
        )
    return replace(added, package=package)


# All metrics by name: every one above, in this order, then those of other packages.
METRICS = Registry("ffedit.metrics", [made for made in globals().values() if isinstance(made, Metric)], _added)


def measure(q: Questions, now: Responses, before: Responses) -> dict[str, float | None]:
    """Return every score of one fact. Raises EditError where a metric of another package fails, or gives no number."""
    values: dict[str, float | None] = {}
    for metric in METRICS.values():
        try:
            value = metric(q, now, before)
            values[metric.name] = None if value is None else float(value)
            if metric.package != "ffedit" and not math.isfinite(values[metric.name] or 0.0):
                raise ValueError(f"{value} is not finite")
        except Exception as error:  # another package may raise anything; it is reported in one line
            if metric.package == "ffedit":
                raise
            raise EditError(
                f"the metric {metric.name!r} failed ({brief(error)}); uninstall its package, or mend it"
            ) from error
    return values


def by_kind(q: Questions, now: Responses, before: Responses) -> dict[str, float]:
    """Return portability and locality of one fact by the data set's kinds of probes, "portability/Reasoning".

    Here locality covers unrelated questions, same-subject prompts and neighbors: the share of a kind that free greedy
    generation answers as before the edit.
    """
    accuracies = [formulas.token_accuracy(now.argmax(prompt.text), prompt.text.target_ids) for prompt in q.portability]
    values: dict[str, list[float]] = defaultdict(list)
    for name, pairs in (
        ("portability", _portable(q, now)),
        ("portability_token_accuracy", zip([prompt.kind for prompt in q.portability], accuracies, strict=True)),
        ("locality", [(prompt.kind, _stays(prompt, now, before)) for prompt in q.stay]),
    ):
        for kind, value in pairs:
            if kind is not None:
                values[f"{name}/{kind}"].append(value)
    return {name: fmean(scores) for name, scores in values.items()}


def moved(q: Questions, now: Responses) -> list[float]:
    """Return KL(before ‖ now) after those neighbors of a fact whose distributions are kept, nats."""
    contexts = [pair.true.ids[: pair.true.answer] for pair in q.neighbors]
    return [now.divergences[context] for context in contexts if context in now.divergences]


def says_new(pair: Pair, said: Generations) -> bool:
    """Return True if free greedy generation says the new object of `pair`, whole, or another name of it."""
    return said.says(pair.new, pair.true, pair.new_aliases)


def says_true(pair: Pair, said: Generations) -> bool:
    """Return True if it says the true object, by any of its names; where none is named, what the model said before."""
    return said.says(pair.true, pair.new, pair.true_aliases) if pair.named else said.begins_with(pair.true)


def says_answer(prompt: Prompt, said: Generations) -> bool:
    """Return True if it says the answer, by any of its names; where none is named, what the model said before."""
    return said.says(prompt.text, aliases=prompt.aliases) if prompt.named else said.begins_with(prompt.text)


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None


def _texts(q: Questions) -> list[Encoded]:
    """Return the prompts of a fact after which text is generated: its own and the other wordings."""
    return [pair.new for pair in (q.own, *q.paraphrases)]


def _log_probs(pairs: Sequence[Pair], now: Responses, new: bool) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Return log-probabilities of the `new` or of the true objects, and of the others; equal ones are skipped."""
    sides = [(p.new, p.true) if new else (p.true, p.new) for p in pairs if p.new.ids != p.true.ids]
    return [(now.answers[favoured].log_probs, now.answers[other].log_probs) for favoured, other in sides]


def _success(pairs: Sequence[Pair], now: Responses, new: bool) -> float | None:
    return _mean([formulas.success(*sides) for sides in _log_probs(pairs, now, new)])


def _token_accuracy(texts: Sequence[Encoded], now: Responses) -> float | None:
    return _mean([formulas.token_accuracy(now.argmax(text), text.target_ids) for text in texts])


def _difference(first: Metric, second: Metric, q: Questions, now: Responses, before: Responses) -> float | None:
    a, b = first(q, now, before), second(q, now, before)
    return None if a is None or b is None else a - b


def _stays(prompt: Prompt, now: Responses, before: Responses) -> bool:
    """Return whether greedy generation, as long as the answer of `prompt`, is that of before the edit."""
    size = len(prompt.text.target_ids)
    return now.generations.ids(prompt.text)[:size] == before.generations.ids(prompt.text)[:size]


def _portable(q: Questions, now: Responses) -> list[tuple[str | None, float]]:
    """Return the kind of each question and whether it is answered; a multi-hop question, if any wording is."""
    answers = [(prompt, says_answer(prompt, now.generations)) for prompt in q.portability]
    single = [(prompt.kind, float(right)) for prompt, right in answers if prompt.kind != MULTI_HOP]
    multi_hop: dict[tuple[object, ...], bool] = {}
    for prompt, right in answers:
        if prompt.kind == MULTI_HOP:
            question = prompt.answer, prompt.needs
            multi_hop[question] = multi_hop.get(question, False) or right
    return [*single, *((MULTI_HOP, float(right)) for right in multi_hop.values())]
