"""Every option of every command, with a value that it cannot have, is one line and no traceback."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from shell import process

from ffedit.cli import cli

# A wrong value by the type of an option.
WRONG = {click.IntRange: "-1", click.FloatRange: "-1", click.types.IntParamType: "x", click.Choice: "no-such-choice"}


def leaves(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with the words that call it."""
    if not isinstance(group, click.Group):
        yield words, group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from leaves(command, (*words, name))


COMMANDS = dict(leaves(cli))
WRONG_WORDS = [
    (*words, option.opts[0], *[WRONG[type(option.type)]] * option.nargs)
    for words, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option) and type(option.type) in WRONG
]
UNKNOWN = [(*words, "--no-such-option") for words in COMMANDS]
# Options that take a value, without one.
BARE = [
    (*words, option.opts[0])
    for words, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag
]
CODE = """
import ast, contextlib, io, sys
from ffedit.cli import invoke
for words in ast.literal_eval(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = invoke(list(words))
    line = said.getvalue()
    if code not in (1, 2) or not line.startswith("error: ") or line.count("\\n") != 1:
        print(words, code, line)
print("imported:", *(name for name in ("torch", "transformers") if name in sys.modules))
"""


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("cases", [WRONG_WORDS, UNKNOWN, BARE], ids=["wrong value", "unknown option", "no value"])
def test_a_wrong_option_is_one_line_without_torch(cases: list[tuple[str, ...]]) -> None:
    assert len(cases) >= len(COMMANDS) >= 20
    done = process("-c", CODE, repr(cases))
    assert (done.code, done.out, done.err) == (0, "imported:\n", "")
