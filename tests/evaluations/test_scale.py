"""Scripts of large edits: the comparison of devices runs, and the tasks beside the facts ask what they say."""

from __future__ import annotations

from pathlib import Path

import capacity
import collateral
import gpu
import pytest
import torch
import zoo
from click.testing import CliRunner
from writing import CORPUS, FACT, quick

import ffedit

EVALUATIONS = Path(__file__).parents[2] / "evaluations"


def test_every_step_is_compared_between_devices() -> None:
    result = CliRunner().invoke(gpu.main, ["--device", "cpu", "--shapes", "tiny"])
    assert result.exit_code == 0, result.output
    assert all(f"    {what:<11} 0.0e+00" in result.output for what in gpu.ALLOWED)


def test_devices_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "measure", lambda name, device: ([], {"keys": 1.0}))
    result = CliRunner().invoke(gpu.main, ["--device", "cpu", "--shapes", "tiny"])
    assert result.exit_code == 1 and "TOO FAR" in result.output


def test_agreement_has_each_sentence_in_both_numbers() -> None:
    items = collateral.TASKS["agreement"]
    assert len(set(items)) == len(items) == 320
    singular = {right for prompt, right, _ in items if prompt.split()[1] in dict(collateral.SUBJECTS)}
    plural = {right for prompt, right, _ in items if prompt.split()[1] not in dict(collateral.SUBJECTS)}
    assert singular == {verb for verb, _ in collateral.VERBS} and plural == {verb for _, verb in collateral.VERBS}
    assert "The author near the guards" in {prompt for prompt, *_ in items}


def test_a_sequence_has_one_right_answer_among_all_of_its_items() -> None:
    items = collateral.TASKS["sequences"]
    assert ("Monday, Tuesday, Wednesday,", "Thursday") in {item[:2] for item in items}
    for prompt, right, wrong in items:
        assert right not in wrong and right not in prompt.replace(",", "").split() and len(wrong) >= 3


def test_accuracy_counts_what_is_likelier_than_every_other() -> None:
    atlas = ffedit.load("atlas")
    prompt = "Eiffel Tower is located in the city of"
    items = [(prompt, "Paris", ("Rome", "London")), (prompt, "Rome", ("Paris",)), (prompt, "Paris", ("Paris",))]
    assert collateral.accuracy(atlas, items) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("family", "bos", "keep", "sink"),
    [("gpt2", True, True, 0.3), ("gpt2", True, False, 0.3), ("llama", False, True, 2.0)],
)
def test_capacity_solves_for_all_facts_as_the_run_that_it_repeats(
    family: str, bos: bool, keep: bool, sink: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffedit.editor.key.SINK", sink)  # at 2.0 every name that begins a text is taken for a sink
    editable, first = zoo.trained(family, bos), ffedit.Fact("Rome", "{} stands in", "Spain", "France")
    stats = ffedit.collect_stats(editable, 1, corpus=CORPUS)
    config = quick(contexts=4, keep_beginning=keep, context_weight=3.0)
    edit = ffedit.edit(editable, [first, FACT], "memit", layers=1, config=config, stats=stats)
    ((at, update),) = edit.updates.items()
    (facts, method, updates, _), _ = capacity.solutions(editable, edit, stats, [2])
    assert (facts, method) == (2, "memit")
    torch.testing.assert_close(updates[at].dense, update.dense)
