"""Files of requests that clients upload: each is checked, and kept in the server's folder under a plain name."""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from starlette.concurrency import run_in_threadpool

from moevolve.evaluators.errors import UserError, suggestion
from moevolve.evaluators.text_files import ROW_FILES, writing_into
from moevolve.search.server.dependencies import ServerState
from moevolve.search.server.processes import BusyError
from moevolve.search.server.settings import ServerSettings
from moevolve.search.shrink.data.domains import usable_rows
from moevolve.search.shrink.data.files import TEXT_FILES
from moevolve.store.errors import NameTakenError, NotFoundError

_SUFFIXES = (*ROW_FILES, *TEXT_FILES)
# Most uploaded files that are kept, so that clients together can't fill the disk.
_MOST_FILES = 100
# Bytes of a small file, whose check takes about a second and doesn't wait for that of a large one.
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of requests that a checkpoint can be shrunk for.

    Attributes:
        name: Name by which a shrink asks for it.
        bytes: Size of an uploaded file; None of one that the settings name, which can't be deleted.
        rows: Number of the rows of a file that was checked just now; None of others.
    """

    name: str
    bytes: int | None
    rows: int | None = None


def list_files(settings: ServerSettings) -> list[DataFile]:
    """Return the files of requests that the server knows, by name."""
    sizes = {name: path.stat().st_size for name, path in settings.uploaded_files().items()}
    return [
        DataFile(name, sizes[name] if name not in settings.data else None) for name in sorted(settings.data_files())
    ]


async def keep_upload(
    given: str, content: AsyncIterator[bytes], server: ServerState, columns: str | None = None
) -> DataFile:
    """Keep a file in the server's folder for uploads, if a checkpoint can be shrunk for it.

    Args:
        given: The client's name of the file.
        content: The file, in pieces.
        server: The server.
        columns: What a shrink will give as `columns` for the file.

    Raises:
        UserError: The server takes no files or has too many, the name has another suffix, the file can't be written,
            or its rows can't be used.
        NameTakenError: The server has a file of this name with other content.
        HTTPException: Status 503, if too many files are being checked.
    """
    folder = server.settings.uploads
    if folder is None:
        raise UserError("this server takes no files; see `uploads` in its settings")
    name, there = plain_name(given), server.settings.uploaded_files()
    if name not in there and len(there) >= _MOST_FILES:
        raise UserError(f"the server keeps {_MOST_FILES} uploaded files, and has as many; delete one first")
    with writing_into(folder), NamedTemporaryFile(dir=folder, prefix=".", suffix=Path(name).suffix) as file:
        async for piece in content:
            await run_in_threadpool(file.write, piece)
        file.flush()
        size = file.tell()
        try:
            rows = await server.uploads[size > _SMALL].call(usable_rows, Path(file.name), columns)
        except UserError as error:
            raise UserError(str(error).replace(file.name, name)) from None
        _publish(Path(file.name), folder / name, taken=name in server.settings.data)
        return DataFile(name, size, rows)


def delete_upload(name: str, server: ServerState) -> None:
    """Delete an uploaded file, unless a running shrink was asked to use it.

    A shrink copies what it uses of a file when it begins. One that has been stopped reads the file again when it is
    resumed, and says so if it is gone.

    Raises:
        NotFoundError: No file of this name was uploaded.
        BusyError: A shrink that this server started reads it.
    """
    files = server.settings.uploaded_files()
    if name not in files:
        raise NotFoundError(f"no uploaded file {name!r}: {suggestion(name, files)}")
    for job in server.processes.jobs():
        if job.running and str(files[name]) in server.processes.arguments(job.name):
            raise BusyError(f"{name} is in use by the shrink {job.name}; stop it, or try again when it has ended")
    with writing_into(files[name].parent):
        files[name].unlink(missing_ok=True)


def plain_name(given: str) -> str:
    """Return the name of a file with a dash for everything but ASCII letters, digits, dots, dashes and underscores.

    Raises:
        UserError: It doesn't end as names of files of requests do.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given).lstrip("-.")
    if Path(name).suffix.lower() not in _SUFFIXES:
        raise UserError(f"{given!r}: the name of a file of requests must end in one of {', '.join(_SUFFIXES)}")
    return name


def _publish(file: Path, target: Path, taken: bool) -> None:
    """Give a checked file its name, unless another file has it."""
    if not taken:
        try:
            os.link(file, target)  # unlike a rename, it never replaces a file that somebody's shrink has begun with
        except FileExistsError:
            taken = target.is_symlink() or not filecmp.cmp(file, target, shallow=False)
    if taken:
        raise NameTakenError(f"the server has a file {target.name} with other content; choose another name")
