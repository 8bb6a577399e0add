"""A benchmark that was interrupted goes on to the same figures; a folder belongs to one run and one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from benching import facts, lines, run, same, timeless
from shell import disk, process, shell
from writing import quick

import ffedit
from ffedit import Edit, EditError, ModelError
from ffedit.benchmark import editing
from ffedit.benchmark.folder import Journal
from ffedit.benchmark.task import Task
from ffedit.evaluator import Evaluation
from ffedit.files.placing import claimed
from ffedit.model.editable import Editable
from ffedit.progress import Progress


@pytest.fixture
def editable() -> Editable:
    return zoo.trained("gpt2", True)


def stopping(after: int) -> Progress:
    """Interrupts the work when the progress callback is called for the n-th time."""
    calls = iter(range(after))

    def stop(*stage: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return stop


def test_an_interrupted_run_ends_with_the_same_figures(editable: Editable, tmp_path: Path) -> None:
    """One fact after another; `test_killed` compares the bits of the other modes."""
    before, methods = zoo.snapshot(editable), ("memit", "alphaedit", "ft")
    calls: list[str] = []
    whole = run(editable, tmp_path / "whole", methods=methods, progress=lambda *stage: calls.append(stage[0]))
    assert len(calls) > 40
    stops = 0
    for after in (3, len(calls) // 3, len(calls) // 4, len(calls) // 4):
        with pytest.raises(KeyboardInterrupt):
            run(editable, tmp_path / "out", methods=methods, progress=stopping(after))
        assert zoo.unchanged(editable, before) and not editable.history.edits
        stops += bool(lines(tmp_path / "out")) if (tmp_path / "out" / "results.jsonl").exists() else 0
    assert stops >= 2, "nothing was there to go on from"
    kept, told = lines(tmp_path / "out"), list[tuple[str, int, int]]()
    resumed = run(editable, tmp_path / "out", methods=methods, progress=lambda *stage: told.append(stage))
    assert [done for stage, done, total in told if (stage, total) == ("ft", 5)][-1] == 5, "with what was there before"
    assert lines(tmp_path / "out")[: len(kept)] == kept, "what was measured is not measured again"
    assert timeless(resumed) == timeless(whole)
    assert timeless(json.loads((tmp_path / "out" / "report.json").read_text())) == timeless(whole)


@pytest.mark.parametrize("mode", ["single", "sequential"])
def test_a_half_written_last_line_is_measured_again(editable: Editable, tmp_path: Path, mode: str) -> None:
    whole = run(editable, tmp_path / "out", mode)
    path = tmp_path / "out" / "results.jsonl"
    first = path.read_bytes()
    for cut in (40, len(first.splitlines()[-1]) + 60):
        path.write_bytes(first[:-cut])
        assert timeless(run(editable, tmp_path / "out", mode)) == timeless(whole)
        again = [json.loads(line) for line in path.read_text().splitlines()]
        times = {"seconds": 0, "crc32": ""}
        assert [x | times for x in again] == [x | times for x in map(json.loads, first.splitlines())]
    path.write_bytes(first.replace(b'{"method"', b'{"meth', 1))
    with pytest.raises(EditError, match="line 1: damaged"):
        run(editable, tmp_path / "out", mode)


def test_a_sequence_whose_measurements_are_lost_begins_anew(editable: Editable, tmp_path: Path) -> None:
    whole = run(editable, tmp_path / "out", "sequential")
    path = tmp_path / "out" / "results.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"ft"' not in line))
    assert timeless(run(editable, tmp_path / "out", "sequential")) == timeless(whole)


def test_a_failed_edit_is_no_earlier_edit_of_a_resumed_sequence(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alphaedit` holds what earlier edits stored: one that was computed but not written is none of them."""
    some, checked = facts(5), editing.check_finite

    def failing(edit: Edit) -> Edit:
        if edit.facts[0] == some[2]:
            raise EditError("no solution")
        return checked(edit)

    monkeypatch.setattr(editing, "check_finite", failing)
    calls: list[str] = []
    whole = run(editable, tmp_path / "whole", "sequential", some, ["alphaedit"], progress=lambda *s: calls.append(s[0]))
    last = max(i for i, call in enumerate(calls) if call == "measuring")
    with pytest.raises(KeyboardInterrupt):
        run(editable, tmp_path / "out", "sequential", some, ["alphaedit"], progress=stopping(last - 8))
    assert (tmp_path / "out" / "edits" / "alphaedit" / "00001").exists()
    assert timeless(run(editable, tmp_path / "out", "sequential", some, ["alphaedit"])) == timeless(whole)


