"""The file of a SQLite store: where it may be, and reading it without leaving a trace beside it.

A store in write-ahead-log mode has a file `-wal` beside it for as long as anybody has it open. Where there is none, a
reader takes the store as a file that doesn't change (`immutable`): it needs no right to write to the folder then, and
leaves no `-shm` of its own there, which the store's owner might not be allowed to write. Whether that held is seen at
the end of each of its transactions (`Seal`); if not, what it read is thrown away, and it joins those that write.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL

from moevolve.store.errors import StoreError

BUSY_SECONDS = 60

_REMOTE = frozenset(
    (
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb",
            "smbfs",
            "smb2",
            "smb3",
            "9p",
            "afs",
            "ceph",
            "lustre",
            "gpfs",
            "beegfs",
            "panfs",
        ),
        *("ocfs2", "gfs", "gfs2", "orangefs", "pvfs2", "wekafs", "glusterfs", "davfs", "virtiofs"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse"),
        *(
            "fuse.rclone",
            "fuse.davfs2",
            "fuse.smbnetfs",
            "fuse.moosefs",
            "fuse.mfs",
            "fuse.seaweedfs",
            "fuse.blobfuse2",
        ),
    )
)
"""File systems that several machines may have mounted: SQLite's locks don't reach from one to another."""


def file_of(url: URL) -> Path | None:
    """The file of a SQLite URL; None for other databases and for one in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database))


def check_file(path: Path, create: bool, read_only: bool) -> None:
    """Refuses a file that can't be a store here.

    Raises:
        StoreError: a folder, in a missing folder, missing itself (unless `create`), or, for a writer, on a file system
            of several machines.
    """
    if path.is_dir():
        raise StoreError(f"{path} is a folder, not a store")
    if not path.parent.is_dir():
        raise StoreError(f"folder {path.parent} of the store {path.name} does not exist; create it first")
    if not create and not path.exists():
        raise StoreError(f"there is no store at {path}")
    remote = None if read_only else remote_file_system(path, _mounts())
    if remote is not None:
        raise StoreError(
            f"{path} is on a network file system ({remote}), where SQLite damages what it writes: keep the store on a "
            "disk of this machine, or use PostgreSQL (postgresql://USER@HOST/NAME)"
        )


def remote_file_system(path: Path, mounts: str) -> str | None:
    """The type of the network file system that a path is on, None if it is on this machine's own.

    Args:
        path: of a file that need not exist.
        mounts: text of the form of /proc/mounts; empty where nothing is known.
    """
    place, best = path.resolve(), ("", "")
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        mount = words[1].encode().decode("unicode_escape")
        # Of several at one place the last one covers the others.
        if place.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = mount, words[2]
    # Sandboxes have the machine's own disk as 9p, at the root.
    return best[1] if best[1] in _REMOTE and best != ("/", "9p") else None


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a store looked like that nobody had open.

    Attributes:
        path: its file.
        state: time of its last change (ns) and its size (bytes); None if somebody has it open.
    """

    path: Path
    state: tuple[int, int] | None

    @classmethod
    def of(cls, path: Path) -> Seal:
        """Of a store as it is now."""
        if any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal")):
            return cls(path, None)
        found = path.stat()
        return cls(path, (found.st_mtime_ns, found.st_size))

    @property
    def whole(self) -> bool:
        """Whether a connection that was made under this seal may still be used: nobody has written meanwhile."""
        return self.state is None or (self.path.exists() and Seal.of(self.path) == self)


def connect_to_read(path: Path) -> tuple[sqlite3.Connection, Seal]:
    """A connection that can change nothing, and what has to hold for it.

    Raises:
        StoreError: somebody has left a log that can't be read from here.
    """
    path = path.resolve()  # beside which SQLite has its log, whatever link leads there
    seal = Seal.of(path)
    writable = os.access(path.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    if seal.state is None and not writable and not path.with_name(path.name + "-shm").exists():
        raise StoreError(
            f"{path} was left in the middle of a write and its folder can't be written to: copy it, with the files "
            f"{path.name}-* beside it, to a folder of yours"
        )
    how = "mode=ro" if seal.state is None else "mode=ro&immutable=1"
    address = f"file:{quote(str(path))}?{how}"
    return sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, check_same_thread=False), seal
