"""Evaluation of facts on a model: run all their prompts and score the answers, once before an edit and once after.

Both runs use the same prompts and the same old objects: where a fact names no old object, the unedited model's own
answer is used in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torch import Tensor

from ffedit.editor.edit import Edit, check_edit
from ffedit.editor.provenance import agree
from ffedit.errors import EditError, FactError
from ffedit.evaluator.drift import GenericText, ReferenceDistributions
from ffedit.evaluator.formulas import term_weights
from ffedit.evaluator.generations import Generations, finish_together, prompt_of, requests, sampled
from ffedit.evaluator.metrics import METRICS, Responses, by_kind, measure, moved, says_answer, says_new, says_true
from ffedit.evaluator.prompts import Pair, Prompt, edited_together, questions
from ffedit.evaluator.report import Report
from ffedit.evaluator.responses import ask
from ffedit.evaluator.scores import Continuation, FactScores, Scores, left_out, mean_scores
from ffedit.facts.fact import Fact, FactLike, as_facts
from ffedit.inference.batching import TOKENS
from ffedit.inference.contexts import Context, Pass
from ffedit.inference.distributed import ALONE, ProcessGroup, interleaved
from ffedit.model.editable import Editable, check_model
from ffedit.model.fingerprint import fingerprint
from ffedit.progress import Progress, silent

# A text whose token ids are compared between the two tokenizers.
PROBE = "The Eiffel Tower, 300 m tall, was BUILT in 1889; it's in Paris.\n東京 Zürich\t"


class Evaluation:
    """Prompts of facts, prepared on the unedited model, that can be run on any state of it any number of times.

    The scores of the unedited model are in `before`, those with an `edit` in `after`.

    Args:
        editable: the unedited model.
        facts: all facts that are edited together, or with `edit` some of its facts; a prompt of one that another fact
            of the edit changes is excluded.
        progress: progress callback.
        full: also measure what takes longest: sampled text (entropy, consistency), neighbors after the edit's
            sentence.
        only: indices of the facts to evaluate, a share for one of several processes; None for all.
        weights: `reference_weights` of a whole data set; None for those of `facts`.
        edit: an edit to measure at once: both states generate in shared steps, which takes half as long.

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
        weights: Mapping[str, float] | None = None,
        edit: Edit | None = None,
    ) -> None:
        if not facts:
            raise FactError("no facts to evaluate; give at least one")
        self.editable, self._progress = editable, progress
        indices = range(len(facts)) if only is None else only
        prompts = questions(editable, [facts[i] for i in indices], edited_together(facts, edit), full)
        self._questions = dict(zip(indices, prompts, strict=True))
        self._weights = reference_weights(facts) if weights is None else weights
        neighbors = [prompt_of(pair.true) for q in prompts for pair in q.neighbors]
        count = sum(len(fact.neighbors) for fact in facts)
        self._reference = ReferenceDistributions(neighbors, editable.vocabulary, count)
        self._before = self._ask(editable, indices, first=True, finish=edit is None)
        after = None if edit is None else self._ask_with(edit, indices)
        self.before = self._score(self._before, indices)
        self.after = None if after is None else self._score(after, indices)

    def scores(self, editable: Editable | None = None, only: Sequence[int] | None = None) -> tuple[FactScores, ...]:
        """Run all prompts on the model in its current state and return the scores of each fact.

        Args:
            editable: another model with the same tokenizer, an edited one; None for the model given at construction.
            only: indices of facts, among those prepared; None for all of these.

        Raises:
            ModelError: the model's numbers are not finite.
        """
        indices = list(self._questions) if only is None else only
        return self._score(self._ask(editable or self.editable, indices), indices)

    def _score(self, now: Responses, indices: Sequence[int]) -> tuple[FactScores, ...]:
        scored, before, generations = [], self._before, now.generations
        for q in (self._questions[i] for i in indices):
            unsampled = len(q.neighbors) - len(moved(q, now))
            left_out = {**q.left_out, "divergence": unsampled} if unsampled else q.left_out
            asked = tuple(_continuation(score, prompt, generations) for score, prompt in q.by_score)
            scores, kinds = Scores(**measure(q, now, before)), by_kind(q, now, before)
            scored.append(FactScores(q.fact, scores, generations.begun(q.own.new), kinds, left_out, asked))
        return tuple(scored)

    def _ask_with(self, edit: Edit, indices: Sequence[int]) -> Responses:
        """Run all prompts on the model with `edit`, and finish the generations with and without it."""
        with edit.applied(self.editable):
            weights = edit.weights(self.editable)
            after = self._ask(self.editable, indices, finish=weights is None)
        if weights is None:
            self._before.generations.finish()
        else:
            finish_together(self._before.generations, after.generations, weights)
        return after

    def _ask(self, editable: Editable, indices: Sequence[int], first: bool = False, finish: bool = True) -> Responses:
        prompts = [self._questions[i] for i in indices]
        divergences: dict[Context, float] = {}
        texts = dict.fromkeys(text for q in prompts for text in q.texts)
        kinds = {kind for metric in METRICS.values() for kind in metric.generates}
        wanted = (request for q in prompts for request in requests(q, kinds))
        generations = Generations(editable, wanted, self._progress)

        def follow(result: Pass[Tensor], argmax: Mapping[Context, int]) -> None:
            if rows := [i for i, context in enumerate(result.contexts) if context in self._reference.contexts]:
                contexts, log_probs = [result.contexts[i] for i in rows], result.read[rows]
                if first:
                    self._reference.keep(contexts, log_probs)
                divergences.update(zip(contexts, self._reference.compare(contexts, log_probs), strict=True))
            generations.follow(result, argmax)

        answers = ask(editable, texts, TOKENS, generations.closed, follow, self._progress)
        if finish:
            generations.finish()
        else:
            generations.begin_rest()
        groups = [q.generation for q in prompts]
        texts_of = dict(zip(groups, sampled(editable, groups, self._progress), strict=True))
        return Responses(answers, generations, divergences, texts_of, self._weights)


