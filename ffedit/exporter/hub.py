"""Upload of an exported folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from ffedit.errors import EditError


def push(folder: Path, name: str) -> str:
    """Upload a folder, with its model card, as a repository of the hub, which is created if it does not exist.

    Args:
        folder: the folder that `export` made.
        name: "user/model".

    Returns:
        The repository's address.

    Raises:
        EditError: no network, no token, no permission, or no such name; the local folder is kept.
    """
    try:
        made = huggingface_hub.create_repo(name, exist_ok=True)
        huggingface_hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Edited with ffedit")
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        OSError,
        ValueError,
    ) as error:
        raise EditError(
            f"{name}: not pushed ({shorten(str(error), 200, placeholder=' …')}); {folder} stands, "
            f"`hf upload {name} {folder}` tries again"
        ) from error
    return str(made)
