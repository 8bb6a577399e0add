"""The recipe of an edit: the options of `ffedit apply` that make it again, all numbers and facts spelled out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from ffedit.editor.config import dotted
from ffedit.errors import EditError

if TYPE_CHECKING:
    from ffedit.editor.edit import Edit
    from ffedit.editor.edit_files import SavedEdit

WIDTH = 110


def recipe_of(edit: Edit | SavedEdit) -> dict[str, Any]:
    """Return the recipe of an edit as plain YAML, which `ffedit run` takes.

    Defaults are spelled out, so that it makes the same edit when they change. The layer is the one that was chosen.

    Raises:
        EditError: nothing that `ffedit apply` does makes it: it is a sum, or its layers do not lie side by side.
    """
    about, layers = edit.provenance, edit.layers
    if "config" not in about:
        raise EditError(f"an edit by {about.get('method')!r} has no recipe: `ffedit apply` does not make such")
    if layers != list(range(layers[0], layers[-1] + 1)):
        raise EditError(f"an edit of layers {layers} has no recipe: `ffedit apply` writes to layers side by side")
    numbers = {name: _plain(value) for name, value in dotted(about["config"]).items()}
    return {
        "model": about["model"],
        "dtype": about["computed_in"],
        **({"chat": True} if edit.in_chat else {}),
        "method": about["method"],
        "layers": layers[-1],
        "spread": len(layers),
        "fact_token": numbers.pop("key.fact_token"),
        "seed": numbers.pop("seed"),
        **about.get("inputs", {}),
        "set": numbers,
        "facts": [fact.to_dict() for fact in edit.facts],
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def to_yaml(recipe: dict[str, Any], edit: Edit | SavedEdit) -> str:
    """Write a recipe as YAML, headed by what it makes."""
    versions = " ".join(f"{name} {version}" for name, version in edit.provenance.get("versions", {}).items())
    heading = f"# Makes edit {edit.fingerprint()} of base {edit.base} again: ffedit run FILE\n# {versions}\n"
    return heading + yaml_of(recipe)


def yaml_of(recipe: Mapping[str, Any]) -> str:
    """Write a recipe as YAML without a heading."""
    return str(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=WIDTH))
