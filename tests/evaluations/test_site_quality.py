"""What the study of sites concludes from its journals: correlations of the right sign, and facts that are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import site_quality
import zoo
from one_by_one import FOUR
from writing import CORPUS, quick

import ffedit
from ffedit import Fact
from ffedit.files.resuming import Journal

LAYERS, MODEL = (1, 2, 3, 4), site_quality.Model("", (1, 2, 3, 4), 3, 8)


def journal(path: Path, good: str) -> Path:
    """Three facts at four layers and two tokens; quality falls with `good`, "leak", or rises with "effect"."""
    lines, generator = Journal(path, {"model": path.stem}), np.random.default_rng(0)
    for fact in range(3):
        for token in (-1, -2):
            for layer in LAYERS:
                effect, leak = (float(value) for value in generator.uniform(0.1, 0.9, 2))
                quality = effect if good == "effect" else 1 - leak
                lines.add(
                    {
                        **{"fact": f"fact {fact}", "subject": f"subject {fact}", "layer": layer, "token": token},
                        **{"last": token == -1, "peak": token == -2, "effect": effect, "total": 1.0, "sites": 8},
                        **{"reach": 1.0, "reach_least": 1.0, "leak": leak, "leak_high": leak, "leak_look_alikes": leak},
                        "seconds": 1.0,
                        "after": dict.fromkeys(FOUR, quality) | {"same_subject": None if fact == 1 else quality},
                    }
                )
    return path


@pytest.mark.parametrize(("good", "told"), [("leak", "little leak to look-alikes"), ("effect", "effect")])
def test_what_decides_is_found_and_what_is_constant_is_a_dash(tmp_path: Path, good: str, told: str) -> None:
    rows = site_quality.rows_of(journal(tmp_path / "m.jsonl", good), MODEL)
    assert len(rows) == 24 and rows[0]["quarter"] == -1 and rows[1]["quarter"] == 0
    weights = site_quality.fitted(rows)
    found = site_quality.predictors(weights)
    for of in ("mean", "harmonic", "generation"):
        rho = site_quality.per_fact(rows, found[told], site_quality.quality(of))
        assert rho is not None and (rho.mean, rho.low, rho.high) == pytest.approx((1.0, 1.0, 1.0))
    assert site_quality.per_fact(rows, found["reach"], site_quality.quality("mean")) is None
    pooled = site_quality.pooled(rows, found[told], site_quality.quality("mean"))
    assert pooled is not None and pooled.mean == pytest.approx(1.0)
    share, _, log_leak = weights
    assert (share > 0.9 and abs(log_leak) < 0.1) if good == "effect" else (log_leak < -0.2 and abs(share) < 0.1)
    best = max(site_quality.rate_mean([row], "generation") for row in rows if row["fact"] == "fact 0")
    (row,) = [max((row for row in rows if row["fact"] == "fact 0"), key=found[told])]
    assert row["quality"]["mean"] == pytest.approx(best)


def test_the_report_names_what_was_fitted_and_where_it_was_tested(tmp_path: Path) -> None:
    found = {name: site_quality.rows_of(journal(tmp_path / f"{name}.jsonl", "leak"), MODEL) for name in ("a", "b")}
    text = "\n".join(site_quality.tables(found, site_quality.fitted(found["a"])))
    assert text.startswith("Fitted on a: ") and text.count("fitted (in sample)") == 2
    assert "**a, all sites**: 24 edits of 3 facts, 3 subjects." in text
    assert "**b, the subject's last token**: 12 edits of 3 facts, 3 subjects." in text
    assert "| little leak to look-alikes | +1.00 [+1.00, +1.00] | +1.00 [+1.00, +1.00] | +1.00 [+1.00, +1.00] |" in text
    assert "| reach | - | - | - |" in text
    assert "**a**, the same less layer 2, nearest to a quarter of the depth; paired by fact." in text
    (rule,) = {line for line in text.splitlines() if line.startswith("| 2 | +0.00 [")}
    assert rule.endswith("| +0.00 [+0.00, +0.00] |"), "a layer differs by nothing from itself"


def test_a_fact_that_is_not_done_at_all_of_its_sites_is_left_out(tmp_path: Path) -> None:
    path = journal(tmp_path / "m.jsonl", "leak")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    rows = site_quality.rows_of(path, MODEL)
    assert len(rows) == 16 and {row["fact"] for row in rows} == {"fact 0", "fact 1"}


def test_a_fact_is_edited_at_each_site_and_resumed_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("look_alikes", "site_map"):
        monkeypatch.setattr(f"ffedit.layer_choice.{module}.measured_names", lambda: ("Rome", "Nile river"))
    monkeypatch.setattr("ffedit.editor.name_keys.names", lambda: ("Rome", "Nile river"))
    editable = zoo.trained("gpt2", True)
    fact = Fact("Eiffel tower", "the {} is located in", "Rome", "Paris", neighbors=["the Nile river is located in"])
    stats, before = ffedit.collect_stats(editable, [0, 1], corpus=CORPUS), zoo.snapshot(editable)
    path, settings = tmp_path / "m.jsonl", {"model": "m"}
    site_quality.edit_at_sites(editable, fact, (0, 1), quick(), stats, Journal(path, settings))
    lines = Journal(path, settings).lines
    assert {(line["layer"], line["token"]) for line in lines} >= {(0, -1), (1, -1)}
    assert all(line["sites"] == len(lines) for line in lines) and zoo.unchanged(editable, before)
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:-1]))
    site_quality.edit_at_sites(editable, fact, (0, 1), quick(), stats, Journal(path, settings))
    again = Journal(path, settings).lines
    assert len(again) == len(lines)
    assert json.dumps(_plain(again[-1])) == json.dumps(_plain(lines[-1])), "the missing line alone, and the same"


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if "seconds" not in name}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        *(([1, 2, 3], [10, 20, 99], 1), ([1, 2, 3], [3, 2, -9], -1), ([1, 2, 3, 4], [1, 3, 2, 4], 0.8)),
        *(([1, 1, 2, 3], [1, 2, 3, 4], 0.9**0.5), ([5, 5, 5], [1, 2, 3], None), ([1, 2], [0, 0], None)),
    ],
)
def test_rank_correlations_by_hand(first: list[float], second: list[float], expected: float | None) -> None:
    found = site_quality.rank_correlation(first, second)
    assert found is None if expected is None else found == pytest.approx(expected)
