"""`ffedit cache`: the files kept between runs."""

from __future__ import annotations

from collections.abc import Callable

import rich_click as click
from rich.text import Text

from ffedit.cli.options import output_options
from ffedit.cli.surface import Surface
from ffedit.files import cache as store


def _parsed(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Return an option's type: `parse`, whose ValueError is a wrong use of the option."""

    def convert(text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return convert


@click.group(invoke_without_command=True)
@click.pass_context
def cache(context: click.Context) -> None:
    """List, limit or clear the files that ffedit keeps between runs (statistics, texts, traces, converted models)."""
    if context.invoked_subcommand is None:
        context.invoke(list_entries)


@cache.command("list")
@output_options
def list_entries(surface: Surface) -> None:
    """Show every entry with its size, the least recently used first."""
    sizes = store.sizes()
    names = {entry: str(entry.relative_to(store.folder())) for entry in sizes}
    total, limits = sum(sizes.values()), store.Limits.set()
    lines = [f"{size / 1e6:8.2f} MB  {names[entry]}" for entry, size in sizes.items()]
    summary = f"{len(sizes)} files, {total / 1e6:.2f} MB in {store.folder()} ({limits})"
    surface.show(Text("\n".join([*lines, summary]), no_wrap=True, overflow="ignore"))
    about = {"folder": str(store.folder()), "bytes": total, "max_bytes": limits.size, "max_days": limits.age}
    entries = [{"entry": names[entry], "bytes": size} for entry, size in sizes.items()]
    surface.write_json({**about, "entries": entries})


@cache.command()
@click.option("--max-size", type=_parsed(store.parse_size), metavar="SIZE", help="Size of all entries, such as 2GB.")
@click.option("--max-age", type=_parsed(store.parse_days), metavar="DAYS", help="Days since an entry was last used.")
@output_options
def prune(max_size: float | None, max_age: float | None, surface: Surface) -> None:
    """Delete entries beyond the limits, the least recently used first; entries used within a day stay."""
    usual = store.Limits.set()
    limits = store.Limits(usual.size if max_size is None else max_size, usual.age if max_age is None else max_age)
    _freed(store.prune(limits), surface)


@cache.command()
@output_options
def clear(surface: Surface) -> None:
    """Delete every entry."""
    _freed(store.clear(), surface)


def _freed(freed: int, surface: Surface) -> None:
    surface.show(f"{freed / 1e6:.2f} MB set free in {store.folder()}")
    surface.write_json({"folder": str(store.folder()), "freed": freed})
