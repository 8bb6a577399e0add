"""The model as it is and with an edit generate in the same steps: what each says is what it says alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from torch import nn
from writing import FACT, SECOND, write

from ffedit import Edit, evaluate
from ffedit.algebra.low_rank import LowRank
from ffedit.evaluator import evaluate as module
from ffedit.evaluator.evaluate import Evaluation
from ffedit.evaluator.generations import TEXT_TOKENS
from ffedit.model.editable import Editable


def edit_of(editable: Editable) -> Edit:
    """Change a value matrix so much that each token that is said with it may differ."""
    edit = write(editable, FACT, SECOND)
    at, generator = min(edit.updates), torch.Generator().manual_seed(0)
    d_model, d_ff = edit.updates[at].shape
    left, right = (torch.randn(shape, generator=generator).double() for shape in ((d_model, 8), (8, d_ff)))
    return replace(edit, updates={**edit.updates, at: LowRank(0.2 * left, right)})


@pytest.mark.parametrize(("family", "bos"), [("gpt2", True), ("llama", True), ("opt", True), ("mixtral", True)])
def test_both_states_say_what_each_says_alone(family: str, bos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained(family, bos, torch.float32 if family == "mixtral" else torch.float64)
    before, edit = zoo.snapshot(editable), edit_of(editable)
    alone = Evaluation(editable, [FACT, SECOND])
    with edit.applied(editable):
        edited = alone.scores()
    finished: list[int] = []
    together = module.finish_together
    monkeypatch.setattr(module, "finish_together", lambda a, b, w: finished.append(len(w)) or together(a, b, w))
    both = Evaluation(editable, [FACT, SECOND], edit=edit)
    assert both.before == alone.before and both.after == edited and both.before != both.after
    assert zoo.unchanged(editable, before)
    assert finished == ([] if family == "mixtral" else [1]), "the matrices of experts share a parameter"


def test_both_states_take_the_steps_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.trained("llama", True)
    edit, steps = edit_of(editable), []

    def count(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        steps.append(args[0].shape[:2])

    def run(edit: Edit | None) -> list[torch.Size]:
        steps.clear()
        with editable.embedding.register_forward_pre_hook(count):
            Evaluation(editable, [FACT, SECOND], edit=edit)
        return [shape for shape in steps if shape[1] == 1]

    plain, both = run(None), run(edit)
    assert len(plain) == len(both) and sum(shape[0] for shape in both) == 2 * sum(shape[0] for shape in plain)


@pytest.mark.parametrize(("family", "full"), [("llama", False), ("qwen3_next", False), ("llama", True)])
def test_each_stage_of_an_evaluation_is_reported_to_its_end(family: str, full: bool) -> None:
    editable, calls = zoo.shared(family), list[tuple[str, int, int]]()
    edit = edit_of(editable)
    facts = [replace(FACT, generation=("the Eiffel tower is",)), SECOND]
    evaluate(editable, facts, edit, full=full, progress=lambda *call: calls.append(call))
    ends = {stage: (done, total) for stage, done, total in calls}
    assert ends.keys() == {"measuring", "generating", "measuring drift"}
    assert all(0 < done == total for done, total in ends.values())
    steps = [done for stage, done, _ in calls if stage == "generating"]
    assert len(set(steps)) > (TEXT_TOKENS if full else 8), "each step, and not the batch alone"
