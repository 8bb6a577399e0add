"""`ffedit ui`: a page on this machine to trace a fact, edit it, ask before and after, undo, and keep the report."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import asking_options, surface_options
from ffedit.errors import EditError

HOST = "127.0.0.1"


@click.command()
@surface_options
@asking_options
@click.option("--port", default=7860, type=click.IntRange(1, 65535), help="Port on this machine (127.0.0.1).")
def ui(port: int, **kwargs: Any) -> None:
    """Serve a page to edit a model by hand; other machines cannot reach it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EditError(f"port {port}: {error.strerror}; name another with --port") from error
    if find_spec("gradio") is None or find_spec("matplotlib") is None:
        raise EditError("the page is made with gradio and matplotlib; install them with: pip install 'ffedit[ui]'")
    work.serve(host=HOST, port=port, **kwargs)
