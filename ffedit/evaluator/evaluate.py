"""Evaluation of facts on a model: run all their prompts and score the answers, once before an edit and once after.

Both runs use the same prompts and the same old objects: where a fact names no old object, the unedited model's own
answer is used in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ffedit.errors import EditError, FactError
from ffedit.evaluator.drift import GenericText
from ffedit.evaluator.generations import Generations, prompt_of, sampled
from ffedit.evaluator.left_out import left_out
from ffedit.evaluator.metrics import term_weights
from ffedit.evaluator.prompts import questions
from ffedit.evaluator.reference_distributions import ReferenceDistributions
from ffedit.evaluator.responses import BUDGET, Context, ask
from ffedit.evaluator.scores import FactScores, Report, mean_scores
from ffedit.evaluator.scoring import Responses, scored, wanted
from ffedit.facts.fact import Fact
from ffedit.model.editable import Editable
from ffedit.progress import Progress, silent

# Scores that are measured in full only.
FULL = frozenset({"neighbor_with_edit", "neighbor_with_edit_magnitude", "entropy", "consistency"})
# A text whose token ids are compared between the two tokenizers.
PROBE = "The Eiffel Tower, 300 m tall, was BUILT in 1889; it's in Paris.\n東京 Zürich\t"


class Applicable(Protocol):
    """Protocol of an edit that can be applied to a model temporarily, as `Edit` can."""

    def applied(self, editable: Editable) -> AbstractContextManager[None]:
        """Apply the edit to the model inside a `with` block and remove it afterwards."""
        ...


class Evaluation:
    """Prompts of facts, prepared on the unedited model, that can be run on any state of it any number of times.

    Args:
        editable: the unedited model.
        facts: all facts of the edit; a prompt of one fact that another fact of the edit changes is excluded.
        progress: progress callback.
        full: also measure what takes longest: sampled text (entropy, consistency), neighbors behind the edit's
            sentence.
        only: indices of the facts to evaluate, a share for one of several processes; None for all.
        budget: padded tokens in a batch.
        weights: weights of the terms of reference texts, by `reference_weights` of a whole data set; None for those
            of `facts`.

    Attributes:
        before: the scores of the unedited model.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
        ModelError: the model's numbers are not finite.
    """

    def __init__(
        self,
        editable: Editable,
        facts: Sequence[Fact],
        progress: Progress = silent,
        full: bool = False,
        only: Sequence[int] | None = None,
        budget: int = BUDGET,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not facts:
            raise FactError("no facts to evaluate; give at least one")
        self.editable, self._progress, self._budget = editable, progress, budget
        places = range(len(facts)) if only is None else only
        found = questions(editable, [facts[i] for i in places], facts, full)
        self._questions = dict(zip(places, found, strict=True))
        self._weights = reference_weights(facts) if weights is None else weights
        neighbors = [prompt_of(pair.true) for q in found for pair in q.neighbors]
        vocabulary = editable.model.config.get_text_config().vocab_size
        self._usual = ReferenceDistributions(neighbors, vocabulary, sum(len(fact.neighbors) for fact in facts))
        self._before = self._hear(editable, places, first=True)
        self.before = self._score(self._before, places)

    def scores(self, editable: Editable | None = None, only: Sequence[int] | None = None) -> tuple[FactScores, ...]:
        """Run all prompts on the model in its current state and return the scores of each fact.

        Args:
            editable: another model with the same tokenizer, an edited one; None for the model given at construction.
            only: indices of facts, among those prepared; None for all of these.

        Raises:
            ModelError: the model's numbers are not finite.
        """
        places = list(self._questions) if only is None else only
        return self._score(self._hear(editable or self.editable, places), places)

    def _score(self, heard: Responses, places: Sequence[int]) -> tuple[FactScores, ...]:
        return tuple(scored(self._questions[i], i, heard, self._before, self._weights) for i in places)

    def _hear(self, editable: Editable, places: Sequence[int], first: bool = False) -> Responses:
        some = {i: self._questions[i] for i in places}
        divergences: dict[Context, float] = {}

        def listen(contexts: list[Context], log_probs: Tensor) -> None:
            if first:
                self._usual.keep(contexts, log_probs)
            divergences.update(zip(contexts, self._usual.compare(contexts, log_probs), strict=True))

        texts = dict.fromkeys(text for q in some.values() for text in q.texts)
        says = [one for q in some.values() for one in wanted(q)]
        closed = {one.text for one in says if one.settled and one.count > len(one.text.target_ids)}
        answers = ask(editable, texts, self._budget, closed, self._usual.contexts, listen, self._progress)
        spoken = Generations(editable, says, answers)
        prompts = [(i, prompt) for i, q in some.items() for prompt in q.generation]
        drawn: dict[int, list[str]] = {i: [] for i in places}
        for (i, _), text in zip(prompts, sampled(editable, prompts), strict=True):
            drawn[i].append(text)
        return Responses(answers, spoken, divergences, drawn)


def reference_weights(facts: Sequence[Fact]) -> dict[str, float]:
    """Return the inverse document frequency of each term of the reference texts of `facts`: see `term_weights`."""
    return term_weights([text for fact in facts for text in fact.references])


def evaluate(
    editable: Editable,
    facts: Fact | Sequence[Fact],
    edit: Applicable | None = None,
    progress: Progress = silent,
    edited: Editable | None = None,
    text: str | Path | None = None,
    full: bool = False,
) -> Report:
    """Score `facts` on the model as it is, and again on the edited one; the model is left unchanged.

    Args:
        editable: the unedited model.
        facts: the facts that were or will be edited, one or several.
        edit: applied for the second measurement.
        progress: progress callback.
        edited: in place of `edit`, another model: a checkpoint that was edited by any tool.
        text: a file for drift and perplexity; None for text that the model samples.
        full: also measure what takes longest, as in `Evaluation`.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
        EditError: the edit does not belong to this model, the edited model has another tokenizer, or the text file
            cannot be read.
        ModelError: the model's numbers are not finite.
    """
    if edit is not None and edited is not None:
        raise EditError("an edit and an edited model were given; give one of them")
    if edited is not None:
        check_tokenizers(editable, edited.name, edited.tokenizer, edited.model.config)
        if editable.chat != edited.chat:
            raise EditError("one of the two models is asked in its chat template and the other is not; load both alike")
    measured = edit is not None or edited is not None
    generic = GenericText(editable, text) if measured or text is not None else None
    usual = None if generic is None else generic.perplexity
    evaluation = Evaluation(editable, [facts] if isinstance(facts, Fact) else facts, progress, full)
    before = evaluation.before
    whole = mean_scores((one.scores for one in before), perplexity=usual)
    if generic is None or not measured:
        return Report(whole, None, before, None, left_out(before))
    with edit.applied(editable) if edit is not None else nullcontext():
        after = evaluation.scores(edited)
        drift, changed = generic.measure(edited)
    changed_scores = mean_scores((one.scores for one in after), drift, changed)
    return Report(whole, changed_scores, before, after, left_out(before, generic.drift_rows))


def check_tokenizers(editable: Editable, name: str, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Refuse an edited model whose tokenizer differs from the base's: their answers cannot be compared.

    Args:
        editable: the base.
        name: name of the edited model, whose weights need not be loaded.
        tokenizer: its tokenizer.
        config: its config.

    Raises:
        EditError: the tokenizers or the vocabularies differ.
    """
    one, other = editable.tokenizer, tokenizer
    sizes = [some.get_text_config().vocab_size for some in (editable.model.config, config)]
    if one.get_vocab() != other.get_vocab():
        found = f"{len(other.get_vocab())} tokens, {len(one.get_vocab())} in the base, not the same ones"
    elif one(PROBE, verbose=False)["input_ids"] != other(PROBE, verbose=False)["input_ids"]:
        found = "the same tokens, used in another way"
    elif sizes[0] != sizes[1]:
        found = f"{sizes[1]} logits, {sizes[0]} in the base"
    else:
        return
    raise EditError(
        f"{name}: its tokenizer differs from that of {editable.name} ({found}); an edited checkpoint with the "
        "tokenizer of its base was expected"
    )
