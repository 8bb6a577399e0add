"""`ffedit run`: an edit made from a recipe, a YAML file of the options of `ffedit apply`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich_click as click
import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from ffedit.cli.apply import apply
from ffedit.cli.fact_options import IN_RECIPE
from ffedit.cli.options import FILE, LOADING
from ffedit.errors import EditError, FFEditError, brief
from ffedit.facts.fact import Fact, as_facts, check_facts, show

FACTS = "facts"  # a file, as FACTS of `apply`, or the facts themselves, each by its fields
CONSENT = "trust_remote_code"  # only whoever runs a recipe can give it, not its author


@click.command()
@click.argument("recipe", type=FILE)
@click.option("--force", is_flag=True, help="Replace existing folders, and save an edit even if it did not take.")
@LOADING[CONSENT]
@click.option("--quiet", "-q", is_flag=True, help="Show nothing but errors.")
@click.pass_context
def run(current: click.Context, /, recipe: Path, trust_remote_code: bool, **flags: bool) -> None:
    """Make the edit that RECIPE describes: a YAML file of the options of `apply`.

    `ffedit apply --save-recipe FILE` writes a recipe, `ffedit show --recipe` shows the recipe of an edit. Paths are
    relative to the working folder.
    """
    values = read_recipe(recipe) | {name: True for name, is_set in flags.items() if is_set}
    try:
        if FACTS in values and not isinstance(values[FACTS], str):
            current.meta[IN_RECIPE] = facts_in(values.pop(FACTS))
        default_map = {**defaults(values), CONSENT: trust_remote_code}
        context = apply.make_context("run", [], parent=current, default_map=default_map)
    except click.UsageError as error:
        raise EditError(f"{recipe}: {error.format_message()}") from error
    except FFEditError as error:
        raise EditError(f"{recipe}: {error}") from error
    apply.invoke(context)


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the values of a recipe. Raises EditError for a file that is no recipe or has aliases."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"{path}: cannot be read ({error})") from error
    try:
        values = RecipeLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise EditError(f"{path}{line}: not YAML of a recipe ({error.problem})") from error
    except Exception as error:  # an impossible date, brackets thousands deep, a wrong tag: PyYAML raises anything
        raise EditError(f"{path}: not YAML that can be read ({brief(error)})") from error
    if not isinstance(values, dict):
        raise EditError(f"{path}: holds no recipe; a mapping of options was expected, such as `facts: FILE`")
    return values


class RecipeLoader(yaml.SafeLoader):
    """Reader of YAML that refuses aliases and duplicate names."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, unless it is an alias: aliases of aliases expand to any number of values."""
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, f"*{event.anchor} is an alias; write the value out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping, unless a name occurs twice: PyYAML would keep its last value."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def facts_in(value: Any) -> list[Fact]:
    """Return the facts that stand in a recipe. Raises EditError or FactError for those that cannot be written."""
    facts = as_facts(value)
    for fact in facts:
        _ = fact.new_object
    check_facts(facts)
    return facts


def defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `default_map` of `apply` for the values of a recipe.

    Raises EditError for an unknown option, one that only the user may give, and a value that the option cannot have.
    """
    options = {_name(option): option for option in apply.params if isinstance(option, click.Option)}
    words: dict[str, Any] = {}
    for name, value in values.items():
        option = options.get(str(name).replace("-", "_"))
        if name == FACTS:
            words["sources"] = [_word(FACTS, value)]
        elif option is None:
            close = difflib.get_close_matches(str(name), [FACTS, *options], 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join([FACTS, *options])}"
            raise EditError(f"{name} is not known; {hint}")
        elif option.name == CONSENT:
            raise EditError(f"{name} is for you to say: leave it out, and give `ffedit run --trust-remote-code`")
        elif isinstance(value, bool) != option.is_flag or (
            isinstance(value, dict | list | None) and not option.multiple
        ):
            expected = "true or false" if option.is_flag else "one value"
            raise EditError(f"{name} is {show(value)}; {expected} was expected")
        elif isinstance(value, dict):
            words[str(option.name)] = [f"{inner}={_word(f'{name}.{inner}', number)}" for inner, number in value.items()]
        elif option.multiple:
            words[str(option.name)] = [_word(name, word) for word in (value if isinstance(value, list) else [value])]
        else:
            words[str(option.name)] = value if option.is_flag else _word(name, value)
    return words


def _word(name: str, value: Any) -> str:
    """Return a value as a word of a command line, in JSON if it is no text. Raises EditError if it cannot be one."""
    try:
        encoded = os.fsencode(word := value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError) as error:  # a date, a lone surrogate, an integer of thousands of digits
        raise EditError(
            f"{name}: {brief(error)}; another value was expected, or one between quotation marks"
        ) from error
    if b"\0" in encoded:
        raise EditError(f"{name} is {show(word)}, which holds a NUL character; another value was expected")
    return word


def _name(option: click.Option) -> str:
    """Return the name of an option in a recipe: its first long form, `fact_token` for `--fact-token`."""
    return next(form for form in option.opts if form.startswith("--"))[2:].replace("-", "_")
