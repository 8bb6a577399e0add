"""The memories that a prompt activates, as tables in a terminal.

Bars stand beside the shares; they read the same without colour and through a pipe.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ffedit.display.terminal.tables import plain_table
from ffedit.facts.text import number, quoted, token
from ffedit.inspector.coefficient_scaling import OFF, UP, Promotion
from ffedit.inspector.prompt_view import PromptView, Readout
from ffedit.inspector.values import ACTIVE
from ffedit.inspector.views import Distribution, Prefix, TokenProbability
from ffedit.model.memory import Address

MOST_CELLS = 14
# Note on the coefficient m of an expert's memory.
ROUTED = "m has the router's weight inside"


@dataclass(frozen=True)
class Bar:
    """A share of 0 to 1 as a bar."""

    share: float
    width: int = 10

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the filled cells; at least one where the share rounds to 1% or more."""
        filled = min(self.width, max(round(self.share * self.width), int(self.share >= 0.005)))
        yield Text(("#" if options.ascii_only else "█") * filled, style="cyan", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the full width of the bar, whatever the share."""
        return Measurement(self.width, self.width)


def prompt_view(view: PromptView) -> Group:
    """Render a prompt: its prediction, the layers where it is made, the active memories, and what to scale."""
    parts: list[RenderableType] = [_heading(view), Text("")]
    if view.untouched is None:
        parts.append(predictions({"predicts": view.prediction}))
    else:
        parts.append(predictions({"as it is": view.untouched, "turned": view.prediction}))
    parts += [Text(""), readings(view), Text(""), at_work(view), Text("")]
    if any(layer.experts for layer in view.layers):
        parts += [experts(view), Text("")]
    parts.append(firing(view))
    if view.promotion is not None:
        parts += [Text(""), promotion(view.promotion)]
    return Group(*parts)


def compared(before: PromptView, after: PromptView) -> Group:
    """Render a prompt before and after an edit: by layer, the readings and the probability of each run's prediction."""
    old, new = before.prediction.top[0], after.prediction.top[0]
    table = plain_table()
    table.add_column("layer", justify="right")
    for heading in ("it adds", "stream says", f"P({named(old)})"):
        table.add_column(heading, no_wrap=True, justify="right" if heading.startswith("P(") else "left")
    for heading in ("it adds", "stream says", f"P({named(new)})"):
        table.add_column(heading, no_wrap=True, justify="right" if heading.startswith("P(") else "left")
    for one, other in zip(before.layers, after.layers, strict=True):
        cells = [Text(str(one.address))]
        for layer in (one, other):
            differs = layer is other and one.after.says.id != other.after.says.id
            cells += [Text(named(layer.output.says)), Text(named(layer.after.says), style="bold" if differs else "")]
            cells.append(Text(share(layer.after.final)))
        table.add_row(*cells)
    sides = predictions({"before": before.prediction, "after": after.prediction})
    return Group(
        _heading(before), Text(""), sides, Text(""), Text("Before the edit, and after it:", style="dim"), table
    )


def _heading(view: PromptView) -> Text:
    line = Text("Prompt: ", style="bold").append(" ".join(view.prompt.split()), style="not bold")
    lines = [f"read at its last token, «{token(view.tokens[-1])}» (of {len(view.tokens)})"]
    if view.turned:
        lines.append(f"turned: {', '.join(f'{slot} × {factor:g}' for slot, factor in view.turned.items())}")
    return line.append("".join(f"\n{text}" for text in lines), style="dim not bold")


def predictions(several: dict[str, Distribution]) -> Table:
    """Render the top tokens of several distributions with their probabilities, one line per distribution."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, found in several.items():
        line = Text("   ").join(
            Text(named(one), style="" if i else "bold").append(f" {share(one.probability)}", style="not bold")
            for i, one in enumerate(found.top)
        )
        table.add_row(Text(name), line)
    return table


def ends(found: Distribution) -> Table:
    """Render the most and the least probable tokens of a distribution."""
    table = plain_table()
    table.add_column("says most", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("says least", no_wrap=True)
    for one, other in zip(found.top, found.bottom, strict=True):
        cells = (
            Text(named(one)),
            Text(share(one.probability)),
            Bar(one.probability / found.max_probability),
            Text(named(other)),
        )
        table.add_row(*cells)
    return table


def readings(view: PromptView) -> Group:
    """Render each layer's top tokens: of the stream without it, of what it adds, and of the stream with it."""
    table = plain_table()
    table.add_column("layer", justify="right")
    for heading in ("without it", "it adds", "with it"):
        table.add_column(heading, no_wrap=True)
    final = view.prediction.top[0]
    table.add_column(f"P({named(final)})", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for layer in view.layers:
        cells = [_reading(one, final) for one in (layer.before, layer.output, layer.after)]
        table.add_row(Text(str(layer.address)), *cells, Text(share(layer.after.final)), Bar(layer.after.final))
    depth = len(view.layers)
    lines = [f"{quoted(final.token)} comes first after layer {view.appears} and stays from layer {view.settles} on"]
    if view.appears == view.settles == depth - 1:
        lines = [f"{quoted(final.token)} comes first after the last layer only"]
    norm = f"the final norm ({view.norm})" if view.norm else "no final norm, which this model does not have,"
    lines.append(f"each read through {norm} and the unembedding; P: of the stream with the layer")
    lines.append("without it: what the block leaves behind without its feed-forward layer, attention included")
    return Group(title("Where the prediction is made"), table, notes(lines))


def _reading(one: Readout, final: TokenProbability) -> Text:
    text = Text(named(one.says), style="bold" if one.says.id == final.id else "")
    return text.append(f" {share(one.says.probability)}", style="dim not bold")


def at_work(view: PromptView) -> Group:
    """Render the number of active memories in each layer."""
    table = plain_table()
    for heading in ("layer", "of", "m > 0", f"≥ {ACTIVE:.0%} of ‖o‖", "effective", "bias's share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in view.layers:
        found = layer.activity
        cells = (layer.address, found.memories, found.by_sign, found.by_norm)
        shown = [*map(str, cells), f"{found.effective:.1f}", _signed(found.bias_share)]
        table.add_row(*map(Text, shown))
    lines = [
        f"m > 0: with a positive coefficient; ≥ {ACTIVE:.0%} of ‖o‖: |m| ‖v‖ is at least so much of the output's norm",
        "effective: (Σ s²)² / Σ s⁴ of the strengths s = |m| ‖v‖, n where n are equally strong and the others silent",
        "behind a gate a coefficient may be negative and strong, so the norm tells more than the sign",
    ]
    return Group(title("Memories at work"), table, notes(lines))


def experts(view: PromptView) -> Group:
    """Render the experts that the last token is routed to, one line per mixture layer."""
    table = plain_table()
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("experts", overflow="fold")
    for layer in view.layers:
        told = [
            f"{one.address} × {one.weight:.2g}{' shared' if one.shared else ''} ({_signed(one.share)})"
            for one in layer.experts
        ]
        if told:
            table.add_row(str(layer.address), Text(", ".join(told)))
    lines = [
        f"×: what the router weighs the expert by; {ROUTED}, and is 0 of experts that the token does not go to",
        "in brackets: what the expert's memories make up of the layer's output, their shares added",
    ]
    return Group(title("Experts that the token goes to"), table, notes(lines))


def firing(view: PromptView) -> Group:
    """Render the strongest memories of each layer."""
    table = plain_table()
    table.add_column("memory", no_wrap=True)
    for heading in ("m", "|m| ‖v‖", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("promotes", no_wrap=True)
    largest = max((abs(one.share) for layer in view.layers for one in layer.firing), default=0) or 1.0
    for layer in view.layers:
        for i, one in enumerate(layer.firing):
            table.add_row(
                Text(str(one.slot)),
                Text(number(one.coefficient)),
                Text(number(one.strength)),
                Text(_signed(one.share)),
                Bar(one.share / largest),
                _said(one.promotes),
                end_section=i == len(layer.firing) - 1,
            )
    lines = [
        "share: m v·o / ‖o‖² of the layer's output o; all memories and the bias make 100%",
        "promotes: the top token of what it adds, v where m > 0, −v where m < 0",
    ]
    return Group(title("Strongest memories"), table, notes(lines))


def promotion(found: Promotion) -> Group:
    """Render the memories to scale in order to promote a token, and the measured effect of scaling them."""
    table = plain_table()
    table.add_column("turn", no_wrap=True)
    for heading in ("expected", "alone", "so far"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("then says", no_wrap=True)
    for turn in found.turns:
        table.add_row(
            Text(f"{turn.slot} × {turn.factor:g}"),
            *(Text(f"{'+' if gain > 0 else ''}{number(gain)}") for gain in (turn.predicted, turn.gain)),
            Text(share(turn.together)),
            Bar(turn.together),
            Text(named(turn.says), style="bold" if turn.says.id == found.token.id else ""),
        )
    what = f"P({named(found.token)})"
    words = quoted(found.token.token)
    if found.enough == 0:
        verdict = f"{words} is the prediction already."
    elif found.enough is None:
        verdict = f"Even all {found.tried:,} of the ranking, turned together, do not make {words} the prediction."
    else:
        many = "The first memory" if found.enough == 1 else f"The first {found.enough:,} memories"
        verdict = (
            f"{many} of the ranking, turned together, make{'s' if found.enough == 1 else ''} {words} the prediction."
        )
    lines = [
        f"× {OFF:g} suppresses a memory, × {UP:g} amplifies it, at every token of the prompt",
        f"expected: gain of log {what} in nats to first order; alone: measured; so far: {what}, all down to it turned",
    ]
    first = Text(f"{what} is {share(found.token.probability)} now, place {found.rank:,}.")
    return Group(title(f"What to turn for {words}"), first, table, Text(verdict), notes(lines))


def named(one: TokenProbability) -> str:
    """Shorten a token to at most `MOST_CELLS` terminal cells."""
    shown = token(one.token)
    while cell_len(shown) > MOST_CELLS:
        shown = shown.removesuffix("…")[:-1] + "…"
    return shown


def _said(one: TokenProbability) -> Text:
    return Text(named(one)).append(f" {share(one.probability)}", style="dim")


def share(value: float) -> str:
    """Format a probability in percent; "0%" and "100%" are shown only for exactly 0 and 1."""
    if value == 0 or value == 1 or 0.0995 <= value < 0.995:
        return f"{value:.0%}"
    if value >= 0.0005:
        return f"{value:.1%}" if value < 0.9995 else "> 99.9%"
    return f"{100 * value:.1g}%" if value >= 1e-6 else f"{value:.0e}"


def prefixed(one: Prefix, most: int = 40) -> Text:
    """Render a text on one line, the position read marked «so»; a long text is cut at its beginning and its end."""
    last = f"«{token(one.last)}»"
    before, after = ("".join(c if c.isprintable() else " " for c in part) for part in (one.text, one.after))
    before, after = before.lstrip(), after.rstrip()
    gap = " " if one.last[:1].isspace() else ""
    room = max(0, most - cell_len(last) - len(gap))
    if after:
        behind = max(room // 2, room - cell_len(before))
        if cell_len(after) > behind:
            while cell_len(after) > behind - 1:
                after = after[:-1]
            after = f"{after}…"
        room -= cell_len(after)
    if cell_len(before) > room:
        while cell_len(before) > room - 1:
            before = before[1:]
        before = f"…{before}"
    return Text(before + gap).append(last, style="bold").append(after)


def _signed(value: float) -> str:
    """Format a share, which may be negative or above 1, in percent with one decimal."""
    return f"{value:.1%}".replace("-", "−")


def placed(at: Address) -> str:
    """Name a layer, or one expert of a layer."""
    return f"layer {at.layer}" if at.expert is None else f"expert {at.expert} of layer {at.layer}"


def title(text: str) -> Text:
    """Render the heading of a section."""
    return Text(text, style="bold")


def notes(lines: list[str]) -> Text:
    """Render the explanations of a table's columns."""
    return Text("\n".join(lines), style="dim")