@pytest.mark.parametrize(
    ("mode", "owner", "name", "error"),
    [
        ("single", Evaluation, "scores", ModelError("not enough memory to read a single text; use a smaller dtype")),
        ("batch:2", ffedit, "edit", EditError("not enough memory to write 1 fact by ft; write fewer layers")),
        ("sequential", ffedit, "edit", ModelError("not enough memory to read a single text; use a smaller dtype")),
    ],
)
def test_a_run_whose_memory_fails_ends_and_goes_on_where_there_is_enough(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, owner: Any, name: str, error: Any
) -> None:
    whole, before = run(editable, tmp_path / "whole", mode, methods=["ft"]), zoo.snapshot(editable)
    work, calls = getattr(owner, name), iter(range(1))

    def failing(*given: Any, **how: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return work(*given, **how)

    with monkeypatch.context() as patch, pytest.raises(type(error), match="not enough memory"):
        patch.setattr(owner, name, failing)
        run(editable, tmp_path / "out", mode, methods=["ft"])
    assert zoo.unchanged(editable, before)
    assert timeless(run(editable, tmp_path / "out", mode, methods=["ft"])) == timeless(whole)


def test_methods_may_be_added_and_find_the_values(
    editable: Editable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = run(editable, tmp_path / "both", "batch:3", methods=["memit", "alphaedit"])
    run(editable, tmp_path / "out", "batch:3", methods=["memit"])
    monkeypatch.setattr(ffedit, "edit", None)  # no value is chosen again
    added = run(editable, tmp_path / "out", "batch:3", methods=["alphaedit"])
    assert timeless(added) == timeless(both)


def test_a_folder_of_another_run_is_refused_in_words_and_not_replaced_by_one_that_is_refused(
    editable: Editable, tmp_path: Path
) -> None:
    run(editable, tmp_path / "out", methods=["ft"])
    before = disk(tmp_path / "out")
    others: list[tuple[dict[str, Any], str]] = [
        ({"some": facts(4)}, r"facts.count 5 there, 4 now"),
        ({"mode": "batch:2"}, r"mode single there, batch:2 now"),
        ({"layers": [0]}, r"layers \[1\] there, \[0\] now"),
        ({"config": quick(steps=7)}, r"config.ft.value.steps 8 there, .* now"),
        ({"full": True}, r"full False there, True now"),
        ({"text": __file__}, r"text.fingerprint None there, \w+ now"),
        ({"layers": None, "spread": 2}, r"spread 1 there, 2 now"),
    ]
    for other, words in others:
        with pytest.raises(EditError, match=f"results of another run .*{words}.*--force"):
            run(editable, tmp_path / "out", **{"methods": ["ft"], **other})
        assert disk(tmp_path / "out") == before, other
    refused = ({"layers": [99]}, {"layers": None, "spread": 9}, {"stats": {}, "methods": ["memit"]}, {"text": "/none"})
    for wrong in refused:
        with pytest.raises(EditError):
            run(editable, tmp_path / "out", **{"methods": ["ft"], "force": True, **wrong})
        assert disk(tmp_path / "out") == before, wrong


def test_another_model_or_version_is_refused_and_force_replaces(editable: Editable, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(editable, out, methods=["ft"])
    with pytest.raises(EditError, match=r"model.fingerprint \w+ there, \w+ now"):
        run(zoo.build("gpt2", True), out, methods=["ft"])
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["versions"]["ffedit"] = "0.0.1"
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EditError, match=f"ffedit 0.0.1 there, {ffedit.__version__.partition('+')[0]} now"):
        run(editable, out, methods=["ft"])
    (out / "manifest.json").write_text("{")
    with pytest.raises(EditError, match="not a manifest"):
        run(editable, out, methods=["ft"])
    run(editable, out, methods=["ft"], some=facts(2), force=True)
    assert len(lines(out)) == 2 * 4


def test_an_edit_that_lost_its_weights_is_made_anew(editable: Editable, tmp_path: Path) -> None:
    whole = run(editable, tmp_path / "out", "batch:3", methods=["memit"])
    folder = tmp_path / "out" / "edits" / "memit" / "00000"
    (folder / "edit.safetensors").unlink()
    (tmp_path / "out" / "results.jsonl").unlink()
    assert timeless(run(editable, tmp_path / "out", "batch:3", methods=["memit"])) == timeless(whole)


def test_progress_counts_a_process_s_own_facts_and_those_of_an_earlier_run(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    journal = Journal(tmp_path)
    for own in (range(5), range(1, 5, 2)):  # an earlier run alone, and now one of two processes
        task: Any = SimpleNamespace(journal=journal, own=own, progress=lambda *stage: told.append(stage))
        for i in own:
            Task.record(task, "ft", "after", i, {i: {"error": "no"}}, {"error": "no"})
    assert told[4] == ("ft", 5, 5) and told[5:] == [("ft", 2, 2)] * 2


def test_a_folder_of_other_things_stays_as_it_is(editable: Editable, tmp_path: Path) -> None:
    (tmp_path / "edit.safetensors").write_text("mine")
    (tmp_path / "manifest.json").write_text("mine, too")
    before = disk(tmp_path)
    for force in (False, True):
        with pytest.raises(EditError, match=r"manifest|edit\.safetensors"):
            run(editable, tmp_path, methods=["ft"], force=force)
    assert disk(tmp_path) == before


def test_results_without_their_manifest_are_left_alone(editable: Editable, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(editable, out, methods=["ft"], some=facts(2))
    (out / "manifest.json").unlink()
    before = disk(out)
    with pytest.raises(EditError, match=r"holds report\.json, but no manifest\.json of"):
        run(editable, out, methods=["ft"], some=facts(2))
    assert disk(out) == before
    run(editable, out, methods=["ft"], some=facts(2), force=True)


def test_two_runs_at_once_are_refused(editable: Editable, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed(out), pytest.raises(EditError, match="another run works on this folder"):
        run(editable, out, methods=["ft"])
    run(editable, out, methods=["ft"], some=facts(2))


def test_the_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = "from pathlib import Path\nfrom ffedit.files.placing import claimed\n"
    code += f"with claimed(Path({str(out)!r})):\n    print('held', flush=True)\n    input()\n"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(EditError, match="another run"), claimed(out):
            pass
        other.kill()
        other.wait()
        with claimed(out):
            assert (out / ".lock").exists()


def test_a_folder_that_cannot_be_written(editable: Editable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EditError, match="file/out: cannot be written"):
        run(editable, tmp_path / "file" / "out")


WORDS = ["--mode", "batch:2", "--methods", "memit,ft", "--layers", "1", "--no-full"]
NUMBERS = ["prompts.contexts=0", "value.steps=2", "ft.steps=1"]
SET = [word for number in NUMBERS for word in ("--set", number)]


def test_the_bench_command_runs_resumes_and_refuses(
    model: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{**fact.to_dict(), "part": "one" if i < 3 else "two"} for i, fact in enumerate(facts(4))]
    asked = [{"case_id": r["case_id"], "part": r.pop("part"), **_counterfact(r)} for r in records]
    asked.append({"case_id": 9, "part": "one", "requested_rewrite": {"subject": "x", "prompt": "{} is"}})
    (empty / "facts.json").write_text(json.dumps(asked))
    words = ["bench", "facts.json", "--model", model, "--corpus", model.parent / "corpus.txt", *WORDS, *SET]
    refused = shell(capsys, *words, "--out", "out", "--where", "part=one")
    assert refused.code == 1 and "--skip-bad uses the 3 good records" in refused.err
    words.append("--skip-bad")
    ran = shell(capsys, *words, "--out", "out", "--where", "part=one", "--json", "found.json")
    assert ran.code == 0, ran.err
    assert "efficacy" in ran.out and "memit" in ran.out and "out/report.md" in ran.out
    found = json.loads((empty / "found.json").read_text())
    assert found["before"]["facts"] == 3 and found["unusable"][0]["record"] == 5, "its number in the source"
    assert found["left_out"][-1] == {
        "kind": "no new object",
        "count": 1,
        "first": 5,
        "reason": found["unusable"][0]["reason"],
    }
    assert "1 could not be measured" in ran.out
    assert found["run"]["config"]["memit"]["value"]["steps"] == 2
    again = shell(capsys, *words, "--out", "out", "--where", "part=one", "--quiet")
    assert (again.code, again.out, again.err) == (0, "", "")
    other = shell(capsys, *words, "--out", "out", "--limit", "2", "--quiet")
    assert other.code == 1 and "results of another run" in other.err and other.err.count("\n") == 1
    for wrong, told in (
        (["--methods", "rmoe"], "method 'rmoe'"),
        (["--mode", "batch"], "mode 'batch'"),
        (["--set", "value.stepps=3"], "value.stepps is not a setting"),
        (["--set", "value.steps=2.5"], "expected int"),
        (["--set", "value.steps=x"], "expected int"),
        (["--layers", "0-1"], "auto or one"),
        (["--layers", "0", "--spread", "2"], "use a smaller one"),
        (["--where", "part=three"], "no record"),
        (["--where", "part=None"], "no record"),
        (["--preset", "paper"], "preset 'paper'"),
    ):
        refused = shell(capsys, *words, *wrong, "--out", "other", "--quiet")
        assert refused.code == 1 and told in refused.err and refused.err.count("\n") == 1, refused.err
    assert not (empty / "other" / "manifest.json").exists()


def _counterfact(fact: dict[str, Any]) -> dict[str, Any]:
    objects = {name: {"str": fact[key]} for name, key in (("target_new", "target"), ("target_true", "previous"))}
    return {"requested_rewrite": {"subject": fact["subject"], "prompt": fact["prompt"], **objects}}


PROGRAM = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import zoo
from benching import CONFIG, CORPUS, facts, run, timeless
import ffedit
from ffedit.editor import solve, value
from ffedit.inference.distributed import process_group
editable, place, workers = zoo.trained("gpt2", True, torch.float64), Path(sys.argv[1]), process_group()
choose, chosen = value._choose, []
value._choose = lambda editable, ff, prompt_sets, *more: chosen.append(len(prompt_sets)) or choose(
    editable, ff, prompt_sets, *more
)
for mode, methods in {modes!r}.items():
    chosen.clear()
    found = run(editable, place / mode, mode, methods=methods, process_group=workers)
    (place / f"{{mode}}-{{workers.rank}}.json").write_text(json.dumps([timeless(found), chosen]))

def no_memory(*problem):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory")

if not workers.first:
    solve.Problem = no_memory
try:
    ffedit.edit(editable, facts(), "memit", layers=[0, 1], config=CONFIG, stats=CORPUS, process_group=workers)
except ffedit.EditError as error:
    told = str(error)
told = workers.gather(told)
(place / f"told-{{workers.rank}}.json").write_text(json.dumps(told))
workers.disband()
"""


def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Shares of a batch round differently, and the steps of a value amplify that: in float64 by less than is compared.
    editable = zoo.trained("gpt2", True, torch.float64)
    modes = {mode: ["memit", "ft"] for mode in ("single", "batch:2")} | {"sequential:3": ["memit", "alphaedit", "ft"]}
    (program := tmp_path / "program.py").write_text(PROGRAM.format(modes=modes))
    helpers = str(Path(__file__).parents[1] / "helpers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (helpers, os.environ.get("PYTHONPATH")))))
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    ran = process(*launch, program, tmp_path)
    assert ran.code == 0, ran.err
    for mode, methods in modes.items():
        alone = timeless(run(editable, tmp_path / "alone" / mode, mode, methods=methods))
        (first, by_first), (second, by_second) = (
            json.loads((tmp_path / f"{mode}-{rank}.json").read_text()) for rank in (0, 1)
        )
        same(first, alone)
        same(second, alone)
        if mode == "sequential:3":  # two subjects, then two, for each of two methods
            assert by_first == by_second == [1, 1] * 2, "each chooses its share of the values of each step"
        assert [path.name for path in (tmp_path / mode).glob("results*")] == ["results.jsonl"]
        (machine,) = json.loads((tmp_path / mode / "report.json").read_text())["run"]["hardware"]
        assert "processes: 2, " in machine
        kept = {(x["method"], x["when"], x["fact"]) for x in lines(tmp_path / mode)}
        assert kept == {(x["method"], x["when"], x["fact"]) for x in lines(tmp_path / "alone" / mode)}
    for folder in (tmp_path / "alone" / "sequential:3" / "edits" / "alphaedit").glob("0*"):
        one, two = (Edit.load(path) for path in (folder, tmp_path / folder.relative_to(tmp_path / "alone")))
        for at, delta in one.updates.items():
            assert torch.allclose(two.updates[at].dense, delta.dense, atol=1e-4 * float(delta.dense.abs().max()))
    for rank in (0, 1):
        of_first, of_second = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert of_first.startswith("the process of rank 1 (of 2) failed: ") and of_first.endswith("not enough memory")
        assert of_second.startswith("not enough memory to write 5 facts by memit")
