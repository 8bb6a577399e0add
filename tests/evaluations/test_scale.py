"""Scripts of large edits: the comparison of devices runs, and the tasks beside the facts ask what they say."""

from __future__ import annotations

from pathlib import Path

import collateral
import gpu
import pytest
from click.testing import CliRunner

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
