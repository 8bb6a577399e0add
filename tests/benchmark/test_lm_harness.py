"""lm-evaluation-harness before and after an edit, on a task and with data written here."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from making import made
from shell import save_model, shell
from shown import shown
from writing import STRONG, write

import ffedit
from ffedit import Edit, EditError
from ffedit.benchmark.lm_harness import Harness, Measured
from ffedit.cli.evaluate import UNLIKE
from ffedit.display.terminal.lm_harness import figures_table, write_report
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint

needed = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: ffedit[harness]")
ROWS = [("Eiffel tower", 0), ("old tower", 1), ("Nile river", 2), ("red river", 1)]
CHOICES = ["Paris", "Rome", "Egypt"]
TASK = """
task: where
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one task: which place follows "the … is located in"?"""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (folder := tmp_path / "tasks").mkdir()
    rows = [{"question": f"the {s} is located in", "choices": CHOICES, "gold": gold} for s, gold in ROWS]
    (data := folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "where.yaml").write_text(TASK.format(data=data))
    return folder


def accuracy(editable: Editable) -> float:
    """The task by hand: share of questions after which the right choice is the likeliest."""
    right = 0
    for subject, gold in ROWS:
        ids = torch.tensor([editable.tokenizer(f"the {subject} is located in")["input_ids"]])
        with torch.no_grad():
            logits = editable.model(input_ids=ids).logits[0, -1]
        words = [editable.tokenizer.convert_tokens_to_ids(choice) for choice in CHOICES]
        right += int(logits[words].argmax()) == gold
    return right / len(ROWS)


@needed
def test_an_edit_moves_the_figures_as_it_moves_the_model(tasks: Path) -> None:
    editable = zoo.trained("gpt2", True)
    edit, before = write(editable, **STRONG), fingerprint(editable)
    measured = Harness(["where"], tasks, quiet=True).compare(editable, edit)
    assert fingerprint(editable) == before and editable.tokenizer.pad_token == "</s>"
    (figure,) = measured.figures
    with edit.applied(editable):
        after = accuracy(editable)
    assert (figure.task, figure.metric, figure.examples) == ("where", "acc", len(ROWS))
    assert figure.before == pytest.approx(accuracy(editable)) and figure.after == pytest.approx(after)
    assert figure.before != figure.after and figure.change == figure.after - figure.before
    assert figure.higher_is_better and figure.error_before is not None
    json.dumps(measured.to_dict(), allow_nan=False)


@needed
def test_a_path_names_a_task_a_limit_holds_and_an_offloaded_model_gives_the_same_figures(
    tasks: Path, tmp_path: Path
) -> None:
    folder = save_model(zoo.trained("gpt2", True), tmp_path / "model")
    harness = Harness([str(tasks / "where.yaml")], limit=3, quiet=True)
    whole, offloaded = (harness.measure(ffedit.load(folder, device_map=how)) for how in (None, {"": "disk"}))
    assert whole == offloaded and whole["n-samples"]["where"]["effective"] == 3


@needed
@pytest.mark.parametrize("chat", [False, True])
def test_in_a_chat_every_prompt_is_the_users_turn(chat: bool, tasks: Path) -> None:
    editable = zoo.trained("gpt2", True)
    editable.tokenizer.chat_template = "{% for m in messages %}Madrid {{ m['content'] }} {% endfor %}"
    editable.chat = chat
    seen: list[list[int]] = []
    editable.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend((args[0] if args else kwargs["input_ids"]).tolist()), with_kwargs=True
    )
    Harness(["where"], tasks, quiet=True).measure(editable)
    turn = editable.tokenizer.convert_tokens_to_ids("Madrid")
    assert seen and all((turn in row) == chat for row in seen)


@needed
@pytest.mark.usefixtures("verified_here")
def test_the_command_compares_an_edit_and_the_checkpoint_that_holds_it(
    tasks: Path, tmp_path: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(zoo.trained("gpt2", True), tmp_path / "model")
    editable = ffedit.load(base)
    edit = made(editable, {1: 2}, size=3.0)
    edit.save(empty / "edit")
    ffedit.export(base, edit, empty / "out")
    how = ["--tasks", "where", "--include-path", tasks]
    ran = shell(capsys, "harness", "edit", *how, "--out", "report")
    assert ran.code == 0, ran.err
    assert "where" in ran.out and "acc" in ran.out and "loglikelihood" not in ran.out
    found = json.loads(Path("report/report.json").read_text())
    assert "| where | acc |" in Path("report/report.md").read_text()
    ran = shell(capsys, "harness", "out", *how, "--json", "-")
    assert ran.code == 0 and json.loads(ran.out)["figures"] == found["figures"]
    ran = shell(capsys, "harness", base, *how)
    assert (ran.code, ran.err.count("\n")) == (1, 1) and "give the base with --model" in ran.err
    assert shell(capsys, "harness", base, *how, "--model", base, "--quiet").code == 0


@needed
def test_a_checkpoint_that_reads_text_in_other_tokens_is_refused_before_anything_is_asked(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(zoo.trained("gpt2", True), tmp_path / "model")
    other = save_model(zoo.trained("gpt2"), tmp_path / "other")
    monkeypatch.setattr(Harness, "measure", lambda *_: pytest.fail("a model was asked"))
    ran = shell(capsys, "harness", other, "--tasks", "where", "--include-path", tasks, "--model", base, "--quiet")
    assert (ran.code, ran.err.count("\n")) == (1, 1) and "its tokenizer differs from that of" in ran.err


@needed
@pytest.mark.parametrize(
    ("wanted", "text", "said"),
    [
        ("elsewhere", "", "the harness has no task 'elsewhere'"),
        ("elsewhere.yaml", "", "elsewhere.yaml: no such file; a task file of the harness"),
        ("where", "{", "the task where cannot be read: "),
        ("where", None, "the task where cannot be read: "),
    ],
)
def test_a_task_that_cannot_be_run_is_told_in_one_line(
    tasks: Path, wanted: str, text: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The harness's own tasks take long to list.
    manager = find_manager()
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **how: manager(**{**how, "include_defaults": False}))
    if text is None:
        (tasks / "rows.jsonl").unlink()
    elif text:
        (tasks / "rows.jsonl").write_text(text)
    with pytest.raises(EditError, match=said) as error:
        Harness([wanted], tasks, quiet=True)
    assert "\n" not in str(error.value)


def find_manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager


def test_what_is_missing_is_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EditError, match="no such folder; one with task files"):
        Harness(["where"], tmp_path / "nowhere")
    with pytest.raises(EditError, match="no task was named"):
        Harness([])
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(EditError, match="lm-eval is not installed; pip install"):
        Harness(["where"])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(EditError, match="runs in one process"):
        Harness(["where"])


def reported(**scores: Any) -> dict[str, Any]:
    """What the harness reports of two tasks."""
    results = {"quiz": {"alias": "quiz", **scores}, "text": {"word_perplexity,none": 20.0 + scores["acc,none"]}}
    better = {"quiz": {"acc": True}, "text": {"word_perplexity": False}}
    return {"results": results, "higher_is_better": better, "n-samples": {"quiz": {"effective": 5}}, "lm_eval": "0"}


def test_figures_are_told_with_what_got_worse(tmp_path: Path) -> None:
    before = reported(**{"acc,none": 0.75, "acc_stderr,none": 0.25, "exact_match,strict": 0.5})
    after = reported(**{"acc,none": 0.25, "acc_stderr,none": "N/A", "exact_match,strict": 0.5})
    after["results"]["text"]["bleu,none"] = math.nan
    measured = Measured("base", "edit", before, after, 5)
    assert [(f.task, f.metric, f.change, f.error_after) for f in measured.figures] == [
        ("quiz", "acc", -0.5, None),
        ("quiz", "exact_match, strict", 0.0, None),
        ("text", "word_perplexity", -0.5, None),
    ]
    told = shown(figures_table(measured))
    assert "-0.5000 !" in told and told.count(" !") == 1 + told.count("!: worse"), told
    write_report(measured, tmp_path / "report")
    assert "at most 5 examples" in (tmp_path / "report" / "report.md").read_text()
    json.loads((tmp_path / "report" / "report.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(EditError, match="exists already"):
        write_report(measured, tmp_path / "report")


class Unasked:
    """In the place of `Harness`: it asks no model and needs no lm-eval."""

    limit = None

    def __init__(self, *_: Any, **how: Any) -> None: ...

    def measure(self, editable: Editable) -> dict[str, Any]:
        return reported(**{"acc,none": 0.5})

    def compare(self, editable: Editable, edit: Edit) -> Measured:
        return Measured("base", "edit", self.measure(editable), self.measure(editable))


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("in_chat", [True, False])
def test_prompts_that_are_not_asked_as_the_edit_was_made_are_told(
    in_chat: bool, tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ffedit.benchmark.lm_harness.Harness", Unasked)
    monkeypatch.setenv("COLUMNS", "200")
    trained = zoo.trained("gpt2", True)
    trained.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    base = save_model(trained, tmp_path / "model")
    edit = made(ffedit.load(base), {1: 2})
    edit = replace(edit, provenance={**edit.provenance, "chat": in_chat})
    edit.save(empty / "edit")
    ffedit.export(base, edit, empty / "out")
    for edited in (["edit"], ["out", "--model", base]):  # an exported checkpoint holds no path of its base
        plain = shell(capsys, "harness", *edited, "--tasks", "where")
        assert plain.code == 0 and plain.out.count(UNLIKE.plain) == int(in_chat), plain
        asked = shell(capsys, "harness", *edited, "--tasks", "where", "--chat")
        assert asked.code == 0 and UNLIKE.plain not in asked.out, asked
