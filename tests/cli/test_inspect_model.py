"""`ffedit inspect model`: reports, merging, going on, and what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import zoo
from shell import disk, shell
from shown import shown

from ffedit.display.terminal.model_view import ByLayer, shift_line
from ffedit.inspector.model_view import CountedInterval, Measure, Shift

SMALL = ("--top", "6", "--positions", "30", "--removing", "3", "2")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = Random(0)
    texts = [" ".join(["the", *rng.choices(zoo.WORDS[3:40], k=rng.randint(2, 9))]) for _ in range(120)]
    (path := tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def asked(model: Path, *words: str | Path) -> list[str | Path]:
    return ["inspect", "model", "--model", model, *SMALL, *words]


def test_the_report_is_table_json_markdown_and_figure(
    model: Path, corpus: Path, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = shell(capsys, *asked(model, "--corpus", corpus, "--out", "out", "--json", "found.json"))
    assert ran.code == 0, ran.err
    assert {"report.json", "report.md", "report.png", "pass.safetensors", "rows-000000.safetensors"} == {
        path.name for path in Path("out").iterdir()
    }
    report = json.loads(Path("out/report.json").read_text())
    assert report == json.loads(Path("found.json").read_text())
    text = Path("out/report.md").read_text()
    for measure in report["measures"]:
        assert len(measure["values"]) == len(measure["low"]) == len(measure["high"]) == report["layers"] == zoo.DEPTH
        assert measure["text"] in text and all(word in ran.out for word in measure["title"].split())
    agreement = next(m for m in report["measures"] if m["name"] == "agreement")
    assert f"| 0 | {agreement['values'][0]:.1%} [{agreement['low'][0]:.1%}, {agreement['high'][0]:.1%}]" in text
    assert Path("out/report.png").read_bytes().startswith(b"\x89PNG")
    assert max(map(len, ran.out.splitlines())) <= 100


@pytest.mark.parametrize("names", [("removed_first", "removed_last", "removed_random"), ("shallow", "shallow_chance")])
def test_numbers_stand_whole_at_80_columns_and_intervals_where_there_is_room(names: tuple[str, ...]) -> None:
    wide = CountedInterval(-2.36, -12.05, 17.57, 9)
    table = ByLayer([Measure.of(name, [wide, wide]) for name in names], layers=2)
    for width, ends in ((80, len(names) < 3), (120, True)):
        text = shown(table, width)
        assert "…" not in text and text.count("236.0%") == 2 * len(names)
        assert text.count("1757.0%]") == 2 * len(names) * ends, text


@pytest.mark.parametrize("inside", [False, True])
def test_a_shift_shows_where_it_happens_whatever_quotes_the_text_has(inside: bool) -> None:
    far = " and so on" * 8
    said = shift_line(Shift(f"the «old»{far} ends here", "a", "b", "c", None, "compromise"), inside)
    assert ("«old»" in said) == inside and ("ends here" in said) != inside


def test_what_was_run_is_not_run_again(
    model: Path, corpus: Path, empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = asked(model, "--corpus", corpus, "--out", "out")
    assert shell(capsys, *command).code == 0
    before = disk(Path("out"))
    monkeypatch.setattr("ffedit.inspector.memory_pass._run", None)
    assert shell(capsys, *command).code == 0
    assert disk(Path("out")) == before
    ran = shell(capsys, *command, "--top", "5")
    assert ran.code == 1 and "settings" in ran.err and "--force" in ran.err and disk(Path("out")) == before


def test_two_folders_merge(model: Path, corpus: Path, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = corpus.read_text().splitlines(keepends=True)
    for name, some in (("a", lines[:50]), ("b", lines[50:])):
        Path(f"{name}.jsonl").write_text("".join(some))
        assert shell(capsys, *asked(model, "--corpus", f"{name}.jsonl", "--out", name)).code == 0
    assert shell(capsys, *asked(model, "--corpus", corpus, "--out", "whole")).code == 0
    ran = shell(capsys, *asked(model, "a", "b", "--merge", "--out", "both"))
    assert ran.code == 0, ran.err
    both, whole = (json.loads(Path(name, "report.json").read_text()) for name in ("both", "whole"))
    of_triggers = {"shallow", "shallow_last", "shallow_pair", "shallow_keys", "agreement", "rank", "sure"}
    for mine, theirs in zip(both["measures"], whole["measures"], strict=True):
        if mine["name"] in of_triggers:
            assert mine["values"] == pytest.approx(theirs["values"], abs=1e-5), mine["name"]
    assert shell(capsys, *asked(model, "a", "b", "--merge", "--out", "both")).code == 1
    twice = shell(capsys, *asked(model, "a", "b", "a", "--merge", "--out", "more"))
    assert twice.code == 1 and "count twice" in twice.err and not Path("more").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "fewer than two tokens"),
        ("blank.txt", b" \n\n ", "fewer than two tokens"),
        ("one.txt", b"Rome", "fewer than two tokens"),
        ("ones.jsonl", b'{"text": ""}\n', "fewer than two tokens"),
        ("binary.txt", b"\x00\x01\x02", "not text"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8"),
        ("other.jsonl", b'{"a": 1}\n', 'no field "text"'),
        ("missing.txt", None, "no such file"),
    ],
)
def test_texts_that_cannot_be_used_leave_one_line(
    name: str, content: bytes | None, message: str, empty: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from shell import save_model

    folder = save_model(zoo.build("gpt2"), tmp_path / "plain" / "model")  # no BOS stands before each text
    if content is not None:
        Path(name).write_bytes(content)
    ran = shell(capsys, *asked(folder, "--corpus", name, "--out", "out"))
    assert ran.code == 1 and message in ran.err and len(ran.err.strip().splitlines()) == 1, ran.err


def test_places_that_cannot_be_written_are_found_before_the_work(
    model: Path, corpus: Path, empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffedit.load", None)
    Path("file").write_text("x")
    Path("full").mkdir()
    Path("full/other").write_text("x")
    for words, message in (
        (("--out", "file"), "file"),
        (("--out", "file/below"), "cannot be written"),
        (("--out", "full"), "holds other things"),
    ):
        ran = shell(capsys, *asked(model, "--corpus", corpus, *words))
        assert ran.code == 1 and message in ran.err and len(ran.err.strip().splitlines()) == 1, ran.err
    assert shell(capsys, *asked(model, "--merge", "--out", "out")).code == 2


def test_a_damaged_pass_is_named(model: Path, corpus: Path, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = asked(model, "--corpus", corpus, "--out", "out")
    assert shell(capsys, *command).code == 0
    Path("out/pass.safetensors").write_bytes(b"damaged")
    ran = shell(capsys, *command)
    assert ran.code == 1 and "--force" in ran.err
    assert shell(capsys, *command, "--force").code == 0


def test_an_interrupt_keeps_what_was_run(
    model: Path, corpus: Path, empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ffedit.inspector import memory_pass

    monkeypatch.setattr(memory_pass, "TOKENS_PER_BATCH", 100)
    once, calls = memory_pass._run, []

    def third(*given: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        once(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_pass, "_run", third)
    command = asked(model, "--corpus", corpus, "--out", "out")
    ran = shell(capsys, *command)
    assert ran.code == 130 and "out keeps what was run; the same command goes on" in ran.err
    assert 0 < memory_pass.Pass.load(Path("out")).rows < 120
    assert shell(capsys, *asked(model, "out", "--merge", "--out", "both")).code == 1
    monkeypatch.setattr(memory_pass, "_run", once)
    assert shell(capsys, *command).code == 0
    assert shell(capsys, *asked(model, "--corpus", corpus, "--out", "whole")).code == 0
    ours, whole = (json.loads(Path(name, "report.json").read_text()) for name in ("out", "whole"))
    assert ours == whole
