"""The rivals that ffedit is held against, and the paired differences: what they claim to solve, and to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ablation
import compare
import one_by_one
import pytest
import rivals
import site_quality
import torch
import zoo
from click.testing import CliRunner
from torch import Tensor
from writing import FACT, SECOND

import ffedit
from ffedit import Address, FFEditError
from ffedit.editor.statistics import text_for
from ffedit.files.resuming import Journal, read_journal
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture

LAYER, PREFIXES = 1, ["a b c", "the is in"]
EDITORS = [rivals.published_rome, rivals.plain_rank_one]
FAMILIES = ("gpt2", "llama", "opt")


def parts(family: str) -> tuple[Editable, Tensor]:
    editable = zoo.build(family)
    d_ff = editable.memories[LAYER].d_ff
    keys = torch.randn(4 * d_ff, d_ff, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return editable, keys.T @ keys / len(keys)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("editor", EDITORS)
def test_a_rival_stores_its_value_at_its_key_and_leaves_the_model_alone(editor: Any, family: str) -> None:
    editable, C = parts(family)
    memory = editable.memories[LAYER]
    W = memory.value.clone()
    edit = editor(editable, FACT, LAYER, C, PREFIXES)
    assert torch.equal(memory.value, W)
    delta = edit.updates[Address(LAYER)].dense
    assert torch.allclose((W.double() + delta) @ edit.key, edit.value, atol=1e-9)
    assert float(delta.norm()) > 0
    # No change that does the same is smaller in the norm of C.
    other = delta + torch.randn(delta.shape, dtype=delta.dtype) @ (
        torch.eye(len(edit.key), dtype=delta.dtype) - torch.outer(edit.key, edit.key) / (edit.key @ edit.key)
    )
    assert torch.allclose(other @ edit.key, delta @ edit.key)
    assert torch.trace(other @ C @ other.T) > torch.trace(delta @ C @ delta.T)


@pytest.mark.parametrize("editor", EDITORS)
def test_the_key_is_the_mean_over_the_bare_prompt_and_all_prefixes(editor: Any) -> None:
    editable, C = parts("llama")
    memory, keys = editable.memories[LAYER], []
    for prefix in ("", *PREFIXES):
        text = f"{prefix}. {FACT.text}" if prefix else FACT.text
        start = text.index(FACT.subject)
        encoded = editable.encode(text, FACT.new_object, (start, start + len(FACT.subject)))
        with capture({0: memory.module}, inputs=True) as seen, torch.no_grad():
            editable.model(input_ids=torch.tensor([encoded.ids]))
        keys.append(seen[0][0, encoded.subject_last].double())
    edit = editor(editable, FACT, LAYER, C, PREFIXES)
    assert torch.allclose(edit.key, torch.stack(keys).mean(0), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_falls_and_the_steps_end_when_they_are_asked_to(family: str) -> None:
    editable, C = parts(family)
    published = rivals.published_rome(editable, FACT, LAYER, C, PREFIXES)
    assert published.losses[-1] < published.losses[0]
    assert len(published.losses) <= 25
    assert all(loss >= 0.05 for loss in published.losses[:-1])
    plain = rivals.plain_rank_one(editable, FACT, LAYER, None, PREFIXES)
    assert plain.losses[-1] < plain.losses[0]
    assert 1 < len(plain.losses) <= 40
    assert len(rivals.plain_rank_one(editable, FACT, LAYER, None, PREFIXES, steps=3).losses) <= 3
    assert len(rivals.published_rome(editable, SECOND, LAYER, C, PREFIXES, steps=3).losses) <= 3
    for rate in (1e-3, 0.1):  # by which Adam's first step moves each entry
        moved = rivals.published_rome(editable, SECOND, LAYER, C, PREFIXES, 2, rate).left.abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-2, atol=0)


def test_an_edit_is_in_the_weights_for_a_block_only_and_scored_there() -> None:
    editable, C = parts("llama")
    edit = rivals.published_rome(editable, FACT, LAYER, C, PREFIXES)
    W = editable.memories[LAYER].value.clone()
    with one_by_one.written(editable, edit.updates):
        assert torch.allclose(editable.memories[LAYER].value.double() @ edit.key, edit.value, atol=1e-5)
    assert torch.equal(editable.memories[LAYER].value, W)
    ((before, after, _),) = one_by_one.Examiner(editable).scores([FACT], edit.updates)
    assert set(before) == set(after) == set(one_by_one.RATES)
    assert after["efficacy"] == 1.0
    assert torch.equal(editable.memories[LAYER].value, W)


def results(count: int, seed: int, **fixed: float | None) -> list[dict[str, Any]]:
    """Lines of a journal with drawn scores."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, len(one_by_one.RATES), generator=generator).tolist()
    rates = [{**dict(zip(one_by_one.RATES, row, strict=True)), **fixed} for row in drawn]
    seconds = {"seconds": 1.0, "processor_seconds": 1.0 + seed}
    both = [{"before": rate, "after": rate, "says": "", **seconds} for rate in rates]
    return [{"fact": f"{i}", "subject": f"{i}", **line} for i, line in enumerate(both)]


def columns(lines: list[dict[str, Any]]) -> one_by_one.Columns:
    return one_by_one.columns_of(lines, [line["fact"] for line in lines])


