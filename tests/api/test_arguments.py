"""What a caller may give: facts as dicts, one layer as a number; and one line for what is of the wrong type."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import zoo
from making import FACT, SECOND, made
from writing import quick

import ffedit
from ffedit import Edit, Editable, EditConfig, EditError, FactError, ModelError, PromptConfig, ValueConfig
from ffedit.editor.config import KeyConfig
from ffedit.editor.methods.finetune import BoundedFineTuneConfig, FineTuneConfig
from ffedit.editor.methods.memit import MemitConfig
from ffedit.errors import brief

RECORD = {"subject": FACT.subject, "prompt": FACT.prompt, "target": "Rome", "previous": "Paris"}
CORPUS = ffedit.Corpus(tokens=256)


@pytest.fixture(scope="module")
def editable() -> Editable:
    return zoo.shared("llama")


@pytest.fixture(scope="module")
def edit(editable: Editable) -> Edit:
    return made(editable, {1: 1})


def test_facts_are_taken_as_dicts(editable: Editable) -> None:
    assert np.array_equal(ffedit.locate(editable, RECORD).effects, ffedit.locate(editable, FACT).effects)
    assert len(ffedit.locate_all(editable, RECORD, samples=1).traces) == 1
    assert ffedit.evaluate(editable, [RECORD, FACT]).before == ffedit.evaluate(editable, [FACT, FACT]).before
    written = ffedit.edit(editable, RECORD, "rome", layers=1, config=quick(), stats=CORPUS)
    assert written.facts == (FACT,) and written.layers == [1]


def test_one_layer_and_one_edit_need_no_list(editable: Editable, edit: Edit) -> None:
    assert list(ffedit.collect_stats(editable, layers=np.int64(1), corpus=CORPUS)) == [ffedit.Address(1)]
    trace = ffedit.locate(editable, FACT, samples=1, layers=1)
    assert np.isnan(trace.effects[0]).all() and not np.isnan(trace.effects[1]).any()
    with edit.applied(editable):
        later = ffedit.edit(editable, SECOND, "rome", layers=1, config=quick(), stats=CORPUS, preserve=edit)
    assert later.provenance["after"] == [edit.fingerprint()]


def test_torchs_own_device_and_dtype_are_taken_as_their_names_are() -> None:
    named, own = (
        ffedit.load("atlas", device=device, dtype=dtype)
        for device, dtype in (("cpu", "bfloat16"), (torch.device("cpu"), torch.bfloat16))
    )
    assert own.model.dtype == named.model.dtype == torch.bfloat16 and own.device == named.device
    with pytest.raises(ModelError, match="dtype 'int8' is not known; give auto, float32"):
        ffedit.load("atlas", dtype=torch.int8)
    with pytest.raises(ModelError, match="device 'meta' cannot hold weights"):
        ffedit.load("atlas", device=torch.device("meta"))


Call: TypeAlias = Callable[[Any, Any], object]
MODEL, EDIT = "load it first: editable = ffedit.load", "where an edit was expected"
WRONG: dict[tuple[type[Exception], str], list[Call]] = {
    (ModelError, "found 'atlas' (str) where a loaded model was expected"): [lambda m, e: ffedit.edit("atlas", FACT)],
    (ModelError, MODEL): [
        lambda m, e: ffedit.locate("atlas", FACT),
        lambda m, e: ffedit.evaluate("atlas", FACT),
        lambda m, e: ffedit.evaluate(m, FACT, edited="folder"),
        lambda m, e: ffedit.explain("atlas", FACT, e),
        lambda m, e: ffedit.collect_stats("atlas"),
        lambda m, e: ffedit.choose_layer("atlas"),
        lambda m, e: ffedit.combine("atlas", [e]),
        lambda m, e: ffedit.bench("atlas", FACT, "rome", "single", "out"),
        lambda m, e: ffedit.inspect_prompt("atlas", "a"),
        lambda m, e: ffedit.inspect_memory("atlas", "1.1"),
        lambda m, e: ffedit.inspect_edit("atlas", e),
        lambda m, e: e.apply_("atlas"),
        lambda m, e: e.undo_("atlas"),
        lambda m, e: e.applied("atlas").__enter__(),
    ],
    (ModelError, "a loaded model, or its name or folder"): [lambda m, e: ffedit.export(e, e, "out")],
    (ModelError, "a checkpoint's name or folder was expected"): [lambda m, e: ffedit.diff(m, "atlas")],
    (EditError, "found 3 (int) where the path of a text file was expected"): [
        lambda m, e: ffedit.evaluate(m, FACT, text=3),
    ],
    (FactError, "found 'Eiffel' (str) where one fact was expected"): [lambda m, e: ffedit.locate(m, "Eiffel")],
    (FactError, "where one fact was expected; locate_all takes several"): [lambda m, e: ffedit.locate(m, [FACT])],
    (FactError, "where a Fact or a dict of its fields was expected"): [
        lambda m, e: ffedit.evaluate(m, "facts.json"),
        lambda m, e: ffedit.explain(m, "facts.json", e),
        lambda m, e: ffedit.locate_all(m, [FACT, 3]),
        lambda m, e: ffedit.edit(m, None),
    ],
    (FactError, "unknown field promt; a fact's fields are subject, prompt, "): [
        lambda m, e: ffedit.edit(m, {"subject": "a", "promt": "{} b"})
    ],
    (FactError, "(did you mean prompt?)"): [lambda m, e: ffedit.locate(m, {"subject": "a", "promt": "{} b"})],
    (FactError, "kind 'stat' is not known; known are state, feed_forward, attention (did you mean state?)"): [
        lambda m, e: ffedit.locate(m, FACT, "stat")
    ],
    (EditError, "alphaedit, ft, ft-l (did you mean memit?)"): [lambda m, e: ffedit.edit(m, FACT, "memt")],
    (EditError, "where the number of a layer was expected"): [
        lambda m, e: ffedit.edit(m, FACT, layers="1"),
        lambda m, e: ffedit.edit(m, FACT, layers=True),
        lambda m, e: ffedit.edit(m, FACT, layers=torch.tensor(1)),
        lambda m, e: ffedit.collect_stats(m, layers=[1.0]),
    ],
    (EditError, "where an EditConfig was expected"): [
        lambda m, e: ffedit.edit(m, FACT, config={"seed": 1}),
        lambda m, e: ffedit.combine(m, [e], config={"seed": 1}),
        lambda m, e: ffedit.choose_layer(m, config={"seed": 1}),
        lambda m, e: ffedit.site_map(m, FACT, config={"seed": 1}),
    ],
    (EditError, "method 'memti' is not known"): [
        lambda m, e: ffedit.edit(m, FACT, layers=1, config=EditConfig(methods={"memti": MemitConfig()}))
    ],
    (EditError, "methods was expected to be a Mapping"): [lambda m, e: EditConfig(methods=5)],
    (EditError, "value was expected to be a ValueConfig"): [lambda m, e: EditConfig(value={"steps": 9})],
    (EditError, "where a text or its statistics were expected"): [
        lambda m, e: ffedit.edit(m, FACT, layers=1, stats="wiki.txt"),
        lambda m, e: ffedit.combine(m, [e], stats="wiki.txt"),
        lambda m, e: ffedit.site_map(m, FACT, stats="wiki.txt"),
    ],
    (EditError, "where a text was expected; give it as ffedit.Corpus('file.txt')"): [
        lambda m, e: ffedit.collect_stats(m, 0, corpus="file.txt"),
        lambda m, e: ffedit.inspect_memory(m, "1.1", corpus="file.txt"),
        lambda m, e: ffedit.choose_layer(m, stats={}),
    ],
    (EditError, "a whole number of at least 1 was expected"): [
        lambda m, e: ffedit.inspect_prompt(m, "a", top=0),
        lambda m, e: ffedit.inspect_memory(m, "1.1", top=1.5),
        *(lambda m, e, n=n: ffedit.Corpus(tokens=n) for n in (1e4, "100", 0)),
        *(lambda m, e, n=n: PromptConfig(context_tokens=[n]) for n in (5.5, "a", -50)),
    ],
    (EditError, "where the path of a text was expected"): [
        *(lambda m, e, text=text: ffedit.Corpus(text) for text in (5, "a\nb", "word " * 60))
    ],
    (EditError, "where a text was expected as an entry of prompts.essence_prompts"): [
        lambda m, e: PromptConfig(essence_prompts=[1])
    ],
    (EditError, "where a name was expected as an entry of key.without_names"): [
        lambda m, e: KeyConfig(without_names=[1])
    ],
    (EditError, "prompts.context_tokens is empty"): [lambda m, e: PromptConfig(context_tokens=[])],
    (EditError, "seed is 1180591620717411303424; a whole number below 4294967296 was expected"): [
        lambda m, e: EditConfig(seed=2**70),
        lambda m, e: ffedit.Corpus(seed=2**70),
    ],
    (FactError, "a whole number below 4294967296 was expected"): [lambda m, e: ffedit.locate(m, FACT, seed=2**70)],
    (EditError, "rate is -1; a number above 0 was expected"): [lambda m, e: FineTuneConfig(rate=-1)],
    (EditError, "rate is nan; a number above 0 was expected"): [lambda m, e: BoundedFineTuneConfig(rate=math.nan)],
    (EditError, "ft-l.bound is -0.05; a number above 0"): [lambda m, e: BoundedFineTuneConfig(bound=-0.05)],
    (EditError, "where a memory was expected; write L.I"): [lambda m, e: ffedit.inspect_memory(m, (0, 1))],
    (EditError, "where factors by memory were expected"): [lambda m, e: ffedit.inspect_prompt(m, "a", scaled=["1.1"])],
    (EditError, "where a factor of memory 1.1 was expected"): [
        lambda m, e: ffedit.inspect_prompt(m, "a", scaled={"1.1": "no"})
    ],
    (FactError, "where a prompt, some text, was expected"): [lambda m, e: ffedit.inspect_prompt(m, 3)],
    (FactError, "samples is 2.0; a whole number of at least 1"): [lambda m, e: ffedit.locate(m, FACT, samples=2.0)],
    (FactError, "window is 2.0; a whole number of at least 1"): [lambda m, e: ffedit.locate(m, FACT, window=2.0)],
    (FactError, "seed is -1; a whole number of at least 0"): [lambda m, e: ffedit.locate(m, FACT, seed=-1)],
    (FactError, "where a corruption was expected"): [lambda m, e: ffedit.locate(m, FACT, corruption=None)],
    (EditError, "value.steps is '3'; a whole number was expected"): [lambda m, e: ValueConfig(steps="3")],
    (EditError, "value.steps is True; a whole number was expected"): [lambda m, e: ValueConfig(steps=True)],
    (EditError, "value.target_loss is nan; 0 or more was expected"): [lambda m, e: ValueConfig(target_loss=math.nan)],
    (EditError, "memit.ridge is inf; a finite number was expected"): [lambda m, e: MemitConfig(ridge=math.inf)],
    (EditError, "value.penalty_decay is 1e+200; at most 1 was expected"): [
        lambda m, e: ValueConfig(penalty_decay=1e200)
    ],
    (EditError, "prompts.essence_prompts is '{} is a'; a list was expected"): [
        lambda m, e: PromptConfig(essence_prompts="{} is a")
    ],
    (EditError, EDIT): [
        lambda m, e: ffedit.evaluate(m, FACT, "rome.edit"),
        lambda m, e: ffedit.explain(m, FACT, "rome.edit"),
        lambda m, e: ffedit.export(e, m, "out"),
        lambda m, e: ffedit.inspect_edit(m, FACT),
        lambda m, e: ffedit.combine(m, [e, FACT]),
        lambda m, e: ffedit.edit(m, FACT, preserve="rome.edit"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "words", "call"), [(*refusal, call) for refusal, calls in WRONG.items() for call in calls]
)
def test_a_wrong_argument_is_one_line(
    kind: type[Exception],
    words: str,
    call: Call,
    editable: Editable,
    edit: Edit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as refused:
        call(editable, edit)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_report_in_place_of_an_edit_is_one_line(editable: Editable) -> None:
    with pytest.raises(EditError, match=r"^found Report on 1 fact .* \(Report\) where an edit was expected"):
        ffedit.evaluate(editable, FACT, ffedit.evaluate(editable, FACT))


def test_a_misspelled_name_of_the_module_is_answered_with_the_right_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'evalute' \(did you mean evaluate\?\)"):
        _ = ffedit.evalute
    with pytest.raises(AttributeError, match=r"no attribute 'foo'$"):
        _ = ffedit.foo


def test_long_words_are_cut_and_not_left_out() -> None:
    assert brief(ValueError("x" * 300)) == "x" * 198 + " …"
    assert brief(ValueError("a\n b")) == "a b" and brief(ValueError()) == "ValueError"
    with pytest.raises(EditError, match=r"found '/folder/x+ … \(str\) where a path"):
        EditError.require("/folder/" + "x" * 100, Path, "a path was expected")
    with pytest.raises(EditError, match=r"top is '5+ …; a whole"):
        EditError.whole("top", "5" * 100, 1)
