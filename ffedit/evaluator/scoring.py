"""Scores of one fact from a model's answers: the metrics applied to the answers of each kind of prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ffedit.evaluator import metrics
from ffedit.evaluator.added_metrics import added_scores
from ffedit.evaluator.generations import SAID_TOKENS, GenerationRequest, Generations, prompt_of
from ffedit.evaluator.prompts import Pair, Prompt, Questions
from ffedit.evaluator.responses import Answer, Context
from ffedit.evaluator.scores import FactScores, Scores
from ffedit.facts.fact import MULTI_HOP
from ffedit.model.tokenization import Encoded


@dataclass(frozen=True)
class Responses:
    """All outputs of a model on the prompts of some facts.

    Attributes:
        answers: scores of given answers.
        spoken: greedy continuations.
        divergences: KL from the unedited model after neighbors, nats.
        sampled: texts about each fact, by the fact's index.
    """

    answers: Mapping[Encoded, Answer]
    spoken: Generations
    divergences: Mapping[Context, float]
    sampled: Mapping[int, Sequence[str]]


def wanted(q: Questions) -> Iterator[GenerationRequest]:
    """Yield the greedy generations that the scores of one fact need."""

    def whole(texts: Sequence[Encoded], aliases: tuple[Encoded, ...]) -> GenerationRequest:
        others = (*texts[1:], *aliases)
        # One more token: the object may be the beginning of a longer word.
        return GenerationRequest(texts[0], max(len(text.target_ids) for text in (texts[0], *others)) + 1, others=others)

    own = [q.own.new, q.own.true, *q.own.new_aliases]
    yield GenerationRequest(q.own.new, max(SAID_TOKENS, *(len(text.target_ids) + 1 for text in own)), settled=False)
    yield from (whole([pair.new, pair.true], pair.new_aliases) for pair in q.paraphrases)
    for pair in q.same_subject:
        given = whole([pair.true, pair.new], pair.true_aliases)
        yield given if pair.named else GenerationRequest(pair.true, len(pair.true.target_ids))
    yield from (whole([asked.text], asked.aliases) for asked in q.portability)
    yield from (GenerationRequest(asked.text, len(asked.text.target_ids), settled=False) for asked in q.stay)


def scored(q: Questions, place: int, now: Responses, before: Responses, weights: Mapping[str, float]) -> FactScores:
    """Compute one fact's scores.

    Args:
        q: the fact's prompts.
        place: index of the fact, as in `Responses.sampled`.
        now: outputs of the model in its current state.
        before: outputs of the unedited model.
        weights: weights of the terms of reference texts.
    """
    says = now.spoken.says

    def argmax(text: Encoded, heard: Responses = now) -> tuple[int, ...]:
        return heard.answers[text].argmax[: len(text.target_ids)]

    def log_probs(text: Encoded) -> tuple[float, ...]:
        return now.answers[text].log_probs

    def rates(pairs: Sequence[Pair], new: bool) -> tuple[float | None, float | None]:
        """Return success and magnitude of the new or of the true objects; pairs of equal objects are skipped."""
        sides = [(p.new, p.true) if new else (p.true, p.new) for p in pairs if p.new.ids != p.true.ids]
        numbers = [(log_probs(a), log_probs(b)) for a, b in sides]
        return mean([metrics.success(a, b) for a, b in numbers]), mean([metrics.magnitude(a, b) for a, b in numbers])

    def accuracies(texts: Iterable[Encoded]) -> list[float]:
        return [metrics.token_accuracy(argmax(text), text.target_ids) for text in texts]

    def stays(asked: Prompt) -> bool:
        size = len(asked.text.target_ids)
        return now.spoken.ids(asked.text)[:size] == before.spoken.ids(asked.text)[:size]

    efficacy, efficacy_magnitude = rates([q.own], new=True)
    paraphrase, paraphrase_magnitude = rates(q.paraphrases, new=True)
    specificity, specificity_magnitude = rates(q.neighbors, new=False)
    with_edit, with_edit_magnitude = rates(q.with_edit, new=False)
    held = [says(p.true, p.new, p.true_aliases) if p.named else now.spoken.goes_on(p.true) for p in q.same_subject]
    generation = float(says(q.own.new, q.own.true, q.own.new_aliases))
    teacher_forced = float(metrics.teacher_forced(argmax(q.own.new), q.own.new.target_ids))
    token_accuracy = metrics.token_accuracy(argmax(q.own.new), q.own.new.target_ids)
    portable = _by_question(q.portability, [says(asked.text, aliases=asked.aliases) for asked in q.portability])
    follows = accuracies(asked.text for asked in q.portability)
    moved = [now.divergences[c] for p in q.neighbors if (c := prompt_of(p.true)) in now.divergences]
    texts = now.sampled.get(place, ())
    scores = Scores(
        efficacy=efficacy,
        paraphrase=paraphrase,
        specificity=specificity,
        same_subject=mean(held),
        score=metrics.harmonic(efficacy, paraphrase, specificity),
        generation=generation,
        efficacy_magnitude=efficacy_magnitude,
        paraphrase_magnitude=paraphrase_magnitude,
        specificity_magnitude=specificity_magnitude,
        same_subject_magnitude=rates(q.same_subject, new=False)[1],
        teacher_forced=teacher_forced,
        token_accuracy=token_accuracy,
        teacher_forced_gap=teacher_forced - generation,
        token_accuracy_gap=token_accuracy - generation,
        paraphrase_token_accuracy=mean(accuracies(p.new for p in q.paraphrases)),
        paraphrase_generation=mean([says(p.new, p.true, p.new_aliases) for p in q.paraphrases]),
        portability=mean([value for _, value in portable]),
        portability_token_accuracy=mean(follows),
        locality=mean([stays(asked) for asked in q.locality]),
        locality_token_accuracy=mean(accuracies(a.text for a in q.locality if a.named)),
        locality_argmax=mean([metrics.unchanged(argmax(a.text, before), argmax(a.text)) for a in q.locality]),
        neighbor_with_edit=with_edit,
        neighbor_with_edit_magnitude=with_edit_magnitude,
        divergence=mean(moved),
        entropy=mean([metrics.generation_entropy(text) for text in texts]),
        consistency=metrics.reference_consistency(" ".join(texts), q.fact.references, weights)
        if texts and q.fact.references
        else None,
        knew=float(says(q.own.true, q.own.new)) if q.own.named else None,
        added=added_scores(q, now, before),
    )
    kinds = {
        **_by_kind("portability", portable),
        **_by_kind("portability_token_accuracy", zip([asked.kind for asked in q.portability], follows, strict=True)),
        **_by_kind("locality", [(asked.kind, stays(asked)) for asked in q.stay]),
    }
    unsampled = len(q.neighbors) - len(moved)
    left_out = {**q.left_out, **({"divergence": unsampled} if unsampled else {})}
    return FactScores(q.fact, scores, now.spoken.words(q.own.new), kinds, left_out)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None where there is nothing to average."""
    return fmean(values) if values else None


def _by_question(asked: Sequence[Prompt], said: Sequence[bool]) -> list[tuple[str | None, float]]:
    """Return the kind of each question and whether it was answered; a multi-hop question, if any wording was."""
    alone = [(one.kind, float(yes)) for one, yes in zip(asked, said, strict=True) if one.kind != MULTI_HOP]
    hops: dict[tuple[object, ...], bool] = {}
    for one, yes in zip(asked, said, strict=True):
        if one.kind == MULTI_HOP:
            question = one.answer, one.needs
            hops[question] = hops.get(question, False) or yes
    return [*alone, *((MULTI_HOP, float(yes)) for yes in hops.values())]


def _by_kind(name: str, values: Iterable[tuple[str | None, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for kind, value in values:
        if kind is not None:
            found[f"{name}/{kind}"].append(value)
    return {kind: fmean(some) for kind, some in found.items()}