def test_a_run_against_itself_differs_by_nothing() -> None:
    same = columns(results(20, 0))
    for name in (*one_by_one.RATES, "harmonic", "processor_seconds"):
        found = one_by_one.interval(same, name, same)
        assert found is not None
        assert found.mean == 0.0
        if name in one_by_one.RATES:  # no change in 20 facts is none of all facts
            assert found.low == pytest.approx(-found.high) and 0.1 < found.high < 0.2
        else:
            assert found.low == found.high == 0.0
    _, summary = compare.report({"ffedit": results(20, 0), "plain": results(20, 0)})
    assert summary["differences"]["ffedit - plain"]["harmonic"] == [0.0, 0.0, 0.0]
    assert summary["differences"]["ffedit - plain"]["times_as_fast"] == 1.0


def test_the_harmonic_mean_is_that_of_the_means_of_what_was_measured() -> None:
    half = {"generation": 0.5, "paraphrase_generation": 1.0, "neighbor_generation": 0.5}
    found = one_by_one.interval(columns(results(3, 1, **half, same_subject=1.0)), "harmonic")
    assert found is not None
    assert found.mean == pytest.approx(2 / 3)
    three = results(3, 1, **half, same_subject=None)
    assert one_by_one.interval(columns(three), "same_subject") is None
    found = one_by_one.interval(columns(three), "harmonic")
    assert found is not None
    assert found.mean == pytest.approx(0.6)
    # Facts without one of the four do not stand in the way of those with it.
    three[0]["after"] = {**three[0]["after"], "same_subject": 1.0}
    found = one_by_one.interval(columns(three), "harmonic")
    assert found is not None
    assert found.mean == pytest.approx(2 / 3)


def test_paired_differences_are_of_the_facts_that_both_have() -> None:
    one, other = results(6, 0), results(4, 1)
    _, summary = compare.report({"ffedit": one, "published": other})
    found = summary["differences"]["ffedit - published"]
    assert found["facts"] == 4
    assert found["times_as_fast"] == 2.0
    by_hand = [a["after"]["efficacy"] - b["after"]["efficacy"] for a, b in zip(one, other, strict=False)]
    assert found["efficacy"][0] == pytest.approx(sum(by_hand) / 4)


def test_every_variant_names_numbers_that_are_there_and_changes_something() -> None:
    configs = {
        name: repr((variant.get("method"), variant.get("spread", 1), ablation.config_of(variant)))
        for name, variant in ablation.VARIANTS.items()
    }
    assert len(set(configs.values())) == len(configs)
    with pytest.raises(FFEditError, match="gone is not a setting"):
        ablation.config_of({"gone": 1})


@pytest.mark.parametrize(("script", "words"), [(ablation, ["default"]), (site_quality, ["--layer", "1"])])
def test_key_statistics_are_of_the_text_that_a_single_edit_reads(
    script: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable, collect = zoo.shared("gpt2"), Mock(side_effect=FFEditError)  # no edit is to follow
    monkeypatch.setattr(ffedit, "load", lambda *_, **__: editable)
    monkeypatch.setattr(ffedit, "collect_stats", collect)
    CliRunner().invoke(
        script.main, ["run", "--models", str(tmp_path), "--model", "smollm2", "--out", str(tmp_path), *words]
    )
    assert collect.call_args.kwargs == {"corpus": text_for(editable, 1, 0)}


def test_a_comparison_goes_on_where_its_first_fact_cannot_be_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable, write = zoo.trained("gpt2", True), ffedit.edit

    def edit(editable: Editable, facts: list[ffedit.Fact], **options: Any) -> ffedit.Edit:
        if facts[0] is FACT:
            raise ffedit.EditError("no solution")
        return write(editable, facts, **options)

    monkeypatch.setattr(ffedit, "edit", edit)
    monkeypatch.setattr(ffedit, "load", lambda *_, **__: editable)
    monkeypatch.setattr(compare, "facts_in", lambda *_: [FACT, SECOND])
    words = ["--model", "gpt2", "--data", str(tmp_path), "--out", str(tmp_path), "--way", "ffedit", "--tokens", "600"]
    CliRunner().invoke(compare.main, [*words, "--set", "value.steps=2"], catch_exceptions=False)
    lines = read_journal(tmp_path / "ffedit.jsonl")[1:]
    assert [line["fact"] for line in lines] == [one_by_one.name_of(fact) for fact in (FACT, SECOND)]


def test_a_variant_is_judged_by_the_worst_model() -> None:
    one, other = results(6, 0), results(4, 1)
    found = {"default": {"smollm2": one, "gemma3-270m": other}, "- contexts": {"smollm2": other, "gemma3-270m": one}}
    lines = ablation.rendered(found).splitlines()
    differences = [line.split(" | ") for line in lines if line.startswith("| less the default")]
    assert [row[1:3] for row in differences] == [["smollm2", "4"], ["gemma3-270m", "4"]]
    at = lines[0].split(" | ").index("harmonic")
    worst = next(line.split(" | ")[at] for line in lines if line.startswith("| - contexts, worst of 2"))
    assert float(worst) == pytest.approx(min(float(row[at].split()[0]) for row in differences), abs=6e-3)


def test_facts_that_stand_in_a_journal_are_done(tmp_path: Path) -> None:
    Journal(path := tmp_path / "run.jsonl", {"layer": 1}).add(*results(2, 0))
    assert one_by_one.facts_done(Journal(path, {"layer": 1})) == {"0", "1"}
