"""Options that the commands of `ffedit inspect` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import rich_click as click

import ffedit
from ffedit.cli.options import SEED, model_options
from ffedit.inference.corpus import Corpus

Command = TypeVar("Command", bound=Callable[..., Any])


def stack_options(command: Command) -> Command:
    """Add `model_options` and `--stack`; the command receives `load_stack`."""

    @click.option(
        "--stack", "half", type=click.Choice(["encoder", "decoder"]), help="Of an encoder–decoder: which half of it."
    )
    @model_options
    @functools.wraps(command)
    def wrapped(half: str | None, load_model: Callable[..., Any], **kwargs: Any) -> Any:
        def load_stack() -> Any:
            from ffedit.loading.load import choose_stack

            return choose_stack(load_model(by=ffedit.load_stacks), half)

        return command(load_stack=load_stack, **kwargs)

    return wrapped  # type: ignore[return-value]


def corpus_options(command: Command) -> Command:
    """Add `--corpus`, `--tokens` and `--seed`; the command receives `corpus`, of which nothing was read yet."""

    @click.option("--corpus", help="Text file, .jsonl, .json, or dataset NAME[:CONFIG[:SPLIT]].  [default: sampled]")
    @click.option("--tokens", default=8192, type=click.IntRange(2), help="How much of it, at most.")
    @click.option("--seed", default=0, type=SEED, help="Of the sampled text.")
    @functools.wraps(command)
    def wrapped(corpus: str | None, tokens: int, seed: int, **kwargs: Any) -> Any:
        text = Corpus(corpus, tokens, seed)
        text.check()
        return command(corpus=text, **kwargs)

    return wrapped  # type: ignore[return-value]
