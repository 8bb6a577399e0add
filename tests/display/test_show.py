"""An edit tells what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.filesize import decimal
from shell import Ran, shell

from ffedit import Address, Edit, Fact
from ffedit.algebra.low_rank import Dense, LowRank

SCORES = {"efficacy": 0.0, "specificity": 1.0, "drift": None}


def made(layers: tuple[int, ...] = (1,), facts: int = 1, dense: bool = False, **told: object) -> Edit:
    """An edit with everything that a method tells, each Δ of norm 6."""
    left, right = torch.zeros(8, 1).double(), torch.zeros(1, 12).double()
    left[0, 0], right[0, 0] = 2.0, 3.0
    update = LowRank(left, right)
    addresses = [Address(layer) for layer in layers]
    about: dict[str, object] = {
        "method": "memit",
        "model": "some/model",
        "base": "0123456789abcdef",
        "dtype": "bfloat16",
        "layers": list(layers),
        "norms": {str(at): 60.0 for at in addresses},
        "config": {"seed": 42, "prompts": {"context_tokens": [5, 10]}, "value": {"steps": 25}},
        "statistics": {
            str(at): {"corpus": "the model's own text", "tokens": 30_000, "fingerprint": "feedc0de"} for at in addresses
        },
        "solved": [{"contexts": ["Therefore,\n I", "Because"]}],
        "versions": {"ffedit": "9.9", "torch": "2.8"},
        **told,
    }
    return Edit(
        {at: Dense(update.dense) if dense else update for at in addresses},
        {},
        {},
        tuple(Fact(f"subject [b]{i}[/b]", "{} is in", "Rome", "Paris") for i in range(facts)),
        about,
    )


@pytest.fixture
def show(empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    monkeypatch.setenv("COLUMNS", "140")
    return lambda *words: shell(capsys, "show", *words)


def test_show_prints_every_part_of_an_edit(show: Callable[..., Ran]) -> None:
    edit = made((3, 4, 5), warnings=["the old object was not known"], after=["c0ffee"])
    edit = Edit(**{**vars(edit), "provenance": {**edit.provenance, "scores": {"before": SCORES, "after": SCORES}}})
    edit.save("e")
    done = show("e")
    assert done.code == 0 and done.err == ""
    size = sum(file.stat().st_size for file in Path("e").iterdir())
    for words in (
        edit.fingerprint(),
        "subject [b]0[/b] is in",
        "memit, layers 3-5, rank 1",
        decimal(size),
        "3: 6.00 (10.00% of ‖W‖)",
        "some/model",
        "0123456789abcdef",
        "bfloat16",
        "seed 42",
        "prompts.context_tokens 5/10",
        "3.corpus the model's own text, 3.tokens 30000, 3.fingerprint feedc0de",
        "ffedit 9.9",
        "c0ffee",
        "efficacy",
        "warning: the old object was not known",
    ):
        assert words in done.out, words
    assert "drift" not in done.out, "what was not measured is not told"
    assert "Because" not in done.out and "solved" not in done.out, "the numbers of each value are in --json"
    rows = [line.split() for line in done.out.splitlines() if line.startswith("specificity")]
    assert rows == [["specificity", "1.00", "1.00"]]


def test_of_many_facts_the_first_are_shown(show: Callable[..., Ran]) -> None:
    made(facts=23).save("e")
    done = show("e")
    assert "subject [b]19[/b] is in" in done.out and "[b]20[/b] is in" not in done.out and "… and 3 more" in done.out
    told = json.loads(show("e", "--json", "-").out)["edits"]
    assert len(told) == 1 and len(told[0]["facts"]) == 23
    assert told[0]["norm"] == {"1": 6.0} and told[0]["norm_ratio"] == {"1": pytest.approx(0.1)}
    assert told[0]["provenance"]["config"]["seed"] == 42 and told[0]["bytes"] > 1000 and told[0]["layers"] == [1]


def test_little_is_told_of_an_edit_that_knows_little(show: Callable[..., Ran]) -> None:
    edit = made(dense=True)
    Edit(edit.updates, {}, {}, edit.facts, {"base": "0" * 16}).save("e")
    done = show("e")
    assert done.code == 0 and "unknown, layer 1, rank 8" in done.out and "1: 6.00" in done.out
    assert not any(word in done.out for word in ("‖W‖", "config", "statistics", "contexts", "score", "warning"))


def test_without_the_norms_of_the_weights_the_largest_ratio_is_shown(show: Callable[..., Ran]) -> None:
    made(norms={}, norm_ratio=0.025).save("e")
    assert "0.025" in show("e").out


def test_a_sum_tells_its_parts(show: Callable[..., Ran]) -> None:
    a = made((1,))
    parts = [
        {"fingerprint": f"{n}" * 16, "method": method, "layers": [1]} for n, method in enumerate(("memit", "rome"))
    ]
    a.noted(method="sum", parts=parts).save("e")
    done = show("e")
    assert "sum, layer 1, rank 1" in done.out
    assert f"{'0' * 16}: memit, layers 1" in done.out and f"{'1' * 16}: rome, layers 1" in done.out


def test_of_a_checkpoint_its_edits_are_shown_in_order(show: Callable[..., Ran]) -> None:
    edits = {f"ffedit_edits/{i:03}": made((i,)) for i in range(2)}
    for name, edit in edits.items():
        edit.save(Path("model") / name)
    out = show("model").out
    places = [out.index(f"model/{name}") for name in edits]
    assert places == sorted(places)
    told = json.loads(show("model", "--json", "-").out)["edits"]
    found = [edit.fingerprint() for edit in edits.values()]
    assert [one["fingerprint"] for one in told] == found and all(fingerprint in out for fingerprint in found)
