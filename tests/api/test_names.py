"""The public names: documented, importable, with options given by name; old names work for one release, and warn."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import zoo
from making import SECOND, made
from writing import CORPUS, quick

import ffedit
from ffedit.version import RENAMED

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    documented = re.findall(r"^::: ffedit\.(\w+)$", PAGE, re.MULTILINE)
    assert sorted(documented) == sorted(name for name in ffedit.__all__ if name != "__version__")


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    assert dir(ffedit) == sorted(ffedit.__all__)
    for name in ffedit.__all__:
        assert inspect.getdoc(getattr(ffedit, name)), name


# What may be given by position and left out: what a call is about. All else is an option, by name only.
POSITIONAL = {"name_or_path", "method", "edit", "kind", "layers"}


def test_options_are_given_by_name() -> None:
    functions = {name: value for name in ffedit.__all__ if inspect.isfunction(value := getattr(ffedit, name))}
    optional = {
        (name, parameter.name)
        for name, function in functions.items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
    }
    assert {option for _, option in optional} == POSITIONAL and ("collect_stats", "layers") in optional
    assert {name for name, option in optional if option == "layers"} == {"collect_stats"}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_the_new_one_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"ffedit.{old} is now called ffedit.{new};") as caught:
        assert getattr(ffedit, old) is getattr(ffedit, new)
    assert caught[0].filename == __file__, "the warning names the user's line"
    assert old not in ffedit.__all__ and old not in dir(ffedit)


def test_an_old_option_does_what_the_new_one_does() -> None:
    editable = zoo.shared("llama")
    first = made(editable, {1: 1})
    with first.applied(editable), pytest.warns(DeprecationWarning, match=r"edit\(after=…\) is now called preserve=…;"):
        edit = ffedit.edit(editable, SECOND, "rome", layers=1, config=quick(), stats=CORPUS, after=first)  # type: ignore[call-arg]
    assert edit.provenance["after"] == [first.fingerprint()]
    with pytest.raises(TypeError, match="both"), pytest.warns(DeprecationWarning):
        ffedit.edit(editable, SECOND, preserve=first, after=first)  # type: ignore[call-arg]


def test_unless_is_require_with_a_warning() -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"EditError.unless is now called EditError.require;"),
        pytest.raises(ffedit.EditError, match="found 3 "),
    ):
        ffedit.EditError.unless(3, str, "a word was expected")
