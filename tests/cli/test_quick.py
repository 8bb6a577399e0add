"""What computes nothing waits for neither torch nor transformers, which take seconds to import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zoo
from making import made
from shell import process

from ffedit.cli import COMMANDS
from ffedit.cli.inspect import inspect

HEAVY = ("torch", "transformers")
# The command in a process of its own, which says at its end what of `HEAVY` was imported.
CODE = f"""
import sys
from ffedit.cli import invoke
code = invoke(sys.argv[1:])
print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""
FACT = Path(__file__).parents[2] / "edits" / "eiffel-tower.json"
HELP = [[name, "--help"] for name in COMMANDS] + [["inspect", name, "--help"] for name in inspect.commands]
ANSWERED = [["--help"], ["-V"], *HELP, ["cache", "list"]]
REFUSED = [
    (["aply"], 2, "Did you mean 'apply'?"),
    (["apply", "--modle", "atlas"], 2, "'--model'?"),
    (["apply", FACT, "--method", "rom"], 2, "'rom' is not one of 'rome', "),
    (["apply", FACT, "--spread", "none"], 2, "'none' is not a valid integer"),
    (["apply", FACT, "--corpus", "nowhere.txt"], 1, "nowhere.txt: no such file"),
    (["apply", FACT, "--out", "."], 1, "exists already"),
    (["apply", FACT, "--require", "eficacy>=0.9"], 1, "one of efficacy, "),
    (["apply", FACT, "--require", "efficacy is 1"], 1, "write SCORE>=NUMBER"),
    (["apply", FACT, "--require", "efficacy>=1e"], 1, "'1e' is not a number"),
    (["apply", FACT, "--model", "./nowhere"], 1, "./nowhere: no such folder"),
    (["apply", "nowhere.json"], 1, "no file nowhere.json"),
    (["bench", FACT, "--methods", "rome,rom", "--out", "b"], 1, "method 'rom' is not known"),
    (["evaluate", FACT, "--edit", "nowhere"], 1, "nowhere: holds no edit"),
    (["export", "nowhere", "--out", "x"], 1, "nowhere: holds no edit"),
    (["show", "nowhere"], 1, "nowhere: holds no edit"),
    (["undo", "./nowhere", "--out", "x"], 1, "./nowhere: no such folder"),
]


@pytest.mark.parametrize("words", ANSWERED, ids=" ".join)
def test_what_computes_nothing_is_answered_without_torch(words: list[str]) -> None:
    done = process("-c", CODE, *words)
    assert (done.code, done.err) == (0, "imported:\n") and done.out


@pytest.mark.usefixtures("empty")
def test_an_edit_is_shown_without_torch() -> None:
    edit = made(zoo.shared("llama"), {0: 1, 2: 2})
    edit.save("edit")
    for words in (["show", "edit"], ["show", "edit", "--json", "-"]):
        done = process("-c", CODE, *words)
        assert (done.code, done.err) == (0, "imported:\n") and edit.fingerprint() in done.out
    (shown,) = json.loads(done.out)["edits"]
    assert (shown["layers"], shown["rank"], shown["fingerprint"]) == ([0, 2], 2, edit.fingerprint())
    assert shown["norm"] == pytest.approx({str(at): norm for at, norm in edit.norms().items()})


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("words", "code", "said"), REFUSED, ids=lambda value: None)
def test_a_mistake_is_told_without_torch(words: list[str | Path], code: int, said: str) -> None:
    Path("held").touch()
    done = process("-c", CODE, *words)
    error, imported = done.err.splitlines()
    assert done.code == code and error.startswith("error: ") and said in error and imported == "imported:"


def test_every_public_name_is_known_before_torch_is() -> None:
    code = f"import sys, ffedit; assert 'load' in dir(ffedit); sys.exit(any(name in sys.modules for name in {HEAVY}))"
    assert process("-c", code).code == 0