def _continuation(score: str, item: Pair | Prompt, generations: Generations) -> Continuation:
    if isinstance(item, Prompt):
        text, right = item.text, says_answer(item, generations)
    elif METRICS[score].direction == "up":
        text, right = item.new, says_new(item, generations)
    else:
        text, right = item.true, says_true(item, generations)
    return Continuation(score, item.prompt, generations.answer(text), generations.begun(text), right)


def reference_weights(facts: Sequence[Fact]) -> dict[str, float]:
    """Return the inverse document frequency of each term of the reference texts of `facts` (`term_weights`)."""
    return term_weights([text for fact in facts for text in fact.references])


def evaluate(
    editable: Editable,
    facts: FactLike | Iterable[FactLike],
    edit: Edit | None = None,
    *,
    progress: Progress = silent,
    edited: Editable | None = None,
    text: str | Path | None = None,
    full: bool = False,
    process_group: ProcessGroup = ALONE,
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
        process_group: processes of which each scores its share of the facts; all return the whole report.

    Raises:
        FactError: a prompt or object does not fit the tokenizer or the model.
        EditError: the edit does not belong to this model, the edited model has another tokenizer, the text file cannot
            be read, or the processes have different inputs.
        ModelError: the model's numbers are not finite.
    """
    check_model(editable)
    EditError.require(text, (str, Path, type(None)), "the path of a text file was expected")
    if edit is not None:
        check_edit(edit)
    if edited is not None:
        check_model(edited)
        if edit is not None:
            raise EditError("an edit and an edited model were given; give one of them")
        check_tokenizers(editable, edited)
        if editable.chat != edited.chat:
            raise EditError("one of the two models is asked in its chat template and the other is not; load both alike")
    facts = as_facts(facts)
    measured = edit is not None or edited is not None
    lowest = None if edit is None else min(edit.layers, default=None)
    generic = process_group.in_all(
        lambda: GenericText(editable, text, lowest, progress) if measured or text is not None else None
    )
    rows = generic.rows if generic is not None and text is not None else None
    agree(
        process_group,
        editable,
        lambda: {
            "facts": [fact.to_dict() for fact in facts],
            "options": (edit and edit.fingerprint(), edited and fingerprint(edited), full),
            "text": rows,
        },
    )
    indices = process_group.share(range(len(facts)))
    evaluation = process_group.in_all(
        lambda: Evaluation(editable, facts, progress, full, indices, edit=edit) if indices or not facts else None
    )
    before = _of_all(evaluation.before if evaluation else (), process_group)
    means = mean_scores((fact.scores for fact in before), perplexity=generic.perplexity if generic else None)
    if generic is None or not measured:
        return Report(means, None, before, None, left_out(before))
    with edit.applied(editable) if edit is not None else nullcontext():
        scores = process_group.in_all(lambda: (evaluation.after or evaluation.scores(edited)) if evaluation else ())
        after = _of_all(scores, process_group)
        drift, perplexity = process_group.in_all(partial(generic.measure, edited))
    changed = mean_scores((fact.scores for fact in after), drift=drift, perplexity=perplexity)
    return Report(means, changed, before, after, left_out(before))


def _of_all(scores: tuple[FactScores, ...], group: ProcessGroup) -> tuple[FactScores, ...]:
    if group.size == 1:
        return scores
    return tuple(map(FactScores.from_dict, interleaved(group.gather([score.to_dict() for score in scores]))))


def check_tokenizers(editable: Editable, edited: Editable) -> None:
    """Refuse an edited model whose tokenizer or vocabulary differs from the base's: answers could not be compared."""
    base, tokenizer = editable.tokenizer, edited.tokenizer
    sizes = [model.vocabulary for model in (editable, edited)]
    if base.get_vocab() != tokenizer.get_vocab():
        why = f"other tokens: {len(tokenizer.get_vocab())}, and {len(base.get_vocab())} in the base"
    elif base(PROBE, verbose=False)["input_ids"] != tokenizer(PROBE, verbose=False)["input_ids"]:
        why = "the same tokens, but it divides a text in another way"
    elif sizes[0] != sizes[1]:
        why = f"{sizes[1]} logits, {sizes[0]} in the base"
    else:
        return
    raise EditError(
        f"{edited.name}: its tokenizer differs from that of {editable.name} ({why}); an edited checkpoint with the "
        "tokenizer of its base was expected"
    )
