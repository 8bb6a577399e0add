"""Show what an edit got wrong, and whether its key or its value failed, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from ffedit.display.terminal.scores import captioned
from ffedit.display.terminal.tables import folded, plain_table, spaced, with_more
from ffedit.evaluator import Explanation, WrongAnswer
from ffedit.facts.text import counted, number, quoted

MOST_WRONG = 12
LEGEND = (
    "value: with all of δ at the subject, and nowhere else, the answer is wrong, too",
    "key: the answer is then right, but the subject received only uᵀk of δ, or other tokens received some",
    "for a neighbor, uᵀk is the largest share that one of its tokens received",
)


def explanation_view(explanation: Explanation) -> RenderableType:
    """Render how many answers are wrong because of the key or the value, and the first of them with their reasons."""
    if explanation.reason:
        return Text(f"Not explained, key or value: {explanation.reason}.", style="yellow")
    wrong, asked = explanation.wrong, sum(explanation.asked.values())
    if not wrong:
        return Text(f"Nothing to explain: of {counted(asked, 'answer')}, the edit got none wrong.")
    names = ("asked", "wrong", "key", "value")
    table = plain_table("score", *(Column(name, justify="right") for name in names))
    for score, counts in explanation.counts.items():
        table.add_row(score, *(str(counts[name]) for name in names))
    parts: list[RenderableType] = [Text(f"The edit got {len(wrong)} of {counted(asked, 'answer')} wrong."), table]
    if explained := [answer for answer in wrong if answer.failed is not None]:
        parts.append(with_more(_answers(explained[:MOST_WRONG]), len(explained) - MOST_WRONG))
    if others := [answer for answer in wrong if answer.failed is None]:
        lines = [f"not explained: {quoted(answer.prompt, 60)}: {answer.reason}" for answer in others[:MOST_WRONG]]
        parts.append(with_more(Text("\n".join(lines)), len(others) - MOST_WRONG))
    return spaced(*parts)


def _answers(wrong: Sequence[WrongAnswer]) -> Table:
    table = plain_table("failed", *folded("prompt", "answer", "it says", "with δ alone", "uᵀk"))
    for answer in wrong:
        forced = "" if answer.forced is None else answer.forced or "(nothing)"
        cells = (answer.prompt, answer.answer, answer.says or "(nothing)", forced, _reach(answer))
        table.add_row(Text(answer.failed or "", style="bold"), *map(Text, cells))
    return captioned(table, LEGEND)


def _reach(answer: WrongAnswer) -> str:
    """Format uᵀk with the token at which it is read, and with the subject of u if that is not the answer's."""
    subject = "" if answer.written == answer.subject else f" of {quoted(answer.written)}"
    return "" if answer.reach is None else f"{number(answer.reach)}{subject} at {quoted(answer.token)}"
