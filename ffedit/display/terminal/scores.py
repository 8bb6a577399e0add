"""Scores as tables, what the model says, the verdict on an edit, and whether its key or its value failed.

A failure is stated in words and not only by a colour. The advice names only what is possible for this model and these
facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from ffedit.algebra.bootstrap import Interval
from ffedit.display.terminal.tables import Fitting, folded, left, plain_table, ranges, right, with_more
from ffedit.editor.checks import in_reach
from ffedit.editor.edit import Edit
from ffedit.editor.methods import METHODS
from ffedit.editor.provenance import ValueSearch, value_searches
from ffedit.evaluator import METRICS, Report, headline_scores
from ffedit.evaluator.verdict import DRIFTED, ENOUGH, texts, took
from ffedit.facts.text import counted, number, quoted
from ffedit.model.editable import Editable

STYLES = {"took": "bold green", "nothing to change": "bold green", "no edit": "", "did not take": "bold red"}
# Probability below which a new object was not reached, if the search aimed at a loss instead of a probability.
REACHED = 0.5
WANTED = {"paraphrase": "paraphrases", "specificity": "neighbors", "same_subject": "same_subject prompts"}
MOST_SAYINGS = 8
# Tokens of a new object that one value makes a model say (`docs/your-file.md`).
MOST_TOKENS = 20
# Width of the column of meanings, so that the table fits into 80; a longer meaning, of another package, is folded.
MEANING = 23


def before_after(report: Report) -> Fitting:
    """Render the measured headline scores and all damaged scores; a narrow terminal shows fewer columns."""
    beside = ("prompts", "direction", "meaning") if report.after is not None else ("prompts", "meaning")
    return Fitting([_headline(report, beside[:count]) for count in range(len(beside), -1, -1)])


def _headline(report: Report, beside: Collection[str]) -> Table:
    """Render the table of `before_after` with the columns that `beside` names; for many facts, with intervals."""
    sides = [scores for scores in (report.before, report.after) if scores is not None]
    with_intervals, counts = len(sides) == 2 and len(report.facts_before) >= ENOUGH, _prompts(report)
    (prompts,) = right("prompts")
    extra = {"prompts": prompts, "meaning": Column("", style="dim", max_width=MEANING)}
    shown = [name for name in extra if name in beside and not (with_intervals and name == "meaning")]
    table = _table(report, False, *(extra[name] for name in shown), direction="direction" in beside)
    for name in dict.fromkeys((*headline_scores(), *report.verdict.damage)):
        if _measured(report, name):
            cells = [_shown(name, getattr(scores, name), {}) for scores in sides]
            if report.after is not None:
                cells.append(_change(report, name, report.changes if with_intervals else {}))
            direction = [METRICS[name].direction] if "direction" in beside else []
            about = {"prompts": str(counts[name] or ""), "meaning": METRICS[name].meaning}
            table.add_row(name, *direction, *cells, *(about[name] for name in shown))
    lines = ["change: mean over facts and its 95 % interval over subjects"] if with_intervals else []
    return captioned(table, [*lines, *_not_measured(report)])


def _prompts(report: Report) -> Counter[str]:
    """Count the prompts that each score of the headline is measured on."""
    facts, asked = report.facts_before, (prompt for fact in report.facts_before for prompt in fact.asked)
    counts = Counter(prompt.score for prompt in asked)
    per_fact = dict.fromkeys(("efficacy", "generation"), len(facts))
    return counts | Counter(per_fact) | Counter(dict.fromkeys(("degenerate", "greedy_entropy"), texts(facts)))


def all_scores(report: Report) -> Fitting:
    """Render all measured scores, with 95 % intervals where there are at least two facts, and by kind of probe.

    A narrow terminal has the intervals below the scores, also instead of the direction, or none.
    """
    forms = ((" ", True), ("\n", True), ("\n", False)) if report.intervals_before else ()
    return Fitting([_all_scores(report, *form) for form in (*forms, (None, True))])


def _all_scores(report: Report, gap: str | None, directed: bool) -> Table:
    """Render the table of `all_scores`, with `gap` before each interval; None: without intervals."""
    old, new, changed = (
        {} if gap is None else intervals
        for intervals in (report.intervals_before, report.intervals_after, report.changes)
    )
    directed, gap = directed and report.after is not None, gap or ""  # a direction is that of a change
    table = _table(report, bool(old), direction=directed)

    def add(name: str, direction: str, *cells: Text) -> None:
        table.add_row(Text(name), *([direction] if directed else []), *cells)

    for name, metric in METRICS.items():
        if _measured(report, name):
            cells = [_shown(name, getattr(report.before, name), old, gap)]
            if report.after is not None:
                cells += [_shown(name, getattr(report.after, name), new, gap), _change(report, name, changed, gap)]
            add(name, metric.direction, *cells)
    before, after_by_kind = report.kinds
    for probe, kinds in groupby(sorted(before), key=lambda kind: kind.partition("/")[0]):
        add(f"{probe}/", "")
        for kind in kinds:
            cells = [_shown(kind, before[kind], old, gap)]
            if report.after is not None:
                change = Text(signed(after_by_kind[kind] - before[kind]))
                cells.append(_shown(kind, after_by_kind[kind], new, gap))
                cells.append(change.append_text(_range(changed.get(kind), signed, gap)))
            add(f"  {kind.partition('/')[2]}", "", *cells)
    known = sum(fact.scores.knew == 1 for fact in report.facts_before)
    lines = [
        *(["in brackets: 95 % intervals over subjects"] if old else []),
        "teacher_forced…, …token_accuracy and …argmax are teacher-forced, not free generation",
        "teacher_forced_gap and token_accuracy_gap are the differences to generation",
    ]
    now = report.known[1] or report.known[0]
    if known and now.generation is not None:
        lines.append(f"generation among {counted(known, 'fact')} that the model knew: {_share(now.generation)}")
    return captioned(table, [*lines, *_not_measured(report), *map(str, report.left_out)])


def headline_table(rows: Sequence[Sequence[str]]) -> Table:
    """Render the headline figures of a benchmark, a column for each method; the first row has the headings."""
    (first, *methods), *figures = rows
    table = plain_table(*left(first), *right(*methods))
    for row in figures:
        table.add_row(*row)
    return table


def _table(report: Report, wide: bool, *more: Column, direction: bool = True) -> Table:
    measured = ("before", "after", "change") if report.after is not None else ("now",)
    should = [Column("should", style="dim", no_wrap=True)] if direction else []
    return plain_table(*folded("score"), *should, *(left if wide else right)(*measured), *more)


def captioned(table: Table, lines: Sequence[str]) -> Table:
    """Put lines below a table, and return it."""
    table.caption, table.caption_justify = Text("\n".join(lines), style="dim not italic"), "left"
    return table


def _not_measured(report: Report) -> list[str]:
    """Name, in a line, the scores that had no prompts to be measured on, with the prompts to give."""
    hints = [f"{name} (give {needed})" for name, needed in WANTED.items() if not _measured(report, name)]
    return [f"not measured: {', '.join(hints)}"] if hints else []


def _measured(report: Report, name: str) -> bool:
    return any(getattr(scores, name) is not None for scores in (report.before, report.after) if scores is not None)


def _shown(name: str, value: float | None, intervals: Mapping[str, Interval], gap: str = " ") -> Text:
    if value is None:
        return Text("")
    return Text(figure(name, value)).append_text(_range(intervals.get(name), partial(figure, name), gap))


def _range(interval: Interval | None, words: Callable[[float], str], gap: str) -> Text:
    return Text("") if interval is None else Text(f"{gap}{interval.ends(words)}".rstrip(), style="dim")


def figure(name: str, value: float) -> str:
    """Format the value of a score, or of a kind of it ("locality/Alias"); shares are never rounded to 0 or 1."""
    return _share(value) if METRICS[name.partition("/")[0]].unit == "share" and value >= 0 else number(value)


def _share(rate: float) -> str:
    """Format a rate with two decimals, or more near 0 and 1: "0.00" and "1.00" are exact."""
    if rate in (0, 1) or 0.005 <= rate < 0.995:
        return f"{rate:.2f}"
    return f"{rate:.3f}" if 0.0005 <= rate < 0.9995 else f"{rate:.4f}"


def signed(value: float) -> str:
    """Format a change with its sign."""
    return f"{'+' if value > 0 and number(value) != '0.00' else ''}{number(value)}"


def _change(report: Report, name: str, intervals: Mapping[str, Interval], gap: str = " ") -> Text:
    """Render the change of a score with its interval; for the worse it is marked."""
    old, new = getattr(report.before, name), getattr(report.after, name)
    if old is None or new is None:
        return Text("!" if new is not None and name == "drift" and new > DRIFTED else "", style="bold red")
    change, style = signed(new - old), ""
    if name in report.verdict.damage:
        change, style = f"{change} !", "bold red"
    elif METRICS[name].direction == "up":
        style = "green" if new > old else "red" if new < old else ""
    return Text.assemble((change, style), _range(intervals.get(name), signed, gap))


def what_it_says(report: Report) -> RenderableType:
    """Render the facts' prompts with the model's own completions, before and after."""
    prompts = [score.fact.text for score in report.facts_before]
    sides = [side for side in (report.facts_before, report.facts_after) if side is not None]
    return sayings(prompts, *([score.says for score in side] for side in sides))


def sayings(prompts: Sequence[str], before: Sequence[str], after: Sequence[str] | None = None) -> RenderableType:
    """Render the first completions, side by side with those of an edited model where there are any."""
    headings = ("prompt", "it says") if after is None else ("prompt", "before", "after")
    table = plain_table(*folded(*headings))
    for i, prompt in enumerate(prompts[:MOST_SAYINGS]):
        cells = [Text(prompt), Text(before[i] or "(nothing)")]
        if after is not None:
            cells.append(Text(after[i] or "(nothing)", style="bold" if after[i] != before[i] else ""))
        table.add_row(*cells)
    return with_more(table, len(prompts) - MOST_SAYINGS)


def verdict_view(
    report: Report, edit: Edit | None = None, editable: Editable | None = None, whole: bool = True
) -> Text | None:
    """Render the verdict, a line for each caveat about the state before the edit, and, for an edit, what to try.

    Unless `whole`, the verdict on an edit that damaged nothing is left out; None where nothing is left.
    """
    verdict, good = report.verdict, report.verdict.outcome in ("took", "nothing to change", "no edit")
    words = [verdict.text] if whole or not good else []
    if edit is not None and editable is not None and not good:
        failed = _failed(report, edit)
        missed = [(new, search) for new, search in failed if search.probability < (search.wanted or REACHED)]
        words += [*_why(missed), *_shorter(failed), *_advice(editable, edit, missed)]
    lines = [Text(" ".join(words), style=STYLES.get(verdict.outcome, "bold yellow"))] if words else []
    lines += [Text(caveat, style="yellow") for caveat in verdict.caveats]
    return Text("\n").join(lines) if lines else None


def _failed(report: Report, edit: Edit) -> list[tuple[str, ValueSearch]]:
    """List the new objects that the model does not say, each with how far the search for its value came."""
    failed = {score.fact.text for score in report.facts_after or () if not took(score)}
    return [
        (fact.new_object, search)
        for fact, search in zip(edit.facts, value_searches(edit), strict=True)
        if fact.text in failed and search is not None
    ]


def _shorter(failed: list[tuple[str, ValueSearch]]) -> Iterator[str]:
    """Say which length works if new objects that failed are longer."""
    if long := [search.tokens for _, search in failed if search.tokens > MOST_TOKENS]:
        size = f"this one has {long[0]}" if len(long) == 1 else f"those of {len(long)} facts have up to {max(long)}"
        yield (
            f"One value seldom makes a model say a new object of more than {MOST_TOKENS} tokens, and {size}: give the "
            f"first words, {MOST_TOKENS} tokens at most."
        )


def _why(missed: list[tuple[str, ValueSearch]]) -> Iterator[str]:
    """Say how far the search for a value came, if not far enough; of several facts, for the nearest."""
    if not missed:
        return
    new, search = max(missed, key=lambda pair: pair[1].probability)
    aim = "" if search.wanted is None else f"; {number(search.wanted)} was aimed at"
    which = "" if len(missed) == 1 else f"for {len(missed)} facts no value was found, the nearest for "
    yield (
        f"{which.capitalize()}{quoted(new)} ({counted(search.tokens, 'token')}){' with' if which else ' reached'} the "
        f"probability {number(search.probability)} after {search.steps} of {search.most_steps} steps{aim}."
    )


def _advice(editable: Editable, edit: Edit, missed: list[tuple[str, ValueSearch]]) -> Iterator[str]:
    """Suggest other layers, fewer layers, or more steps where the steps ended before a value was found."""
    about, depth = edit.provenance, len(editable.layers)
    method = METHODS[about["method"]] if about.get("method") in METHODS else METHODS["memit"]
    token = about.get("config", {}).get("key", {}).get("fact_token", "subject_last")
    reach = in_reach(editable, edit.facts, method, range(depth), token) if depth > 1 else range(0)
    options = []
    if others := [layer for layer in reach if layer not in edit.layers]:
        which = f"{others[0]}" if len(others) == 1 else f"N, one of {ranges(others)}"
        options.append(f"another layer (--layers {which})")
    if len(edit.layers) > 1:
        options.append("a single layer (--spread 1)")
    short = [search for _, search in missed if search.tokens <= MOST_TOKENS]
    if steps := [search.steps for search in short if search.steps == search.most_steps]:
        options.append(f"more than {steps[0]} steps (--set value.steps={2 * steps[0]})")
    if options:
        yield f"Try {', or '.join(options)}."
