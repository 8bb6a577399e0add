"""`ffedit cache`: the files kept between runs."""

from __future__ import annotations

import rich_click as click
from rich.filesize import decimal
from rich.text import Text

from ffedit.cli.options import output_options
from ffedit.cli.surface import Surface
from ffedit.facts.text import counted
from ffedit.files import cache as store


@click.group(invoke_without_command=True)
@click.pass_context
def cache(context: click.Context) -> None:
    """List or clear the files that ffedit keeps between runs (statistics, texts, traces, converted models)."""
    if context.invoked_subcommand is None:
        context.invoke(list_entries)


@cache.command("list")
@output_options
def list_entries(surface: Surface) -> None:
    """Show every entry with its size, the least recently used first."""
    sizes = store.sizes()
    names = {entry: str(entry.relative_to(store.folder())) for entry in sizes}
    total = sum(sizes.values())
    lines = [f"{decimal(size):>10}  {names[entry]}" for entry, size in sizes.items()]
    summary = f"{counted(len(sizes), 'file')}, {decimal(total)} in {store.folder()} ({store.bounds()})"
    surface.show(Text("\n".join([*lines, summary]), no_wrap=True, overflow="ignore"))
    limits = {"folder": str(store.folder()), "bytes": total, "max_bytes": store.max_bytes(), "max_days": store.MAX_DAYS}
    entries = [{"entry": names[entry], "bytes": size} for entry, size in sizes.items()]
    surface.write_json({**limits, "entries": entries})


@cache.command()
@output_options
def clear(surface: Surface) -> None:
    """Delete every entry."""
    freed = store.clear()
    surface.show(f"{decimal(freed)} freed in {store.folder()}")
    surface.write_json({"folder": str(store.folder()), "freed": freed})
