"""Encoders, and halves of encoder–decoders, looked into by command; and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import halves
import pytest
import transformers as hf
import zoo
from shell import shell

import ffedit
from ffedit import Corpus, ModelError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (path := tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in halves.texts()))
    return Corpus(path)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    halves.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "half"), [("bert", None), ("t5", "encoder"), ("bart", "decoder"), ("marian", "encoder")]
)
def test_a_checkpoint_is_looked_into(
    family: str, half: str | None, corpus: Corpus, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(halves.model(family), empty / "model")
    which = [] if half is None else ["--stack", half]
    common = [*which, "--model", "model", "--corpus", str(corpus.path)]
    ran = shell(capsys, "inspect", "memory", "1.7", *common, "--top", "3", "--json", "-")
    assert (ran.code, ran.err) == (0, ""), ran.err
    view, expected = (
        json.loads(ran.out),
        ffedit.inspect_memory(halves.stack_of(family, half or "encoder"), "1.7", corpus=corpus, top=3),
    )
    assert [one["coefficient"] for one in view["triggers"]] == [one.coefficient for one in expected.triggers]
    assert view["stack"] == (half or "encoder")


def test_a_decoder_is_its_own_stack(model: Path, corpus: Corpus) -> None:
    (stack,) = ffedit.load_stacks(model)
    assert stack.causal and stack.name == str(model)
    view = ffedit.inspect_memory(stack, "1.7", corpus=corpus, top=3)
    assert view == ffedit.inspect_memory(ffedit.load(model), "1.7", corpus=corpus, top=3) and view.note is None
    assert ffedit.inspect_memory(stack, "1.7", corpus=Corpus(tokens=60), top=2).corpus.startswith("text sampled")


Refused = Callable[..., str]


@pytest.fixture
def refused(empty: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> Refused:
    def ask(*words: str) -> str:
        ran = shell(capsys, "inspect", *words)
        assert ran.code == 1 and len(ran.err.splitlines()) == 1, ran.err
        return ran.err

    return ask


def test_what_cannot_be_looked_into_leaves_one_line(refused: Refused, empty: Path, corpus: Corpus) -> None:
    command, text = ("memory", "0.1"), ("--corpus", str(corpus.path))
    for family in ("bert", "t5"):
        saved(halves.model(family), empty / family)
    saved(hf.BertModel(halves.model("bert").config), empty / "bare")
    saved(zoo.model("gpt2"), empty / "gpt2")
    for model, words, told in (
        ("t5", (), "t5 has an encoder and a decoder; say which one with --stack"),
        ("bert", ("--stack", "decoder"), "bert has an encoder and no other stack; leave --stack decoder out"),
        ("gpt2", ("--stack", "encoder"), "gpt2 has a decoder and no other stack"),
        ("bare", (), "a masked language model was expected"),
        ("nothing", (), "no such folder"),
    ):
        assert told in refused(*command, "--model", model, *words, *text)
    assert "samples no text; give a text file with --corpus" in refused(*command, "--model", "bert")
    (empty / "one.jsonl").write_text('{"text": "Rome"}\n')
    assert "fewer than two tokens" in refused(*command, "--model", "bert", "--corpus", "one.jsonl")


def test_a_stack_without_a_head_is_refused_in_one_line(corpus: Corpus) -> None:
    (stack,) = ffedit.load_stacks((hf.BertModel(halves.model("bert").config), halves.tokenizer()))
    with pytest.raises(ModelError, match="BertModel has no unembedding") as caught:
        ffedit.inspect_memory(stack, "0.1", corpus=corpus)
    assert "\n" not in str(caught.value)
