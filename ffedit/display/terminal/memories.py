"""Tables of memories in a terminal: those that a prompt activates, one memory, and those that an edit adds.

Bars stand beside the shares; they read the same without colour and through a pipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ffedit.display.terminal.tables import folded, left, named_values, notes, plain_table, right, share, spaced
from ffedit.facts.text import counted, number, quoted, token
from ffedit.inspector.edit_view import AddedMemory, EditView, LayerChange, Passage
from ffedit.inspector.memory_view import MemoryView
from ffedit.inspector.prompt_view import PromptView
from ffedit.inspector.views import Distribution, Prefix, TokenProbability
from ffedit.model.memory import Address

MOST_CELLS, BAR_CELLS = 14, 10
# Note on the coefficient m of an expert's memory.
ROUTED = "m includes the router's weight"


def bar(part: float) -> Text:
    """Render a share of 0 to 1 as a bar, of at least one cell where the share rounds to 1% or more."""
    filled = min(BAR_CELLS, max(round(part * BAR_CELLS), int(part >= 0.005)))
    return Text(("█" * filled).ljust(BAR_CELLS), style="cyan")


def predictions(distributions: dict[str, Distribution]) -> Table:
    """Render the top tokens of several distributions with their probabilities, one line per distribution."""
    table = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for name, distribution in distributions.items():
        line = Text("   ").join(
            Text(named(entry), style="" if i else "bold").append(f" {share(entry.probability)}", style="not bold")
            for i, entry in enumerate(distribution.top)
        )
        table.add_row(Text(name), line)
    return table


def ends(distribution: Distribution) -> Table:
    """Render the most and the least probable tokens of a distribution."""
    table = plain_table(*left("says most"), *right(""), *left("", "says least"))
    for most, least in zip(distribution.top, distribution.bottom, strict=True):
        length = bar(most.probability / distribution.max_probability)
        table.add_row(Text(named(most)), Text(share(most.probability)), length, Text(named(least)))
    return table


def final_norm(path: str | None) -> str:
    """Name the final norm of a model, if it has one, and the unembedding."""
    return f"the final norm ({path}) and the unembedding" if path else "the unembedding (there is no final norm)"


def named(entry: TokenProbability) -> str:
    """Shorten a token to at most `MOST_CELLS` terminal cells."""
    return cut(token(entry.token), MOST_CELLS)


def cut(text: str, cells: int) -> str:
    """Return the beginning of a text, with an ellipsis where it is longer than `cells` terminal cells."""
    if cells < 1:
        return ""
    (shown := Text(text)).truncate(cells, overflow="ellipsis")
    return shown.plain


def said(entry: TokenProbability, bold: bool = False) -> Text:
    """Render a token with its probability."""
    return Text(named(entry), style="bold" if bold else "").append(f" {share(entry.probability)}", style="dim not bold")


def prefixed(prefix: Prefix, most: int) -> Text:
    """Render a text on one line, the position read marked «so»; a long text is cut at its beginning."""
    last = f"«{token(prefix.last)}»"
    before = "".join(c if c.isprintable() else " " for c in prefix.text).lstrip()
    gap = " " if prefix.last[:1].isspace() else ""
    before = cut(before[::-1], max(0, most - cell_len(last) - len(gap)))[::-1]
    return Text(before + gap).append(last, style="bold")


def tenths(value: float) -> str:
    """Format a share, which may be negative or above 1, in percent with one decimal."""
    return f"{value:.1%}".replace("-", "−")


def placed(at: Address) -> str:
    """Name a layer, or one expert of a layer."""
    return f"layer {at.layer}" if at.expert is None else f"expert {at.expert} of layer {at.layer}"


def title(text: str) -> Text:
    """Render the heading of a section."""
    return Text(text, style="bold")


# A prompt ------------------------------------------------------------------------------------------


def prompt_view(view: PromptView) -> Group:
    """Render a prompt: its prediction, the layers where it is made, and the active memories."""
    if view.untouched is None:
        says = predictions({"predicts": view.prediction})
    else:
        says = predictions({"unscaled": view.untouched, "scaled": view.prediction})
    sections: list[RenderableType] = [_heading(view), says, readings(view)]
    if any(layer.experts for layer in view.layers):
        sections.append(experts(view))
    return spaced(*sections, firing(view))


def compared(before: PromptView, after: PromptView) -> Group:
    """Render a prompt before and after an edit: by layer, top tokens and the probability of each run's prediction."""
    columns = right("layer")
    for view in (before, after):
        columns += [*left("it adds", "stream says"), *right(f"P({named(view.prediction.top[0])})")]
    table = plain_table(*columns)
    for old, new in zip(before.layers, after.layers, strict=True):
        cells = [Text(str(old.address))]
        for layer in (old, new):
            differs = layer is new and old.after.says.id != new.after.says.id
            cells += [Text(named(layer.output.says)), Text(named(layer.after.says), style="bold" if differs else "")]
            cells.append(Text(share(layer.after.final)))
        table.add_row(*cells)
    sides = predictions({"before": before.prediction, "after": after.prediction})
    by_layer = Group(Text("Before the edit, and after it:", style="dim"), table)
    return spaced(_heading(before), sides, by_layer)


