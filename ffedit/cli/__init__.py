"""Command line: parse, call the public API, render.

Exit codes: 0 done; 1 an error in the input, shown in one line; 2 usage; 3 an edit that did not take (0 if `--force`
saves it), misses a `--require` or breaks a guardrail of `--strict`; 4 an internal check of ffedit failed; 130
interrupted.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import time
from io import TextIOWrapper
from typing import NoReturn

import rich_click as click

from ffedit.display.terminal.console import PlainConsole, error_line
from ffedit.errors import CheckError, FFEditError, RequirementError
from ffedit.version import __version__

COMMANDS = {
    "apply": "Write facts into a model: locate, edit, measure, export.",
    "run": "Make the edit that a recipe (a YAML file) describes.",
    "choose-layer": "Compare layers by trial edits, and name the best one.",
    "locate": "Find the layer that recalls a fact, by causal tracing.",
    "inspect": "Show one memory, the memories that a prompt activates, or those that an edit adds.",
    "methods": "List the methods, with the problem that each solves and when to choose it.",
    "stats": "Collect the key statistics of ordinary text, once for many edits.",
    "evaluate": "Score facts on a model, before and after an edit.",
    "bench": "Compare methods on many facts: one by one, in batches, in sequences.",
    "ask": "Let a model complete prompts, before and after an edit.",
    "ui": "Edit by hand on a page in the browser, on this machine.",
    "export": "Export an edit as an edited checkpoint, an adapter or a GGUF file.",
    "undo": "Remove an edit from an exported checkpoint, bit for bit.",
    "show": "Show an edit: facts, method, settings, scores.",
    "diff": "Compare two checkpoints: the changed matrices and the size of each change.",
    "doctor": "Show versions, devices, and the editable parts of a model.",
    "cache": "List or clear what ffedit keeps between runs.",
}
# Idle threads of torch spin, which takes the processor from other programs. With these settings they sleep; with GNU's
# OpenMP they first spin a tenth of a millisecond, because waking a thread takes longer than a small product. Read when
# torch loads.
WAITS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}
# New objects after which Python looks for unused cycles; its default, 700, takes a quarter of the time of all imports.
COLLECTED = 50_000
# Headings of `--help`, each with its options; all other options stand under "Options".
PANELS = {
    "The fact, instead of FACTS": ("--subject", "--prompt", "--target", "--previous"),
    "The edit": (
        *("--layers", "--fact-token", "--method", "--methods", "--spread", "--preset", "--set", "--corpus", "--stats"),
        *("--seed", "--protect", "--require", "--strict"),
    ),
    "The model": (
        *("--model", "--chat", "--device", "--dtype", "--revision", "--trust-remote-code", "--value-matrix"),
        *("--device-map", "--offload", "--max-memory"),
    ),
    "Output": (
        *("--out", "--export", "--save-recipe", "--plot", "--html", "--force"),
        *("--json", "--quiet", "--verbose", "--log"),
    ),
}
EDITING = ("apply", "bench", "choose-layer")  # in other commands, options of "The edit" are of something else
HELP = {
    "option_groups": {
        f"ffedit {command}*": [
            {"name": name, "options": list(options)}
            for name, options in PANELS.items()
            if command in EDITING or name != "The edit"
        ]
        for command in COMMANDS
    }
}


class Lazy(click.RichGroup):
    """Group of `COMMANDS`, each the function of a module of its name, imported when it is called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in workflow order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the module of a command and return the command."""
        if name not in COMMANDS:
            return None
        function = name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"ffedit.cli.{function}"), function)
        command.short_help = COMMANDS[name]
        return command


# click suggests one of these names for an unknown command.
@click.command(
    cls=Lazy,
    commands=[click.Command(name) for name in COMMANDS],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.rich_config(HELP)
@click.version_option(__version__, "--version", "-V", prog_name="ffedit")
def cli() -> None:
    """Find where a language model stores a fact, change it, measure what else changed, and export the model."""


def main() -> None:
    """Run the command line and exit with its code."""
    if not os.environ.keys() & WAITS.keys():
        os.environ |= WAITS
    gc.set_threshold(COLLECTED)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # ? for what an ASCII terminal cannot show
    _exit(invoke())


def _exit(code: int) -> NoReturn:
    """Exit with `code`; if torch is loaded, without freeing Python's objects, which takes a second."""
    if "torch" in sys.modules:
        atexit._run_exitfuncs()
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # None if it was closed when the process began
                    stream.flush()
        except (OSError, ValueError):  # the reader of the output is gone, and Python reports it
            sys.exit(code)
        os._exit(code)
    sys.exit(code)


def invoke(arguments: list[str] | None = None) -> int:
    """Run the command line on `arguments` and return the exit code."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        cli.main(words, prog_name="ffedit", standalone_mode=False, obj=words)
        return 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "ffedit"
        message = error.format_message()
        _show(f"{message}{'' if message.endswith(('.', '?', ')')) else '.'} See `{path} --help`.")
        return error.exit_code
    except click.ClickException as error:
        _show(error.format_message())
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        click.echo(str(error) or "interrupted: the model and the disk are as before", err=True)
        return 130
    except FFEditError as error:
        _show(str(error))
        return 3 if isinstance(error, RequirementError) else 4 if isinstance(error, CheckError) else 1
    except (MemoryError, RuntimeError) as error:
        from ffedit.inference.batching import device_failure

        if (failure := device_failure(error)) is None:
            raise
        _show(failure)
        return 1
    except OSError as error:  # for example a cache that cannot be cleared, or a file that cannot be read
        _show(f"{error.filename or 'the disk'}: {error.strerror or error}")
        return 1


def _show(message: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        # The first process shows an error that all have; the launcher ends the others during this pause.
        time.sleep(5)
    PlainConsole(stderr=True).print(error_line(message), soft_wrap=True)
