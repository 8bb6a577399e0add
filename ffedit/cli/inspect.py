"""`ffedit inspect`: the contents of one key-value memory, of those that a prompt activates, of those of an edit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from rich.console import RenderableType

import ffedit
from ffedit.cli import options
from ffedit.inference.corpus import Corpus

if TYPE_CHECKING:
    from ffedit.inspector import PromptView
    from ffedit.inspector.views import View
    from ffedit.model.editable import Stack


def stack_options(command: options.Command) -> options.Command:
    """Add `model_options` and `--stack`; the command receives `load_stack`."""

    @click.option("--stack", "half", type=click.Choice(["encoder", "decoder"]), help="Half of an encoder–decoder.")
    @options.model_options
    @functools.wraps(command)
    def wrapped(half: str | None, load_model: Callable[..., Any], **kwargs: Any) -> Any:
        def load_half(name: str, **how: Any) -> Stack:
            from ffedit.loading.load import choose_stack

            return choose_stack(ffedit.load_stacks(name, **how), half)

        return command(load_stack=lambda: load_model(by=load_half), **kwargs)

    return wrapped  # type: ignore[return-value]


def corpus_options(command: options.Command) -> options.Command:
    """Add `--corpus`, `--tokens` and `--seed`; the command receives `corpus`, of which nothing was read yet."""

    @click.option("--corpus", help="Text file, .jsonl, .json, or dataset NAME[:CONFIG[:SPLIT]].  [default: sampled]")
    @click.option("--tokens", default=8192, type=click.IntRange(2), help="Most tokens of the text to read.")
    @click.option("--seed", default=0, type=options.SEED, help="Seed of the sampled text.")
    @functools.wraps(command)
    def wrapped(corpus: str | None, tokens: int, seed: int, **kwargs: Any) -> Any:
        text = Corpus(corpus, tokens, seed)
        text.check()
        return command(corpus=text, **kwargs)

    return wrapped  # type: ignore[return-value]


@click.group()
def inspect() -> None:
    """Show what the memories of a model store."""


@inspect.command(short_help="One memory: what its value says, what fires its key.")
@options.output_options
@click.argument("name", metavar="L[.E].I")
@click.option("--top", default=10, type=options.COUNT, help="Number of tokens and triggers to show.")
@corpus_options
@stack_options
@options.html_option
def memory(
    name: str, top: int, corpus: Corpus, load_stack: Callable[[], Stack], html: Path | None, surface: options.Surface
) -> None:
    """Show memory I of layer L (L.E.I in expert E): the tokens of its value, and the texts that activate its key."""
    from ffedit.display.terminal.memories import memory_view

    slot = ffedit.MemoryIndex.parse(name)
    stack = load_stack()
    with surface.progress() as progress:
        view = ffedit.inspect_memory(stack, slot, corpus=corpus, top=top, progress=progress)
    _show(surface, html, view, memory_view(view))


@inspect.command(short_help="The memories that a prompt fires, and where its answer is made; turn some of them.")
@options.output_options
@click.argument("text", metavar="PROMPT")
@click.option("--edit", "edit_from", type=options.edit_folder, help="Show the prompt before and after this edit.")
@click.option(
    "--set",
    "turns",
    multiple=True,
    metavar="L.I=FACTOR",
    help="Scale a memory: 0 suppresses it, 3 amplifies it.",
)
@click.option("--promote", metavar="TOKEN", help="Show the memories to scale so that the answer is TOKEN.")
@click.option("--top", default=3, type=options.COUNT, help="Number of memories of each layer to show.")
@options.asking_options
@options.html_option
def prompt(
    text: str,
    edit_from: Path | None,
    turns: tuple[str, ...],
    promote: str | None,
    top: int,
    load_model: options.LoadModel,
    html: Path | None,
    surface: options.Surface,
) -> None:
    """Show which memories PROMPT activates at its last token, and in which layer its answer is made."""
    from ffedit.display.terminal.memories import compared, prompt_view
    from ffedit.inspector.prompt_view import parse_scalings

    scalings = parse_scalings(turns)
    edit = ffedit.Edit.load(edit_from) if edit_from is not None else None
    editable = load_model(edit)
    before = ffedit.inspect_prompt(editable, text, scaled=scalings, top=top) if edit is not None else None
    with edit.applied(editable) if edit is not None else nullcontext(), surface.progress() as progress:
        view = ffedit.inspect_prompt(editable, text, scaled=scalings, promoted=promote, top=top, progress=progress)
    surface.show(compared(before, view) if before is not None else None)
    _show(surface, html, view, prompt_view(view), before)


@inspect.command(short_help="The memory that an edit amounts to, and what a text reads differently.")
@options.output_options
@click.argument("edit_from", type=options.edit_folder, metavar="EDIT_DIR")
@click.option("--top", default=5, type=options.COUNT, help="Number of tokens, texts and keys to show.")
@corpus_options
@options.model_options
@options.html_option
def edit(
    edit_from: Path,
    top: int,
    corpus: Corpus,
    load_model: options.LoadModel,
    html: Path | None,
    surface: options.Surface,
) -> None:
    """Show the memories that EDIT_DIR adds, and which texts read them."""
    from ffedit.display.terminal.memories import edited_view

    edit = ffedit.Edit.load(edit_from)
    editable = load_model(edit)
    with surface.progress() as progress:
        view = ffedit.inspect_edit(editable, edit, corpus=corpus, top=top, progress=progress)
    _show(surface, html, view, edited_view(view))


def _show(
    surface: options.Surface, html: Path | None, view: View, table: RenderableType, before: PromptView | None = None
) -> None:
    """Show a view, and write it as a page and as JSON where these were asked for."""
    from ffedit.display.html import save_page

    surface.show(table)
    if html is not None:
        save_page(html, view, before)
    surface.write_json(view.to_dict() | ({"before": before.to_dict()} if before is not None else {}))
