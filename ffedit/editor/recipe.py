"""Recipes: the options of `ffedit apply` that make an edit again, as YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from ffedit.editor.config import dotted
from ffedit.editor.edit import Edit
from ffedit.errors import EditError
from ffedit.facts.text import visible


def recipe_of(edit: Edit) -> dict[str, Any]:
    """Return the options of `ffedit apply` that make an edit again, whatever the defaults are.

    EditError for an edit made by another command, or combined from several.
    """
    record, layers = edit.provenance, edit.layers
    if "configs" in record:
        raise EditError("an edit that combines others has no recipe: make each again by its own, and combine them")
    if not {"config", "model", "computed_in", "method"} <= set(record):
        raise EditError(f"an edit by {record.get('method')!r} has no recipe: `ffedit apply` does not make such edits")
    if layers != list(range(layers[0], layers[-1] + 1)):
        raise EditError(f"an edit of layers {layers} has no recipe: `ffedit apply` writes to consecutive layers")
    numbers = json.loads(json.dumps(dotted(record["config"])))  # YAML has no tuples
    if missing := [name for name in ("key.fact_token", "seed") if name not in numbers]:
        raise EditError(f"an edit without {missing[0]} has no recipe: `ffedit apply` does not make such edits")
    return {
        "model": record["model"],
        # "averaged_in" is recorded only where no dtype was asked for: by "auto", another machine decides anew.
        "dtype": "auto" if "averaged_in" in record else record["computed_in"],
        **({"chat": True} if edit.in_chat else {}),
        "method": record["method"],
        "layers": layers[-1],
        "spread": len(layers),
        "fact_token": numbers.pop("key.fact_token"),
        "seed": numbers.pop("seed"),
        **record.get("inputs", {}),
        "set": numbers,
        "facts": [fact.to_dict() for fact in edit.facts],
    }


def to_yaml(recipe: Mapping[str, Any], edit: Edit) -> str:
    """Write a recipe as YAML, under a comment that names the edit.

    EditError for an edit computed in Python from inputs that no option names: statistics, or edits in the model.
    """
    record = edit.provenance
    inputs = [*record.get("given", []), *(["earlier edits"] if record.get("after") else [])]
    if inputs and "inputs" not in record:  # `ffedit apply` notes its inputs, and a checkpoint carries the edits in it
        raise EditError(f"an edit computed in Python with {inputs[0]} has no recipe: `ffedit apply` does not get them")
    versions = " ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    return (
        f"# Makes edit {edit.fingerprint()} of base {visible(edit.base)} again: ffedit run FILE\n"
        f"# {visible(versions)}\n{yaml_of(recipe)}"
    )


def yaml_of(recipe: Mapping[str, Any]) -> str:
    """Write a recipe as YAML without a heading."""
    shown = str(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=110))
    # YAML does not escape characters that change the direction of text; where there is one, escape all of Unicode.
    plain = all(visible(line) == line for line in shown.split("\n"))
    return shown if plain else str(yaml.safe_dump(recipe, sort_keys=False, width=110))
