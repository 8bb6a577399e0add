"""`ffedit cache`: the files kept between runs."""

from __future__ import annotations

import click

from ffedit.files import cache as store


@click.group()
def cache() -> None:
    """List or clear what ffedit keeps between runs (key statistics, converted models)."""


@cache.command("list")
def list_entries() -> None:
    """Show every entry with its size."""
    sizes = store.sizes()
    for entry, size in sizes.items():
        click.echo(f"{size / 1e6:8.2f} MB  {entry.relative_to(store.folder())}")
    click.echo(f"{len(sizes)} files in {store.folder()}")


@cache.command()
def clear() -> None:
    """Delete every entry."""
    click.echo(f"{store.clear() / 1e6:.2f} MB set free in {store.folder()}")
