"""What a person sees: values in, rich renderables out. Nothing here prints.

Everything reads the same without colour and through a pipe: colour repeats what words, signs or shade
characters say. Text from models and files goes in as `Text`, never as markup: brackets in a prompt stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ffedit.averages import averages_table, compare_layers
from ffedit.describe import anatomy_table, environment, model_line, plain_table, ranges
from ffedit.evaluator import Report, Scores
from ffedit.heat import heat_map, layer_choice
from ffedit.picture import number
from ffedit.verdict import DRIFTED, fell, verdict

MOST_SAYINGS = 8
# name of a score: (what should happen to it, what it says)
MEANINGS = {
    "efficacy": ("up", "new beats old"),
    "paraphrase": ("up", "in other wordings"),
    "specificity": ("keep", "neighbors hold"),
    "same_subject": ("keep", "other facts hold"),
    "score": ("up", "harmonic mean"),
    "generation": ("up", "says new object"),
    "drift": ("zero", "nats per token"),
}
WANTED = {"paraphrase": "paraphrases", "specificity": "neighbors", "same_subject": "same_subject prompts"}


def before_after(report: Report) -> Table:
    """One row per measured score. Beside a rate stands its magnitude, a mean difference of probability."""
    both = report.after is not None
    table = plain_table()
    table.add_column("score", no_wrap=True)
    table.add_column("should", style="dim", no_wrap=True)
    table.add_column("before" if both else "now", justify="right", no_wrap=True)
    if both:
        table.add_column("after", justify="right", no_wrap=True)
        table.add_column("change", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    missing = []
    for name, (should, meaning) in MEANINGS.items():
        old = getattr(report.before, name)
        new = getattr(report.after, name) if both else None
        if old is None and new is None:
            missing.append(name)
            continue
        cells: list[Text] = [_rate(report.before, name)]
        if report.after is not None:
            cells += [_rate(report.after, name), _change(name, old, new)]
        table.add_row(Text(name), Text(should if both else ""), *cells, Text(meaning))
    table.caption = _footnote(report, missing)
    table.caption_justify = "left"
    return table


def _rate(scores: Scores, name: str) -> Text:
    value = getattr(scores, name)
    if value is None:
        return Text("")
    magnitude = getattr(scores, f"{name}_magnitude", None)
    text = Text(number(value) if name == "drift" else _share(value))
    beside = "" if magnitude is None else f" ({_signed(magnitude)})"
    any_beside = any(getattr(scores, f"{other}_magnitude", None) is not None for other in MEANINGS)
    return text.append(beside.ljust(8 if any_beside else 0), style="dim")


def _share(rate: float) -> str:
    """A rate with two decimals, which never says 1.00 or 0.00 of something that is not."""
    if rate in (0, 1) or 0.005 <= rate < 0.995:
        return f"{rate:.2f}"
    return f"{rate:.3f}" if 0.0005 <= rate < 0.9995 else f"{rate:.4f}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 and number(value) != '0.00' else ''}{number(value)}"


def _change(name: str, old: float | None, new: float | None) -> Text:
    if old is None or new is None:
        return Text("!" if new is not None and name == "drift" and new > DRIFTED else "", style="bold red")
    change = new - old
    if name in ("specificity", "same_subject"):
        return Text(f"{_signed(change)} !", style="bold red") if fell(old, new) else Text(_signed(change))
    return Text(_signed(change), style="green" if change > 0 else "red" if change < 0 else "")


def _footnote(report: Report, missing: Sequence[str]) -> Text:
    lines = []
    measured = [getattr(report.before, f"{name}_magnitude", None) for name in MEANINGS]
    if any(value is not None for value in measured):
        lines.append("in brackets: mean difference of probability")
    hints = [f"{name} (give {WANTED[name]})" for name in missing if name in WANTED]
    if hints:
        lines.append(f"nothing to measure: {', '.join(hints)}")
    return Text("\n".join(lines), style="dim not italic")


def what_it_says(report: Report) -> RenderableType:
    """The facts' prompts with what the model says to each by itself, before and after."""
    prompts = [score.fact.text for score in report.facts_before]
    before = [score.says for score in report.facts_before]
    after = None if report.facts_after is None else [score.says for score in report.facts_after]
    return sayings(prompts, before, after)


def sayings(prompts: Sequence[str], before: Sequence[str], after: Sequence[str] | None = None) -> RenderableType:
    """Completions, side by side with those of an edited model where there are any; the first few of many."""
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
    """What went wrong, on one line; print it with `soft_wrap=True` so that it stays one."""
    line = Text("error: ", style="bold red")
    return line.append(" ".join(message.split()), style="not bold default")


@dataclass(frozen=True)
class Commands:
    """Commands to type next, broken between arguments with a backslash so that they can be copied.

    Print them with `soft_wrap=True`, so that an argument wider than the console stays whole.
    """

    commands: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A heading and one block per command."""
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
    """What to type next."""
    return Commands(tuple(commands))


__all__ = [
    "anatomy_table",
    "averages_table",
    "before_after",
    "compare_layers",
    "environment",
    "error_line",
    "heat_map",
    "layer_choice",
    "model_line",
    "next_steps",
    "ranges",
    "sayings",
    "verdict",
    "what_it_says",
]
