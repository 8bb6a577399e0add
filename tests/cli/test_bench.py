"""`ffedit bench` as a person sees it: what it refuses at once, and what its JSON holds."""

from __future__ import annotations

from pathlib import Path

from commands import Command, here, run
from shell import disk

__all__ = ["here", "run"]


def test_a_layer_that_nothing_comes_after_is_refused_before_the_run(run: Command, here: Path, model: Path) -> None:
    words = ["bench", "bare.json", "--model", model, "--corpus", model.parent / "corpus.txt", "--out", "b"]
    words += ["--no-full", "--layers", "2"]
    before = disk(here)
    for more in (["--methods", "ft,memit"], ["--methods", "rome", "--spread", "2"], ["--mode", "sequential"]):
        done = run(*words, *more)
        assert done.code == 1 and done.err.count("\n") == 1 and disk(here) == before
        assert "layer 2 is the last of" in done.err and "name a layer from 0 to 1" in done.err
    done = run(*words, "--methods", "ft", "--set", "value.steps=2", "--quiet")
    assert (done.code, done.err) == (0, ""), "fine-tuning changes the layer at the last token as well"
