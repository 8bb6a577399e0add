"""`ffedit inspect`: one key-value memory, the memories that a prompt activates, or those that an edit adds."""

from __future__ import annotations

import functools
from typing import Any

import rich_click as click

from ffedit.cli import options, work
from ffedit.inference.corpus import Corpus


def corpus_options(command: options.Command) -> options.Command:
    """Add `--corpus`, `--tokens` and `--seed`; the command receives `corpus`, which is not read yet."""

    @click.option("--corpus", help="Text file, .jsonl, .json, or dataset NAME[:CONFIG[:SPLIT]].  [default: sampled]")
    @click.option("--tokens", default=8192, type=click.IntRange(2), help="Number of tokens to read, at most.")
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


@inspect.command(short_help="One memory: the tokens of its value, and the texts that activate its key.")
@options.output_options
@click.argument("name", metavar="L[.E].I")
@click.option("--top", default=10, type=options.COUNT, help="Number of tokens and triggers to show.")
@corpus_options
@options.model_options
@options.html_option
def memory(**kwargs: Any) -> None:
    """Show memory I of layer L (L.E.I in expert E): the tokens of its value, and the texts that activate its key."""
    work.inspect_memory(**kwargs)


@inspect.command(short_help="The memories that a prompt activates, and where its answer is made; scale some of them.")
@options.output_options
@click.argument("text", metavar="PROMPT")
@options.edit_option("Show the prompt before and after this edit.")
@click.option(
    "--set",
    "turns",
    multiple=True,
    metavar="L.I=FACTOR",
    help="Scale a memory: 0 suppresses it, 3 amplifies it.",
)
@click.option("--top", default=3, type=options.COUNT, help="Number of memories of each layer to show.")
@options.asking_options
@options.html_option
def prompt(**kwargs: Any) -> None:
    """Show which memories PROMPT activates at its last token, and in which layer its answer is made."""
    work.inspect_prompt(**kwargs)


@inspect.command(short_help="The memories that an edit adds, and which texts read them.")
@options.output_options
@click.argument("edit_from", type=options.edit_folder, metavar="EDIT_DIR")
@click.option("--top", default=5, type=options.COUNT, help="Number of tokens, texts and keys to show.")
@corpus_options
@options.model_options
@options.html_option
def edit(**kwargs: Any) -> None:
    """Show the memories that EDIT_DIR adds, and which texts read them."""
    work.inspect_edit(**kwargs)
