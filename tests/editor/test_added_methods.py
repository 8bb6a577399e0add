"""Another package adds a method; one that cannot be loaded is left out and named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ffedit
from ffedit.editor import methods
from ffedit.editor.names import OWN, method_names
from ffedit.errors import EditError, FFEditError

MODULE = """
from ffedit.algebra.updates import equality
from ffedit.editor.methods import Method

IDENTITY = Method(
    "identity",
    solves="(W+D)K = V, D of smallest Frobenius norm",
    choose="a test",
    source="nowhere",
    solve=lambda p: equality(p.W, p.K, p.V, p.C * 0 + __import__("torch").eye(len(p.C)).to(p.C)),
)
"""
POINTS = """[ffedit.methods]
identity = plain_editing:IDENTITY
lost = plain_editing:NOTHING
twice = plain_editing:MEMIT
memit = plain_editing:MEMIT
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages that holds one of two entry points that are no methods, and one that is."""
    folder = tmp_path / "site"
    (folder / "plain_editing-1.0.dist-info").mkdir(parents=True)
    (folder / "plain_editing.py").write_text(MODULE + "from ffedit.editor.methods.memit import MEMIT\n")
    (folder / "plain_editing-1.0.dist-info" / "METADATA").write_text("Name: plain-editing\nVersion: 1.0\n")
    (folder / "plain_editing-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(folder)
    vars(methods.METHODS).pop("_loaded", None)
    yield folder
    vars(methods.METHODS).pop("_loaded", None)


def test_a_method_of_another_package_is_one_of_the_methods(site: Path) -> None:
    assert list(methods.METHODS)[-1] == "identity" and methods.METHODS["identity"].package == "plain-editing"
    broken = methods.METHODS.broken
    assert "no attribute 'NOTHING'" in broken["lost (plain-editing)"]
    assert "there is 'memit' already, of ffedit" in broken["memit (plain-editing)"]
    assert "called 'twice', its method 'memit'; the same name was expected" in broken["twice (plain-editing)"]
    with pytest.raises(EditError, match=r"'lost' is not known; known are .*identity; lost \(plain-editing\) could not"):
        methods.check_method("lost")
    assert set(methods.METHODS) < set(method_names()), "those that cannot be loaded are refused when they are"


def test_a_method_can_be_added_to_this_process_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.METHODS, "_here", {})
    mine = replace(methods.METHODS["emmet"], name="mine")
    for solves in ("one", "another"):
        ffedit.add_method(replace(mine, solves=solves))
        assert list(methods.METHODS)[-1] == "mine" and len(methods.METHODS) == len(list(methods.METHODS))
        assert (methods.check_method("mine").solves, methods.check_method("mine").package) == (solves, "this process")
    with pytest.raises(FFEditError, match="there is 'emmet' already, of ffedit; choose another name"):
        ffedit.add_method(methods.METHODS["emmet"])
    with pytest.raises(EditError, match=r"an ffedit\.Method was expected"):
        ffedit.add_method("mine")  # type: ignore[arg-type]


def test_the_names_known_before_torch_are_those_of_the_methods() -> None:
    assert [name for name in methods.METHODS if methods.METHODS[name].package == "ffedit"] == list(OWN)
    assert method_names() == list(methods.METHODS)
