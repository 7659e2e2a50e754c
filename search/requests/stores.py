"""Requests about whole stores: maintaining and serving them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, InstanceOf

from moevolve.search.requests.parameters import STORE_VARIABLE
from moevolve.search.requests.record import Flag, Request, about, record
from moevolve.store.repository import Store

if TYPE_CHECKING:  # the answers
    from moevolve.store.records import Upgrade
    from moevolve.store.upkeep.check import CheckReport
    from moevolve.store.upkeep.copy import CopyReport
    from moevolve.store.upkeep.prune import PruneReport


@record
class UpgradeRequest(Request["Upgrade"]):
    """Migrate a store to this version's schema; refused while one of its searches is running.

    It is one transaction. Repeating it does nothing.

    Raises:
        StoreError: there is no such store, or one of its searches is running: the message says which, and where.
    """


@record
class CheckRequest(Request["CheckReport"]):
    """Check a store for damage; exit code 1 if there is any. Writes nothing.

    Raises:
        StoreError: there is no such store.
    """


@record
class PruneRequest(Request["PruneReport"]):
    """Delete searches, and evaluations and calibrations that no other search needs.

    If no search is named, only unneeded evaluations and calibrations are deleted.

    Raises:
        StoreError: there is no such store or search, or the search is running. Nothing is deleted then.
    """

    _: KW_ONLY
    searches: Annotated[
        Sequence[str],
        about("Delete this search (name or id), for good; several may be named."),
        Flag("--search", "NAME", list[str]),
    ] = ()
    dry_run: Annotated[bool, about("Only say what would be deleted."), Flag("--dry-run")] = False


@record
class CopyRequest(Request["CopyReport"]):
    """Copy searches with everything that belongs to them to another store, SQLite or PostgreSQL.

    The copies rank and resume like the originals. Repeating it brings them up to date.

    Raises:
        StoreError: there is no such store or search, or the other store has another search of that name. Nothing is
            copied then.
        UserError: both are the same store.
    """

    searches: Annotated[
        Sequence[str],
        about("Names or ids of the searches; none copies all."),
        Flag(metavar="[SEARCH]...", kind=list[str]),
    ] = ()
    _: KW_ONLY
    to: Annotated[
        str | InstanceOf[Store],
        about("SQLAlchemy URL of the store to copy to, made if need be."),
        Flag("--to", "URL", str),
    ]


@record
class ServeRequest(Request[None]):
    """Serve a store: its searches in the browser, and an HTTP API for them, until the process is stopped.

    Raises:
        UserError: a setting is wrong, the address can't be listened at, or tokens are needed and there are none.
        StoreError: the store can't be opened.
    """

    settings: Annotated[Path | None, about("Further settings of the server (YAML)."), Flag("--settings")] = None
    _: KW_ONLY
    host: Annotated[str | None, about("Address to listen at; default: 127.0.0.1, for this machine only.")] = None
    port: Annotated[int | None, about("Port to listen at; default: 8080. 0 takes a free one.")] = None
    hosts: Annotated[
        Sequence[str] | None,
        about("A further host name of the server; several may be named. They replace the settings'."),
        Flag("--hosts", "NAME", list[str]),
    ] = None
    store: Annotated[
        str | None,
        about("SQLAlchemy URL, made if need be; default: the settings', or a file here."),
        Flag(variables=(STORE_VARIABLE,)),
    ] = None
    tokens: Annotated[
        Path | None, about("File of tokens, readable by its owner only: lines `read TOKEN` or `write TOKEN`.")
    ] = None
