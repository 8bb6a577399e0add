"""`ffedit inspect`: the contents of the key-value memories."""

from __future__ import annotations

import rich_click as click

from ffedit.cli import Lazy

COMMANDS = {
    "memory": "One memory: what its value says, what fires its key.",
    "prompt": "The memories that a prompt fires, and where its answer is made; turn some of them.",
    "model": "All memories of a model, as the paper of Geva et al. measures them.",
    "edit": "The memory that an edit amounts to, and what a text reads differently.",
}


@click.command(cls=Lazy, summaries=COMMANDS, home="ffedit.cli.inspect_{}")
def inspect() -> None:
    """See what the memories of a model hold."""
