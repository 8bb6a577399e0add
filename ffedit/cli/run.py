"""`ffedit run`: an edit made from a recipe, a YAML file of the options of `ffedit apply`."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich_click as click
import yaml

from ffedit.cli import work
from ffedit.cli.apply import apply
from ffedit.cli.export import export
from ffedit.cli.options import FILE, LOADING
from ffedit.cli.surface import is_first_process
from ffedit.errors import EditError, FFEditError, brief
from ffedit.facts.fact import show
from ffedit.files.atomic import check_free
from ffedit.files.placing import beside

FACTS = "facts"  # a file, as FACTS of `apply`, or the facts themselves
CONSENT = "trust_remote_code"  # whoever wrote a recipe cannot give it for whoever runs it
MOST = 1_000_000  # values in a recipe: aliases of aliases would be any number
EXPORT = "export"  # a folder, as of `apply`, or a list of the options of `export`


@click.command()
@click.argument("recipe", type=FILE)
@click.option("--force", is_flag=True, help="Replace existing folders, and save an edit even if it did not take.")
@LOADING[CONSENT]
@click.option("--quiet", "-q", is_flag=True, help="Show nothing but errors.")
@click.pass_context
def run(current: click.Context, /, recipe: Path, trust_remote_code: bool, **flags: bool) -> None:
    """Make the edit that RECIPE describes: a YAML file of the options of `apply`, and of the exports to make.

    `ffedit apply --save-recipe FILE` writes a recipe, `ffedit show --recipe` shows the recipe of an edit. Paths are
    relative to the working folder.
    """
    values, lines = read_recipe(recipe)
    consent = ["--trust-remote-code"] if trust_remote_code else []
    given = [name for name, is_set in flags.items() if is_set]
    values |= dict.fromkeys(given, True)
    exports = values.pop(EXPORT) if isinstance(values.get(EXPORT), list) else []
    with beside(Path(tempfile.gettempdir()) / "ffedit-run") as folder:
        scratch = ["--scratch"] if exports and "out" not in values else []
        if scratch:
            values["out"] = str(folder / "edit")
        export_words = []
        for i, how in enumerate(exports):
            options = arguments(export, how, recipe, lines, f"{EXPORT}.{i}.")
            export_words.append([*consent, *(f"--{name}" for name in given), *options])
            check_export(export_words[i], recipe, lines, f"{EXPORT}.{i}.")
        where = f"{recipe}:{lines.get(FACTS, 1)}: {FACTS}"
        if isinstance(values.get(FACTS), list):
            facts = folder / "facts.json"
            facts.write_text(_json(values[FACTS], where), encoding="utf-8")
            values[FACTS] = str(facts)
        source = [_word(values.pop(FACTS), where)] if FACTS in values else []
        words = [*arguments(apply, values, recipe, lines), *consent, *scratch, *source]
        with named(recipe, lines):
            context = apply.make_context("run", words, parent=current)
        apply.invoke(context)
        makes = is_first_process() and not context.params["dry_run"]
        for words in export_words if makes else ():
            export.invoke(export.make_context("run", [str(values["out"]), *words], parent=current))


def check_export(words: Sequence[str], recipe: Path, lines: Mapping[str, int], prefix: str) -> None:
    """Raise EditError for options of an export that are wrong; they are used after a long computation."""
    options = click.Command("export", params=[each for each in export.params if isinstance(each, click.Option)])
    with named(recipe, lines, prefix):
        asked = options.make_context("export", list(words)).params
        check_free(asked["out"], asked["force"])


def read_recipe(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a recipe: its values, and by dotted name ("set.value.steps", "export.0.out") the line of each, from 1."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"{path}: cannot be read ({error})") from error
    lines: dict[str, int] = {}
    try:
        values = yaml.safe_load(text)
        _number(yaml.compose(text, yaml.SafeLoader), path, lines)
    except FFEditError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise EditError(f"{path}{line}: not YAML ({error.problem})") from error
    except Exception as error:  # a date that is none, brackets thousands deep, a tag that lies: PyYAML raises anything
        raise EditError(f"{path}: not YAML that can be read ({brief(error)})") from error
    if not isinstance(values, dict):
        raise EditError(f"{path}: holds no recipe; a mapping of options was expected, such as `facts: FILE`")
    return values, lines


def _number(node: yaml.Node | None, path: Path, lines: dict[str, int], prefix: str = "") -> None:
    """Add the line of each value below a node by its dotted name; EditError for a name that stands there twice."""
    items: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(i, value, value) for i, value in enumerate(node.value)]
    for own, start, value in items:
        name, line = f"{prefix}{own}", start.start_mark.line + 1
        if name in lines:
            raise EditError(f"{path}:{line}: {name} stands there twice, first in line {lines[name]}")
        if len(lines) == MOST:
            raise EditError(f"{path}: has more than {MOST:,} values, counted as often as aliases repeat them")
        lines[name] = line
        _number(value, path, lines, f"{name}.")


def _json(value: Any, where: str) -> str:
    """Return a value of a recipe as JSON; EditError for one that JSON has not, such as a date."""
    try:
        return json.dumps(value)
    except TypeError as error:
        raise EditError(f"{where}: JSON has no such value ({error}); put it between quotation marks") from error


def arguments(
    command: click.Command, values: Mapping[str, Any], recipe: Path, lines: Mapping[str, int], prefix: str = ""
) -> list[str]:
    """Return the command line of options that a recipe gives by name; `prefix` is theirs in `lines`."""
    options = {
        _name(option): option for option in command.params if isinstance(option, click.Option) and not option.hidden
    }
    if not isinstance(values, Mapping):
        line = lines.get(prefix.removesuffix("."), 1)
        raise EditError(f"{recipe}:{line}: {prefix.removesuffix('.')} is {show(values)}; options by name were expected")
    words = []
    for name, value in values.items():
        where = f"{recipe}:{lines.get(prefix + str(name), 1)}"
        option = options.get(str(name).replace("-", "_"))
        if option is None:
            known = [*options] if prefix else [FACTS, *options]
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise EditError(f"{where}: {name} is not known; {hint}")
        if option.name == CONSENT:
            raise EditError(
                f"{where}: {name} is for you to say: leave it out, and give `ffedit run --trust-remote-code`"
            )
        flag = option.opts[-1] if option.opts[-1].startswith("--") else option.opts[0]
        if isinstance(value, bool) != option.is_flag or (isinstance(value, dict | list) and not option.multiple):
            expected = "true or false" if option.is_flag else "one value"
            raise EditError(f"{where}: {name} is {show(value)}; {expected} was expected")
        if option.is_flag:
            words += [flag] if value else []
        elif isinstance(value, dict):
            for inner, number in value.items():
                setting = f"{inner}={number if isinstance(number, str) else _json(number, where)}"
                try:
                    work.check_setting(setting)
                except FFEditError as error:
                    raise EditError(f"{recipe}:{lines.get(f'{prefix}{name}.{inner}', 1)}: {error}") from error
                words += [flag, setting]
        else:
            for word in value if isinstance(value, list) else [value]:
                words += [flag, _word(word, f"{where}: {name}")]
    return words


def _word(value: Any, where: str) -> str:
    """Return a value as a word of a command line; EditError for one that no shell could pass on."""
    try:
        encoded = os.fsencode(word := str(value))
    except ValueError as error:  # a lone surrogate, or an integer of thousands of digits
        raise EditError(f"{where}: {brief(error)}; another value was expected") from error
    if b"\0" in encoded:
        raise EditError(f"{where} is {show(word)}, which holds a NUL character; another value was expected")
    return word


def _name(option: click.Option) -> str:
    """Return the name of an option in a recipe: its first long form, `fact_token` for `--fact-token`."""
    return next(form for form in option.opts if form.startswith("--"))[2:].replace("-", "_")


@contextmanager
def named(recipe: Path, lines: Mapping[str, int], prefix: str = "") -> Iterator[None]:
    """Name the recipe, and the line where one is known, in an error of its options; `prefix` is theirs in `lines`."""
    where = lines.get(prefix.removesuffix("."))
    try:
        yield
    except FFEditError as error:
        raise EditError(f"{recipe}{f':{where}' if where else ''}: {error}") from error
    except click.UsageError as error:
        option = error.param if isinstance(error, click.BadParameter) else None
        line = lines.get(prefix + _name(option), where) if isinstance(option, click.Option) else where
        raise EditError(f"{recipe}{f':{line}' if line else ''}: {error.format_message()}") from error
