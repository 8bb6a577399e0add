"""What computes nothing waits for neither torch nor transformers, which take seconds to import."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from shell import Ran, process

from ffedit.cli import COMMANDS
from ffedit.cli.inspect import inspect

HEAVY = ("torch", "transformers")
# Commands one after the other in a process that has done nothing else: how each ended, what it said, and what of
# `HEAVY` was imported by then.
CODE = f"""
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from ffedit.cli import invoke
for words in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = invoke(words)
    imported = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([words, code, out.getvalue(), err.getvalue(), imported]))
"""
FACT = Path(__file__).parents[2] / "edits" / "eiffel-tower.json"
HELP = [[name, "--help"] for name in COMMANDS] + [["inspect", name, "--help"] for name in inspect.commands]
ANSWERED = [["--help"], ["-V"], *HELP, ["cache", "list"]]
REFUSED = [
    (["aply"], 2, "Did you mean 'apply'?"),
    (["apply", "--modle", "atlas"], 2, "'--model'?"),
    (["apply", FACT, "--corpus", "nowhere.txt"], 1, "nowhere.txt: no such file"),
    (["apply", FACT, "--out", "."], 1, "exists already"),
    (["apply", FACT, "--require", "eficacy>=0.9"], 1, "one of efficacy, "),
    (["apply", FACT, "--require", "efficacy is 1"], 1, "write SCORE>=NUMBER"),
    (["apply", FACT, "--require", "efficacy>=1e"], 1, "'1e' is not a number"),
    (["apply", FACT, "--model", "./nowhere"], 1, "./nowhere: no such folder"),
    (["apply", "nowhere.json"], 1, "no file nowhere.json"),
    (["bench", FACT, "--methods", "rome,rom", "--out", "b"], 1, "method 'rom' is not known"),
    (["evaluate", FACT, "--edit", "nowhere"], 1, "nowhere: no such folder"),
    (["export", "nowhere", "--out", "x"], 1, "nowhere: no such folder"),
    (["show", "nowhere"], 1, "nowhere: no such folder"),
    (["undo", "./nowhere", "--out", "x"], 1, "./nowhere: no such folder"),
]


Ended = tuple[Ran, list[str]]


def ended(commands: Iterable[Sequence[str | Path]]) -> dict[str, Ended]:
    """How each of `commands` ended, and what was imported until then."""
    asked = [[str(word) for word in words] for words in commands]
    done = process("-c", CODE, json.dumps(asked))
    assert (done.code, done.err) == (0, "")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [words for words, *_ in lines] == asked
    return {" ".join(words): (Ran(*left), imported) for words, *left, imported in lines}


@pytest.fixture(scope="module")
def all_ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Those that compute nothing, in a folder that is not empty."""
    (folder := tmp_path_factory.mktemp("quick") / "here").mkdir()
    (folder / "held").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return ended([*ANSWERED, *(words for words, _, _ in REFUSED)])


@pytest.mark.parametrize("words", ANSWERED, ids=" ".join)
def test_what_computes_nothing_is_answered_without_torch(words: list[str], all_ended: dict[str, Ended]) -> None:
    done, imported = all_ended[" ".join(words)]
    assert (done.code, done.err, imported) == (0, "", []) and done.out


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_options_of_an_edit_stand_under_a_heading_of_their_own(words: list[str], all_ended: dict[str, Ended]) -> None:
    done, _ = all_ended[" ".join(words)]
    panel = done.out.partition("─ The edit ─")[2].partition("╰")[0]
    found = {option for option in ("--layers", "--seed", "--set", "--strict", "--tokens") if f" {option}" in panel}
    expected = {"apply": {"--layers", "--seed", "--set", "--strict"}, "bench": {"--layers", "--seed", "--set"}}
    assert found == {**expected, "choose-layer": {"--layers"}}.get(words[0], set())


@pytest.mark.parametrize(("words", "code", "said"), REFUSED, ids=lambda value: None)
def test_a_mistake_is_told_without_torch(
    words: list[str | Path], code: int, said: str, all_ended: dict[str, Ended]
) -> None:
    done, imported = all_ended[" ".join(map(str, words))]
    (error,) = done.err.splitlines()
    assert done.code == code and error.startswith("error: ") and said in error and imported == []


def test_every_public_name_is_known_before_torch_is() -> None:
    code = f"import sys, ffedit; assert 'load' in dir(ffedit); sys.exit(any(name in sys.modules for name in {HEAVY}))"
    assert process("-c", code).code == 0
