"""The scores as tables: the headline scores, and all scores with intervals, for `ffedit evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from ffedit.display.terminal.model_table import plain_table
from ffedit.evaluator import Interval, Report, Scores
from ffedit.evaluator.added_metrics import added_metrics
from ffedit.facts.text import number
from ffedit.safety.verdict import DRIFTED, ENOUGH, SPARED, fell

# name of a score: (desired direction, meaning)
MEANINGS = {
    "efficacy": ("up", "new beats old"),
    "paraphrase": ("up", "in other wordings"),
    "specificity": ("keep", "neighbors hold"),
    "same_subject": ("keep", "other facts hold"),
    "score": ("up", "harmonic mean"),
    "generation": ("up", "says new object"),
    "drift": ("zero", "nats per token"),
}
MORE = {
    "teacher_forced": ("up", "all tokens, after true ones"),
    "teacher_forced_gap": ("zero", "teacher_forced − generation"),
    "token_accuracy": ("up", "tokens, after true ones"),
    "token_accuracy_gap": ("zero", "token_accuracy − generation, as in 2502.11177"),
    "paraphrase_generation": ("up", "said in other wordings"),
    "paraphrase_token_accuracy": ("up", "their tokens, after true ones"),
    "portability": ("up", "says what follows"),
    "portability_token_accuracy": ("up", "its tokens, after true ones"),
    "locality": ("keep", "unrelated answers hold"),
    "locality_token_accuracy": ("keep", "given answers' tokens, after true ones"),
    "locality_argmax": ("keep", "their tokens, after true ones"),
    "neighbor_with_edit": ("keep", "neighbors, behind the edit"),
    "divergence": ("zero", "nats, on neighbors"),
    "entropy": ("keep", "bits, of sampled text"),
    "consistency": ("up", "sampled text like references"),
    "perplexity": ("keep", "of generic text"),
    "knew": ("", "says old object"),
}
WANTED = {"paraphrase": "paraphrases", "specificity": "neighbors", "same_subject": "same_subject prompts"}
# Scores that are not shares and are shown as plain numbers.
NUMBERS = ("drift", "divergence", "entropy", "perplexity")


def before_after(report: Report) -> Table:
    """Render one row per measured score, with each rate's magnitude, a mean difference of probability, in brackets.

    For many facts, a change has its interval beside it, and the column of meanings is left out.
    """
    both = report.after is not None
    sure = both and len(report.facts_before) >= ENOUGH
    table = _table(both)
    if not sure:
        table.add_column("", style="dim", overflow="fold")
    missing = []
    for name, (should, meaning) in MEANINGS.items():
        if not _measured(report, name):
            missing.append(name)
            continue
        cells = [_beside(report.before, name)]
        if report.after is not None:
            cells += [_beside(report.after, name), _change(report, name)]
        if sure:
            cells[-1].append_text(_range(report.changes.get(name), _signed))
        table.add_row(Text(name), Text(should if both else ""), *cells, *([] if sure else [Text(meaning)]))
    table.caption = _footnote(report, missing, sure)
    table.caption_justify = "left"
    return table


def all_scores(report: Report) -> Table:
    """Render all measured scores, with 95 % intervals where there are at least two facts, and by kind of probe."""
    both = report.after is not None
    table = _table(both, bool(report.intervals_before))
    for name, (should, _) in {**MEANINGS, **MORE, **dict.fromkeys(added_metrics(), ("", ""))}.items():
        if _measured(report, name):
            table.add_row(Text(name), Text(should if both else ""), *_cells(report, name))
    before, after = report.kinds
    for name, some in groupby(sorted(before), key=lambda kind: kind.partition("/")[0]):
        table.add_row(Text(f"{name}/"))
        for kind in some:
            cells = [_shown(kind, before[kind], report.intervals_before)]
            if both:
                change = Text(_signed(after[kind] - before[kind]))
                cells.append(_shown(kind, after[kind], report.intervals_after))
                cells.append(change.append_text(_range(report.changes.get(kind), _signed)))
            table.add_row(Text(f"  {kind.partition('/')[2]}"), Text(""), *cells)
    known = sum(one.scores.knew == 1 for one in report.facts_before)
    lines = ["in brackets: 95 % intervals over facts"] if report.intervals_before else []
    lines.append("teacher_forced…, …token_accuracy and …argmax are teacher-forced: not what the model says by itself")
    lines.append("gaps to generation: teacher_forced_gap of teacher_forced, token_accuracy_gap of token_accuracy")
    now = report.known[1] or report.known[0]
    if known and now.generation is not None:
        lines.append(f"of the {known} facts that the model knew: generation {_share(now.generation)}")
    lines += map(str, report.left_out)
    table.caption = Text("\n".join(lines), style="dim not italic")
    table.caption_justify = "left"
    return table


def _table(both: bool, wide: bool = False) -> Table:
    table = plain_table()
    table.add_column("score", no_wrap=True)
    table.add_column("should", style="dim", no_wrap=True)
    for heading in ("before", "after", "change") if both else ("now",):
        table.add_column(heading, justify="left" if wide else "right", no_wrap=not wide)
    return table


def _measured(report: Report, name: str) -> bool:
    return any(getattr(scores, name) is not None for scores in (report.before, report.after) if scores is not None)


def _cells(report: Report, name: str) -> list[Text]:
    cells = [_shown(name, getattr(report.before, name), report.intervals_before)]
    if report.after is not None:
        cells.append(_shown(name, getattr(report.after, name), report.intervals_after))
        cells.append(_change(report, name).append_text(_range(report.changes.get(name), _signed)))
    return cells


def _shown(name: str, value: float | None, intervals: Mapping[str, Interval] | None = None) -> Text:
    if value is None:
        return Text("")
    words = number if name in NUMBERS or value < 0 else _share
    return Text(words(value)).append_text(_range((intervals or {}).get(name), words))


def _range(interval: Interval | None, words: Callable[[float], str]) -> Text:
    return Text("") if interval is None else Text(f" [{words(interval.low)}, {words(interval.high)}]", style="dim")


def _beside(scores: Scores, name: str) -> Text:
    value = getattr(scores, name)
    if value is None:
        return Text("")
    magnitude = getattr(scores, f"{name}_magnitude", None)
    text = Text(number(value) if name in NUMBERS else _share(value))
    beside = "" if magnitude is None else f" ({_signed(magnitude)})"
    any_beside = any(getattr(scores, f"{other}_magnitude", None) is not None for other in MEANINGS)
    return text.append(beside.ljust(8 if any_beside else 0), style="dim")


def _share(rate: float) -> str:
    """Format a rate with two decimals, or more near 0 and 1: "0.00" and "1.00" are exact."""
    if rate in (0, 1) or 0.005 <= rate < 0.995:
        return f"{rate:.2f}"
    return f"{rate:.3f}" if 0.0005 <= rate < 0.9995 else f"{rate:.4f}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 and number(value) != '0.00' else ''}{number(value)}"


def _change(report: Report, name: str) -> Text:
    old, new = getattr(report.before, name), getattr(report.after, name)
    if old is None or new is None:
        return Text("!" if new is not None and name == "drift" and new > DRIFTED else "", style="bold red")
    change = new - old
    if name in SPARED:
        return Text(f"{_signed(change)} !", style="bold red") if fell(old, new) else Text(_signed(change))
    if {**MEANINGS, **MORE}.get(name, ("", ""))[0] != "up":
        return Text(_signed(change))
    return Text(_signed(change), style="green" if change > 0 else "red" if change < 0 else "")


def _footnote(report: Report, missing: Sequence[str], sure: bool) -> Text:
    lines = ["change: mean over facts and its 95 % interval"] if sure else []
    measured = [getattr(report.before, f"{name}_magnitude", None) for name in MEANINGS]
    if any(value is not None for value in measured):
        lines.append("in brackets: mean difference of probability")
    hints = [f"{name} (give {WANTED[name]})" for name in missing if name in WANTED]
    if hints:
        lines.append(f"nothing to measure: {', '.join(hints)}")
    return Text("\n".join(lines), style="dim not italic")
