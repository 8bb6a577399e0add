"""What processes that share work compare before it begins: each verb refuses those that were given something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import zoo
from choosing import FOUR

import ffedit
from ffedit.errors import EditError
from ffedit.inference.distributed import ProcessGroup

Verb = Callable[..., Any]


class Compared(Exception):
    """Ends a verb where it compares; its first argument is what would be exchanged."""


@dataclass(frozen=True)
class Two(ProcessGroup):
    """The first of two processes, as far as what they compare."""

    size: int = 2

    def agree(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        raise Compared(dict(settings()))

    def in_all(self, work: Callable[[], Any]) -> Any:
        return work()


def compared(verb: Verb, *words: Any, **named: Any) -> dict[str, Any]:
    """What a verb compares."""
    with pytest.raises(Compared) as caught:
        verb(*words, process_group=Two(), **named)
    found: dict[str, Any] = caught.value.args[0]
    return found


def differing(verb: Verb, one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Names of what differs between two processes that call a verb with `one` and `other`."""
    editable = zoo.shared("gpt2")
    first, second = (compared(verb, editable, **words) for words in (one, other))
    assert compared(verb, editable, **one) == first, "what is alike is found alike"
    return {name for name in first if first[name] != second[name]}


@pytest.mark.parametrize(
    ("verb", "one", "change", "differs"),
    [
        (ffedit.edit, {"facts": list(FOUR)}, {"facts": list(FOUR[:3])}, {"facts"}),
        (ffedit.edit, {"facts": FOUR[0], "layers": 1}, {"layers": 2}, {"options"}),
        (ffedit.evaluate, {"facts": list(FOUR)}, {"facts": [replace(FOUR[0], target="Spain")]}, {"facts"}),
        (ffedit.evaluate, {"facts": FOUR[0]}, {"full": True}, {"options"}),
    ],
)
def test_processes_with_other_arguments_disagree(
    verb: Verb, one: dict[str, Any], change: dict[str, Any], differs: set[str]
) -> None:
    assert differing(verb, one, one) == set()
    assert differing(verb, one, {**one, **change}) == differs


@pytest.mark.parametrize("verb", [ffedit.edit, ffedit.evaluate])
def test_processes_with_another_model_or_version_disagree(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (compared(verb, zoo.shared(family), FOUR[0]) for family in ("gpt2", "llama"))
    assert {name for name in one if one[name] != other[name]} == {"model"}
    monkeypatch.setattr("ffedit.editor.provenance.__version__", "0")
    assert compared(verb, zoo.shared("gpt2"), FOUR[0])["versions"] != one["versions"]


def test_processes_with_another_text_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(Two, "agree", lambda self, settings: seen.append(dict(settings())))
    monkeypatch.setattr(Two, "share", lambda self, items: (_ for _ in ()).throw(EditError("far enough")))
    for name, words in (("a", "the old tower stands in France . "), ("b", "the Nile river is located in Egypt . ")):
        (tmp_path / name).write_text(words * 40)
        with pytest.raises(EditError, match="far enough"):
            ffedit.evaluate(zoo.shared("gpt2"), FOUR[0], text=tmp_path / name, process_group=Two())
    first, second = seen
    assert {name for name in first if first[name] != second[name]} == {"text"}
