"""What post-processing of Δ promises: entries kept, directions left alone, singular values bounded; and its table."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import lifelong
import pytest
import torch
from benching import facts, run
from click.testing import CliRunner
from ffedit_lifelong.prune import restrained
from ffedit_lifelong.rect import RECT, kept
from ffedit_lifelong.revive import REVIVE, filtered

import ffedit
from ffedit.algebra.low_rank import LowRank

EVALUATIONS = Path(__file__).parents[2] / "evaluations"

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def test_rect_keeps_the_entries_that_change_most_relative_to_the_weights() -> None:
    W, delta = drawn(8, 20), drawn(8, 20)
    result = kept(W, delta, 0.25)
    chosen = result != 0
    assert int(chosen.sum()) == 40 and torch.equal(result[chosen], delta[chosen])
    assert (delta / W).abs()[chosen].min() > (delta / W).abs()[~chosen].max()


def test_revive_neither_reads_nor_writes_the_dominant_directions() -> None:
    W, delta = drawn(8, 20), LowRank(drawn(8, 3), drawn(3, 20))
    U, S, Vt = torch.linalg.svd(W, full_matrices=False)
    energy = float(S[:2].square().sum() / S.square().sum()) - 1e-9  # two directions hold it
    result = filtered(delta, W, energy)
    assert float((U[:, :2].T @ result.dense).abs().max()) < 1e-12
    assert float((result.dense @ Vt[:2].T).abs().max()) < 1e-12
    inside = U[:, 2:] @ U[:, 2:].T @ delta.dense @ (torch.eye(20) - Vt[:2].T @ Vt[:2])
    assert torch.allclose(result.dense, inside) and result.rank == 3
    assert torch.equal(filtered(delta, W, 0.0).dense, delta.dense)


def test_prune_bounds_singular_values_and_leaves_small_ones() -> None:
    W, change = drawn(8, 20), drawn(8, 20)
    largest = float(torch.linalg.svdvals(W)[0])
    assert torch.allclose(restrained(W, 0.1 * change), 0.1 * change)
    S, after = torch.linalg.svdvals(10 * change), torch.linalg.svdvals(restrained(W, 10 * change, alpha=2.0))
    large = largest < S
    assert int(large.sum()) > 3
    assert torch.allclose(after[large], largest + (S[large] / largest).log() / log(2.0))
    assert torch.allclose(after[~large], S[~large])


def test_rect_and_revive_keep_earlier_edits_as_alphaedit_does() -> None:
    assert RECT.preserves and REVIVE.preserves


def test_the_steps_of_runs_stand_in_one_table_with_prune_at_their_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable, folder = ffedit.load(str(model)), tmp_path / "run"
    curve = run(editable, folder, "sequential:2", methods=["alphaedit"]).methods["alphaedit"].curve
    edits = lifelong.written_edits(folder / "edits" / "alphaedit")
    assert [len(edit.facts) for edit in edits] == [2, 2, 1]

    with monkeypatch.context() as patch:
        patch.setattr(lifelong, "restrained", lambda W, change, alpha: change)
        untouched, _ = lifelong.pruned(editable, edits, 1.2)
    ((at, total),) = untouched.updates.items()
    assert torch.allclose(total.dense, sum(edit.updates[at].dense for edit in edits)) and len(untouched.facts) == 5
    small, about = lifelong.pruned(editable, edits, 1e300)  # so large that no singular value exceeds those of W
    largest = torch.linalg.matrix_norm(editable.memories[at].value.double(), 2)
    assert about[str(at)]["restrained"] == int((torch.linalg.svdvals(total.dense) > largest).sum()) > 0
    assert torch.linalg.matrix_norm(small.updates[at].dense, 2) == pytest.approx(float(largest), rel=1e-2)

    words = [str(folder), str(folder / "report.json"), "--prune", str(folder / "edits" / "alphaedit"), "--out"]
    result = CliRunner().invoke(lifelong.main, [*words, str(tmp_path / "table")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [(row["method"], row["edited"]) for row in rows[:4]] == [
        ("before", 0),
        *(("alphaedit", n) for n in (2, 4, 5)),
    ]
    alone = CliRunner().invoke(lifelong.main, [words[1], "--out", str(tmp_path / "alone")])
    assert alone.exit_code == 0, alone.output
    assert json.loads((tmp_path / "alone.json").read_text())["rows"] == rows[:4], "a folder and its report say the same"
    (folder / "report.json").rename(tmp_path / "report.json")
    running = lifelong.rows_of_run(folder)
    assert running == [{**row, "intervals": {}} for row in rows[:4]], "without a report, of the journal"
    (tmp_path / "report.json").rename(folder / "report.json")
    again = CliRunner().invoke(
        lifelong.main, [words[0], str(tmp_path / "table.json"), "--out", str(tmp_path / "again")]
    )
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again.json").read_text())["rows"] == rows, "and each method is told of once"
    for row, step in zip(rows[1:4], curve, strict=True):
        assert [row[name] for name in lifelong.SHOWN] == [getattr(step.scores, name) for name in lifelong.SHOWN]
    assert [(row["method"], row["edited"], row["facts"]) for row in rows[4:]] == [("alphaedit, PRUNE α = 1.2", 5, 5)]
    assert len((tmp_path / "table.md").read_text().splitlines()) == 6 + 2 + len(rows)


def test_a_step_that_is_not_scored_yet_and_an_edit_that_was_not_written_are_left_out(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(ffedit.load(str(model)), folder, "sequential:2", methods=["alphaedit"])
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    steps = [(line["when"], line["chunk"]) for line in map(json.loads, lines)]
    path.write_text("".join(lines[: steps.index(("after", 2)) + 1]))
    (folder / "report.json").unlink()  # it comes with the last step
    assert [row["edited"] for row in lifelong.rows_of_run(folder)] == [0, 2, 4]
    assert len(lifelong.written_edits(folder / "edits" / "alphaedit")) == 2


def test_runs_of_other_facts_are_refused(model: Path, tmp_path: Path) -> None:
    for name, count in (("one", 2), ("other", 3)):
        run(ffedit.load(str(model)), tmp_path / name, "sequential:2", facts(count), ["ft"])
    words = [str(tmp_path / "one"), str(tmp_path / "other"), "--out", str(tmp_path / "table")]
    result = CliRunner().invoke(lifelong.main, words)
    assert result.exit_code == 1 and "runs of other models, facts" in result.output