def _heading(view: PromptView) -> Text:
    line = Text("Prompt: ", style="bold").append(" ".join(view.prompt.split()), style="not bold")
    lines = [f"read at its last token, «{token(view.tokens[-1])}» (of {len(view.tokens)})"]
    if view.turned:
        lines.append(f"scaled: {', '.join(f'{slot} × {factor:g}' for slot, factor in view.turned.items())}")
    return line.append("".join(f"\n{text}" for text in lines), style="dim not bold")


def readings(view: PromptView) -> Group:
    """Render each layer's top tokens: of the stream without it, of what it adds, and of the stream with it."""
    final, depth = view.prediction.top[0], len(view.layers)
    table = plain_table(
        *right("layer"), *left("without it", "it adds", "with it"), *right(f"P({named(final)})"), *left("")
    )
    for layer in view.layers:
        cells = [said(out.says, out.says.id == final.id) for out in (layer.before, layer.output, layer.after)]
        table.add_row(Text(str(layer.address)), *cells, Text(share(layer.after.final)), bar(layer.after.final))
    first = f"layer {view.appears} and stays from layer {view.settles} on"
    if view.appears == view.settles == depth - 1:
        first = "the last layer only"
    lines = [
        f"{quoted(final.token)} comes first after {first}",
        f"all read through {final_norm(view.norm)}; P: probability after the layer",
        "without it: the stream with the block's attention, without its feed-forward output",
    ]
    return Group(title("Where the prediction is made"), table, notes(lines))


def experts(view: PromptView) -> Group:
    """Render the experts that the last token is routed to, one line per mixture layer."""
    table = plain_table(*right("layer"), *folded("experts"))
    for layer in view.layers:
        if layer.experts:
            shown = (
                f"{expert.address} × {expert.weight:.2g}{' shared' if expert.shared else ''} ({tenths(expert.share)})"
                for expert in layer.experts
            )
            table.add_row(str(layer.address), Text(", ".join(shown)))
    lines = [
        f"×: the expert's router weight; {ROUTED}, and is 0 for experts that the token does not go to",
        "in brackets: the sum of the shares of the expert's memories in the layer's output",
    ]
    return Group(title("Experts that the token goes to"), table, notes(lines))


def firing(view: PromptView) -> Group:
    """Render the strongest memories of each layer."""
    table = plain_table(*left("memory"), *right("m", "|m| ‖v‖", "share"), *left("", "promotes"))
    largest = max((abs(memory.share) for layer in view.layers for memory in layer.firing), default=0) or 1.0
    for layer in view.layers:
        for memory in layer.firing:
            numbers = (number(memory.coefficient), number(memory.strength), tenths(memory.share))
            table.add_row(
                Text(str(memory.slot)), *map(Text, numbers), bar(memory.share / largest), said(memory.promotes)
            )
        table.add_section()
    lines = [
        "share: m v·o / ‖o‖² of the layer's output o; all memories and the bias make 100%",
        "promotes: the top token of what it adds, v where m > 0, −v where m < 0",
    ]
    return Group(title("Strongest memories"), table, notes(lines))


# One memory ----------------------------------------------------------------------------------------


