"""The terminal output of commands: functions from values to rich renderables; nothing here prints.

Everything reads the same without colour and through a pipe: colour repeats what words, signs or shade
characters say. Text from models and files is rendered as `Text`, never as markup, so brackets in a prompt stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from ffedit.display.terminal.averages import averages_table, candidates_table, compare_layers
from ffedit.display.terminal.heat_map import heat_map, layer_choice
from ffedit.display.terminal.model_table import environment, memory_table, model_line, plain_table, ranges
from ffedit.display.terminal.scores import all_scores, before_after
from ffedit.evaluator import Report
from ffedit.facts.text import counted, number
from ffedit.layer_choice.calibrate import TIE, Choice
from ffedit.layer_choice.choose import Found
from ffedit.safety.verdict import verdict

MOST_SAYINGS = 8
NO_SITE = "The trace shows no site at the subject's last token"


def why_layer(found: Found, asked: str) -> RenderableType:
    """Say why this layer is edited; `asked` is the value of `--layers`."""
    choice = found.choice
    if found.sweep is not None:
        if not found.kept:
            return compare_layers(found.sweep)
        over = f"remembered from a sweep with {found.sweep.method} over {counted(found.sweep.facts, 'fact')}"
        return Text(f"Layer {found.layer}: {over} (`ffedit cache clear` forgets it).")
    lines: list[RenderableType] = []
    if choice is not None and asked != "auto":
        lines.append(Text(f"{NO_SITE}, so it does not tell the layer."))
    if choice is not None and choice.layer is None:
        lines.append(Text(f"{too_few(choice)}."))
    if choice is not None and found.by == "model":
        lines.append(model_choice(choice, found.layer))
    if found.by == "depth":
        depth = len(found.traces.at_subject)
        lines.append(
            Text(
                f"Layer {found.layer}: the usual depth of published layers in a model of {depth}, for want of a better."
            )
        )
    shown = {"model": "model", "depth": "model", "trace": asked if asked != "auto" else "trace"}.get(found.by, asked)
    return Group(*lines, layer_choice(found.traces, found.layer, shown))


def model_choice(choice: Choice, layer: int | None = None) -> Text:
    """Say which layer was chosen for a model and on what grounds.

    Args:
        choice: the model's choice.
        layer: the layer taken instead, where the chosen one is not among those allowed.
    """
    if choice.layer is None:
        return Text(f"{too_few(choice)}: none is chosen for it.")
    line = Text(f"Layer {choice.layer if layer is None else layer}: ", style="bold")
    words = "" if layer in (None, choice.layer) else f"the layer allowed that comes next to {choice.layer}, "
    scores = ", ".join(f"{row.layer}: {'–' if row.score is None else number(row.score)}" for row in choice.rows)
    words += (
        f"chosen for this model with {choice.method} on {choice.made}, by the score of {choice.written} of the "
        f"{choice.known} calibration facts that it knows (of {choice.asked}) in layers {scores}"
    )
    if choice.prior is not None:
        words += f"; published is {choice.prior} ({choice.source})"
    top = max((row.score or 0.0 for row in choice.rows), default=0.0)
    if any(row.layer == choice.layer and (row.score or 0.0) < top for row in choice.rows):
        where = "the published layer" if choice.prior is not None else "a quarter of the depth"
        words += f"; less than {TIE:g} apart is not told apart, and {choice.layer} is nearest to {where}"
    return line.append(f"{words}. `ffedit cache clear` forgets it.", style="not bold")


def too_few(choice: Choice) -> str:
    """Say that no layer can be chosen for a model because it knows too few calibration facts."""
    return f"The model knows {choice.known} of {choice.asked} calibration facts, too few to choose a layer on them"


def what_it_says(report: Report) -> RenderableType:
    """Render the facts' prompts with the model's own completions, before and after."""
    prompts = [score.fact.text for score in report.facts_before]
    before = [score.says for score in report.facts_before]
    after = None if report.facts_after is None else [score.says for score in report.facts_after]
    return sayings(prompts, before, after)


def sayings(prompts: Sequence[str], before: Sequence[str], after: Sequence[str] | None = None) -> RenderableType:
    """Render the first completions, side by side with those of an edited model where there are any."""
    table = plain_table()
    table.add_column("prompt", overflow="fold")
    table.add_column("it says" if after is None else "before", overflow="fold")
    if after is not None:
        table.add_column("after", overflow="fold")
    for i in range(min(len(prompts), MOST_SAYINGS)):
        cells = [Text(prompts[i]), Text(before[i] or "(nothing)")]
        if after is not None:
            cells.append(Text(after[i] or "(nothing)", style="bold" if after[i] != before[i] else ""))
        table.add_row(*cells)
    if len(prompts) <= MOST_SAYINGS:
        return table
    return Group(table, Text(f" … and {len(prompts) - MOST_SAYINGS} more", style="dim"))


def error_line(message: str) -> Text:
    """Render an error message on one line; print it with `soft_wrap=True` so that it stays one."""
    line = Text("error: ", style="bold red")
    return line.append(" ".join(message.split()), style="not bold default")


@dataclass(frozen=True)
class Commands:
    """Commands to type next, broken between arguments with a backslash so that they can be copied.

    Print them with `soft_wrap=True`, so that an argument wider than the console stays whole.
    """

    commands: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a heading and one block per command."""
        yield Text("Next:", style="bold")
        for command in self.commands:
            for line in _broken(command, options.max_width - 4):
                yield Text(f"  {line}", style="cyan")


def _broken(command: str, width: int) -> list[str]:
    lines = [""]
    for word in re.findall(r"""(?:[^\s"']|"(?:\\.|[^"\\])*"|'[^']*'|["'])+""", command):
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) > width:
            lines[-1] += " \\"
            lines.append("  ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return lines


def next_steps(commands: Sequence[str]) -> Commands:
    """Suggest commands to type next."""
    return Commands(tuple(commands))


__all__ = [
    "all_scores",
    "averages_table",
    "before_after",
    "candidates_table",
    "compare_layers",
    "environment",
    "error_line",
    "heat_map",
    "layer_choice",
    "memory_table",
    "model_choice",
    "model_line",
    "next_steps",
    "ranges",
    "sayings",
    "verdict",
    "what_it_says",
    "why_layer",
]
