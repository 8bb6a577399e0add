"""Text for statistics: any file, record or dataset, piece by piece, exactly as many tokens, and plain refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zoo

from ffedit import Corpus, EditError
from ffedit.inference import text as module
from ffedit.inference.text import corpus_ids

WORDS = "the old tower stands in Rome and the red river flows through Paris . "


def ids_of(path: Path | str, tokens: int = 10_000, bos: bool = False) -> list[int]:
    found: list[int] = corpus_ids(zoo.shared("gpt2", bos), Corpus(path, tokens)).tolist()
    return found


def expected(text: str) -> list[int]:
    ids: list[int] = zoo.shared("gpt2").tokenizer(text)["input_ids"]
    return ids


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_is_what_it_is_as_a_whole(tmp_path: Path, bos: bool) -> None:
    text = (WORDS * 7 + "\n") * 200  # several pieces
    assert len(text) > 2 * module.PIECE
    path = write(tmp_path, "a.txt", text)
    assert ids_of(path, 10**6, bos) == expected(text)
    assert ids_of(path, 1001, bos) == expected(text)[:1001]


def test_marks_and_line_ends_of_other_systems_are_no_text(tmp_path: Path) -> None:
    assert ids_of(write(tmp_path, "a", b"\xef\xbb\xbf" + WORDS.replace(" . ", "\r\n").encode())) == expected(
        WORDS.replace(" . ", "\n")
    )


def test_only_as_much_is_read_as_is_needed(tmp_path: Path) -> None:
    good = (WORDS + "\n") * 2000
    path = write(tmp_path, "a.txt", good.encode() + b"\xff not text")
    assert ids_of(path, 100) == expected(good)[:100]
    with pytest.raises(EditError, match=f"byte {len(good.encode())} is not UTF-8"):
        ids_of(path, 10**6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b"\n \n", "holds no text"),
        ("Zürich ".encode("latin-1"), "byte 1 is not UTF-8"),
        (b"abc\nde\0f", "byte 6 is NUL"),
        ("日本".encode()[:-1], "byte 3 is not UTF-8"),
        (WORDS.encode("utf-16"), "byte"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(EditError, match=message) as caught:
        ids_of(write(tmp_path, "a.txt", content))
    assert "\n" not in str(caught.value) and "a.txt" in str(caught.value)


def test_a_character_across_a_cut_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 5)
    text = "日本語" * 20  # one long line; three bytes a character
    assert "".join(module._pieces(write(tmp_path, "a.txt", text))) == text
    with pytest.raises(EditError, match="byte 36 is not"):
        list(module._pieces(write(tmp_path, "b.txt", text.encode()[:36] + b"\xff")))


LONG = pytest.param("a/" * 3000 + "b", id="longer than the system takes")


@pytest.mark.parametrize("name", ["no/such/file.txt", "./here", "a.jsonl", "what is this", LONG])
def test_a_file_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(EditError, match="no such file; a UTF-8 text"):
        Corpus(name).check()


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="a folder"):
        Corpus(tmp_path).check()


# Records ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "the old tower", "id": "x"}\n\n{"text": "in Rome", "id": "y"}\n'),
        ("a.jsonl", '{"body": "the old tower", "n": 1}\n{"body": "in Rome", "n": 2}'),
        ("a.jsonl", '"the old tower"\n"in Rome"\n'),
        ("a.json", '{"text": "the old tower"}\n{"text": "in Rome"}\n'),
        ("a.json", json.dumps([{"text": "the old tower"}, {"text": "in Rome"}], indent=2)),
        ("a.json", '["the old tower", "in Rome"]'),
    ],
)
def test_records_hold_texts(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path, name, content)
    assert ids_of(path) == ids_of(path, bos=True) == expected("the old tower in Rome")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"title": "a", "body": "b"}', "record 1 .*title, body"),
        ("a.jsonl", '{"text": "a"}\n{"n": 1}', "record 2 .*found: n"),
        ("a.jsonl", '{"text": "a"}\n[1]', "record 2 .*list"),
        ("a.jsonl", '{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("a.json", '[{"text": "a"},', "line 1 is not JSON"),
        ("a.jsonl", "", "holds no text"),
    ],
)
def test_records_without_texts_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(EditError, match=message) as caught:
        ids_of(write(tmp_path, name, content))
    assert "\n" not in str(caught.value) and name in str(caught.value)


# Datasets -----------------------------------------------------------------------------------------


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package `datasets` with one endless dataset."""
    fake = ModuleType("datasets")
    fake.__spec__ = ModuleSpec("datasets", None)
    asked: list[Any] = []

    def load_dataset(*names: str, **options: Any) -> Iterator[dict[str, Any]]:
        asked.append((*names, options))
        if names[0] == "away":
            raise ConnectionError("cannot reach\nthe hub")
        return ({"text": "the old tower", "number": n} for n in count())

    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    fake.asked = asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    yield fake


def test_a_dataset_is_streamed(datasets: ModuleType) -> None:
    assert ids_of("org/name:en:test", 7) == (expected("the old tower") * 3)[:7]
    assert ids_of("name:en", 7) == ids_of("name", 7)
    streamed = {"split": "train", "streaming": True}
    first = ("org/name", "en", {**streamed, "split": "test"})
    assert datasets.asked == [first, ("name", "en", streamed), ("name", None, streamed)]


def test_a_hub_that_does_not_answer_is_one_line(datasets: ModuleType) -> None:
    with pytest.raises(EditError, match=r"away: the dataset cannot be read .cannot reach the hub") as caught:
        ids_of("away")
    assert "\n" not in str(caught.value)


def test_without_the_package_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffedit.inference.corpus.find_spec", lambda name: None)
    with pytest.raises(EditError, match=r"org/name: no such file; .*pip install 'ffedit\[datasets\]'"):
        ids_of("org/name")