def memory_view(view: MemoryView) -> Group:
    """Render a memory: its value's distribution, its key's triggers, and the findings on both."""
    where = f"  memory {view.slot.index} of 0–{view.memories - 1} in {placed(view.slot.address)} of 0–{view.layers - 1}"
    heading = title(f"Memory {view.slot}").append(where, style="not bold")
    findings = [("active", f"at {share(view.active)} of the tokens (m > 0)")]
    if view.sent is not None:
        sends = f"sends {share(view.sent)} of the tokens to the expert; {ROUTED}, and is 0 at all other tokens"
        findings.append(("router", sends))
    norm = final_norm(view.norm)
    value = Group(
        title("Its value: what it says"),
        ends(view.value),
        notes([f"‖v‖ {number(view.value_norm)}, entropy {number(view.value.entropy)} nats; read through {norm}"]),
    )
    return spaced(heading, value, Group(*_key(view)), named_values(*findings))


def _key(view: MemoryView) -> Iterator[RenderableType]:
    """Yield the table of triggers, with the tokens that follow them."""
    yield title("Its key: what fires it").append(f"  {view.tokens:,} tokens of {view.corpus}", style="not bold")
    if not view.triggers:
        yield Text("Nothing: the coefficient is positive at no token of this text.")
        return
    table = plain_table(*right("m"), *left("", "text", "next"), *right("place"))
    for trigger in view.triggers:
        length = bar(trigger.coefficient / view.triggers[0].coefficient)
        follows = Text(named(trigger.next), style="bold" if trigger.rank == 1 else "")
        m, rank = Text(number(trigger.coefficient)), Text(f"{trigger.rank:,}")
        table.add_row(m, length, prefixed(trigger.prefix, 36), follows, rank)
    yield table
    yield notes(["next: the token that follows in the text; place: its rank in the value's distribution, from 1"])


# An edit -------------------------------------------------------------------------------------------


def edited_view(view: EditView) -> Group:
    """Render an edit: the memories that Δ amounts to, changed predictions, prompts before and after."""
    more = f", and {counted(len(view.facts) - 1, 'more fact')}" if len(view.facts) > 1 else ""
    heading = [Text(f"{fact}{more}", style="bold") for fact in view.facts[:1]]
    heading.append(Text(f"Edit {view.edit} of {view.model}", style="dim" if heading else "bold"))
    changed = Group(
        title("What reads differently").append(f"  {view.tokens:,} tokens of {view.corpus}", style="not bold"),
        Text(
            f"The model predicts another token after {share(view.changed)} of them. Tokens that lost most probability:"
        ),
        passages(view.passages),
    )
    added = [added_memory(layer, memory, part) for layer in view.layers for part, memory in enumerate(layer.added, 1)]
    return spaced(Group(*heading), *added, changed, *(compared(*prompt) for prompt in view.prompts))


def added_memory(layer: LayerChange, memory: AddedMemory, part: int) -> Group:
    """Render one memory that the change amounts to: its value's distribution and its key's triggers."""
    size = f"  ‖Δ‖ {number(layer.norm)}, {layer.relative:.2%} of ‖W‖"
    which = f"The memory that {placed(layer.address)} gets"
    if len(layer.added) > 1:
        which, size = f"{which}, part {part}", f"{size}; {share(memory.share)} of ‖Δ‖²"
    unit = "1 is the fact's own" if memory.written else "its key has norm 1"
    return Group(
        title(which).append(size, style="not bold"),
        ends(memory.value),
        Text(""),
        Text(f"What fires it (coefficient; {unit}), and what the model says there", style="dim"),
        passages(memory.triggers),
    )


def passages(shown: Sequence[Passage]) -> Table | Text:
    """Render prefixes of a text and the model's prediction after each, before and after the edit."""
    if not shown:
        return Text("nothing in this text")
    coefficient = right("w·m") if shown[0].coefficient is not None else []
    table = plain_table(*coefficient, Column("text", no_wrap=True, ratio=1), *left("before", "after"))
    for passage in shown:
        cells: list[RenderableType] = [Text(number(passage.coefficient or 0.0))] if coefficient else []
        new = passage.after.id != passage.before.id
        table.add_row(*cells, prefixed(passage.prefix, 36), said(passage.before), said(passage.after, new))
    return table
