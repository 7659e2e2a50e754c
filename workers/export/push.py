"""Uploads finished exports to the hub."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from moevolve.evaluators.errors import UserError, one_line, opening

# Characters of the hub's message that are quoted.
_LONGEST = 300


def check_login(repository: str) -> None:
    """Raise a `UserError` without a token of the hub, or a way to it, before an export that takes hours."""
    from huggingface_hub import get_token, is_offline_mode

    if is_offline_mode():
        raise UserError(f"--push {repository}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it")
    if get_token() is None:
        raise UserError(
            f"--push {repository} requires a token of the hub; log in with `hf auth login`, or set HF_TOKEN"
        )


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a new private model repository of the hub, and return its URL.

    Args:
        folder: Folder of a finished export.
        repository: Its name on the hub, `OWNER/NAME`.

    Raises:
        UserError: There is a repository of this name, the token may not create it, or the hub can't be reached. The
            folder stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    message = f"the checkpoint is complete in {folder}, but wasn't pushed to {repository}"
    advice = f"see `hf auth whoami`; once the repository is there, `hf upload {repository} {folder}` uploads it"
    with opening(message, advice):
        api = HfApi(library_name="moevolve", library_version=version("moevolve"))
        try:
            # An existing repository is refused: shards of another model would stay beside the new ones.
            url = api.create_repo(repository, private=True)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add the checkpoint")
        except HfHubHTTPError as error:
            answer = one_line(f"{error.response.status_code} {error.server_message or ''}", _LONGEST).strip(" .")
            raise UserError(f"{message}: the hub answers {answer}; {advice}") from error
    return str(url)
