"""Show the result of an edit in a few lines: whether each fact took, what else moved, which answers became worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from ffedit.display.terminal.tables import folded, plain_table, with_more
from ffedit.evaluator import FactScores, Report
from ffedit.evaluator.scores import Continuation
from ffedit.evaluator.verdict import BREAKING, BREAKS, knew_previous, took
from ffedit.facts.text import counted, quoted

MOST_ROWS = 8
MOST_PROMPT, MOST_OLD = 60, 20
# The answers that an edit should leave as they were, by the score that is measured on them.
KINDS = {
    "specificity": "neighbor",
    "same_subject": "other fact",
    "locality": "unrelated question",
    "keep": "kept answer",
}


@dataclass(frozen=True)
class Line:
    """Parts in one line, which is broken between parts only: a part may be a command to copy."""

    parts: Sequence[Text]
    separator: str = " · "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield as few lines as the width allows; a part that is wider than the console is wrapped."""
        line = Text()
        for part in self.parts:
            if line and cell_len(line.plain + self.separator + part.plain) > options.max_width:
                yield line
                line = Text("  ")
            elif line:
                line.append(self.separator, style="dim")
            line.append_text(part)
        yield line


def outcome(report: Report, about: Sequence[str]) -> RenderableType:
    """Render a line for each fact, a line of counts over all prompts, and `about` as the last line."""
    facts = list(zip(report.facts_before, report.facts_after or (), strict=True))
    first = sorted(facts, key=lambda sides: took(sides[1]))[:MOST_ROWS]  # facts that did not take come first
    lines: list[RenderableType] = [_fact(report, *sides) for sides in first]
    if len(facts) > len(first):
        lines.append(Text(f"… and {len(facts) - len(first)} more facts", style="dim"))
    return Group(*lines, Line([*map(Text, _counts(report))]), Line([*map(Text, about)]))


def worse(report: Report) -> RenderableType | None:
    """Render the first answers that the edit made wrong, each prompt once; None if there are none."""
    asked = ((kind, sides) for kind in KINDS for sides in _asked(report, kind))
    wrong = {(kind, b.prompt): (b, a) for kind, (b, a) in asked if b.right and not a.right}
    if not wrong:
        return None
    table = plain_table(*folded("changed for the worse", "before", "after", ""))
    for before, after in list(wrong.values())[:MOST_ROWS]:
        answers = (Text(side.says or "(nothing)") for side in (before, after))
        table.add_row(Text(before.prompt), *answers, Text(KINDS[before.score], style="dim"))
    return with_more(table, len(wrong) - MOST_ROWS)


def _fact(report: Report, before: FactScores, after: FactScores) -> Line:
    fact, moved = after.fact, _lost(_of_fact(before, after, "same_subject"))
    old = fact.previous if fact.previous is not None and knew_previous(before) else quoted(before.says, MOST_OLD)
    if not took(after):
        likelier = f", but {quoted(fact.previous or '')} is still likelier" if after.scores.generation else ""
        status = Text(f"DID NOT TAKE: it says {quoted(after.says)}{likelier}", style="bold red")
    elif took(before):
        status = Text("nothing to change: it said so before", style="bold green")
    elif report.verdict.outcome in ("took narrowly", "took, but text breaks"):
        status = Text(report.verdict.outcome, style="bold yellow")
    elif moved:
        facts = "one other fact" if moved == 1 else f"{moved} other facts"
        status = Text(f"took; {facts} moved", style="bold yellow")
    else:
        status = Text("took", style="bold green" if report.verdict.outcome != "took with damage" else "bold yellow")
    prompt = fact.text if len(fact.text) <= MOST_PROMPT else f"{fact.text[: MOST_PROMPT - 1]}…"
    return Line([Text(prompt, style="bold"), Text(f"{old} → {fact.new_object}"), status], "   ")


def _counts(report: Report) -> Iterator[str]:
    """Yield how many wordings say the new object, how many other answers are as before, and whether text is fluent."""
    after, verdict = report.facts_after or (), report.verdict
    if verdict.facts > 1:
        yield f"{verdict.took} of {verdict.facts} facts took"
    wordings = [bool(fact.scores.generation) for fact in after]
    wordings += [bool(now.right) for _, now in _asked(report, "paraphrase")]
    yield f"says {'it' if verdict.facts == 1 else 'them'} in {sum(wordings)} of {counted(len(wordings), 'wording')}"
    for score, name in KINDS.items():
        sides = _asked(report, score)
        known = sum(bool(before.right) for before, _ in sides)
        if known:
            label = name if known == len(sides) else f"known {name}"
            yield f"{known - _lost(sides)} of {counted(known, label)} as before"
        elif sides:
            yield f"{counted(len(sides), name)} asked, none known before"
    yield _fluency(report)


def _fluency(report: Report) -> str:
    """Say whether text breaks. A rise that so few texts can have by chance is no break, but its figures are shown."""
    if report.verdict.damage.keys() & BREAKING.keys():
        return "TEXT BREAKS"
    old, new = report.before.degenerate, report.after and report.after.degenerate
    if report.after is not None and old is not None and new is not None and new - old > BREAKS:
        special = (report.after.special_tokens or 0) - (report.before.special_tokens or 0)
        what = "is special tokens or repeats" if 2 * special > new - old else "repeats"
        return f"{new:.0%} of its text {what}, {old:.0%} before"
    return "text as fluent as before"


def _asked(report: Report, score: str) -> list[tuple[Continuation, Continuation]]:
    """Return the continuations before and after of all prompts that `score` is measured on."""
    facts = zip(report.facts_before, report.facts_after or (), strict=True)
    return list(chain.from_iterable(_of_fact(*sides, score) for sides in facts))


def _of_fact(before: FactScores, after: FactScores, score: str) -> list[tuple[Continuation, Continuation]]:
    return [sides for sides in zip(before.asked, after.asked, strict=True) if sides[0].score == score]


def _lost(sides: Sequence[tuple[Continuation, Continuation]]) -> int:
    return sum(bool(before.right) and not after.right for before, after in sides)
