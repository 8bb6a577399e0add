"""Output of a command: a terminal, one JSON object, progress, and a log."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import rich_click as click
from click import get_current_context
from rich.console import RenderableType
from rich.status import Status
from rich.text import Text

from ffedit.display.terminal.console import PlainConsole
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.facts.text import visible
from ffedit.files.atomic import check_file, finite, text_ready
from ffedit.progress import Progress
from ffedit.version import __version__


def is_first_process() -> bool:
    """Return whether this process shows and writes: it is the first of `accelerate launch`, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0 or int(os.environ.get("WORLD_SIZE", "1")) == 1


@contextmanager
def logged(verbose: bool, file: Path | None) -> Iterator[None]:
    """Log what ffedit does within the block: to standard error, a file, or both."""
    handlers: list[logging.Handler] = [logging.StreamHandler()] if verbose else []
    handlers += [LogFile(file, encoding="utf-8")] if file is not None else []
    logger, started = logging.getLogger("ffedit"), perf_counter()
    level = logger.level
    for handler in handlers:
        handler.setFormatter(OneLine("%(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        logger.info("ffedit %s: %s", __version__, shlex.join(map(str, get_current_context().obj or [])))
        yield
        logger.info("done in %.1f s", perf_counter() - started)
    except BaseException as error:
        logger.info("%s after %.1f s: %s", type(error).__name__, perf_counter() - started, error)
        raise
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)


class LogFile(logging.FileHandler):
    """A log that ends where it cannot be written: a full disk must not cost the result, nor show a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Stop writing to the file."""
        self.setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        """Close the file, even if a full disk refuses the last lines."""
        try:
            super().close()
        except OSError:
            return


class OneLine(logging.Formatter):
    """Formats a record on one line, with invisible characters visible: its text may come from a file or a model."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return visible(super().format(record))


class Surface:
    """Output of a command: a terminal, and optionally one JSON object, whose file is checked first."""

    def __init__(self, json_to: str | None = None, quiet: bool = False, verbose: bool = False) -> None:
        if json_to is not None and json_to != "-":
            check_file(Path(json_to))
        self.json_to = json_to
        self.quiet = quiet or json_to == "-"
        self.verbose = verbose
        self._notes = not quiet
        self._console = PlainConsole(quiet=self.quiet)
        self._status: Status | None = None

    def show(self, *parts: RenderableType | None) -> None:
        """Print the parts, each followed by an empty line."""
        self._stop()
        for part in parts:
            if part is not None:
                unwrapped = isinstance(part, Text) and bool(part.no_wrap)
                self._console.print(part, soft_wrap=unwrapped)
                self._console.print()

    def note(self, text: str) -> None:
        """Print a line on standard error, also with `--json -`."""
        if self._notes:
            click.echo(visible(text), err=True)

    def announce(self, what: str) -> None:
        """Show on a terminal what is being done, until something else is shown or the command ends."""
        console = PlainConsole(stderr=True)
        if console.is_terminal and not self.quiet:
            self._stop()
            self._status = console.status(Text(f"{what} …"))  # of a str it would read markup
            self._status.start()
            get_current_context().call_on_close(self._stop)

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show progress bars until the block ends; if ffedit logs, also log the seconds of each stage."""
        self._stop()
        with progress_bars(self.quiet) as progress:
            if not logging.getLogger("ffedit").isEnabledFor(logging.INFO):
                yield progress
                return
            from ffedit.cli.work.stages import timed_stages  # with torch, which takes seconds to import

            with timed_stages(progress) as timed_progress:
                yield timed_progress

    def write_json(self, result: dict[str, Any]) -> None:
        """Write the result to the file of `--json`, or to standard output for `-`. Raises EditError if it cannot."""
        with self.json_ready(result):
            pass

    @contextmanager
    def json_ready(self, result: dict[str, Any]) -> Iterator[None]:
        """Write the result as `write_json` does, but only when the block ends without an error."""
        if self.json_to is None or self.json_to == "-":
            yield
            if self.json_to:
                sys.stdout.write(json.dumps(finite(result), indent=2) + "\n")
        else:
            with text_ready(Path(self.json_to), json.dumps(finite(result), indent=2, ensure_ascii=False) + "\n"):
                yield
