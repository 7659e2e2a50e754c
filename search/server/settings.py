"""Settings of the server, read once at its start. No request can change or read them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.yaml_files import explain_validation, read_yaml
from moevolve.search.genomes.contract.phases import Section

Scope = Literal["read", "write"]
SCOPES: tuple[Scope, ...] = ("read", "write")


@dataclass(frozen=True, slots=True)
class Token:
    """What a token allows, and the name of its owner in events; never the token itself."""

    scope: Scope
    name: str


LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Stand for all addresses of a machine.
WILDCARDS = ("0.0.0.0", "::")
# Characters. As hexadecimal digits they are 64 random bits, which can't be guessed over a network.
_MIN_TOKEN_LENGTH = 16


class ServerSettings(Section):
    """Settings of the server.

    Attributes:
        store: URL of the store.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        hosts: Further host names of the server, without ports, as clients send them: an international one as `xn--...`.
            `host` and the loopback names always count, and so do the machine's own names and addresses if `host`
            stands for all of its addresses.
        tokens: File that only its owner may read, with lines `read TOKEN NAME` or `write TOKEN NAME`; names may be left
            out. Without it, tokens are read from MOEVOLVE_READ_TOKEN and MOEVOLVE_WRITE_TOKEN.
        configurations: Folders of run files that can be launched, by their names without `.yaml`.
        models: Checkpoints (folder or hub id) by name, which a launch may use instead of its run file's.
        data: Files of requests by name, which checkpoints may be shrunk for.
        uploads: Folder of files of requests that clients upload; None refuses them.
        upload_mb: Largest size of such a file, in MB.
        exports: Folder that exports and shrunk checkpoints are written to; None turns both off.
        logs: Folder for the logs of searches and exports started by the server.
    """

    store: str = "sqlite:///moevolve.db"
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    hosts: tuple[str, ...] = ()
    tokens: Path | None = None
    configurations: tuple[Path, ...] = ()
    models: dict[str, str] = Field(default_factory=dict)
    data: dict[str, str] = Field(default_factory=dict)
    uploads: Path | None = None
    upload_mb: int = Field(64, ge=1)
    exports: Path | None = None
    logs: Path = Path("moevolve-logs")

    @model_validator(mode="after")
    def _folders_are_there(self) -> Self:
        for folder in self.configurations:
            if not folder.is_dir():
                raise ValueError(f"configurations: {folder} is no folder; create it or name another")
        return self

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Host names that requests may be addressed to, lower case and without ports."""
        return frozenset(name.lower() for name in (*LOOPBACK, *self.hosts, *self.names))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Host names for clients: `host`, or this machine's names and addresses if `host` stands for all of them."""
        return _machine_names() if self.host in WILDCARDS else (self.host,)

    def run_files(self) -> dict[str, Path]:
        """Run files that can be launched, by name."""
        return {path.stem: path for folder in self.configurations for path in sorted(folder.glob("*.yaml"))}

    def data_files(self) -> dict[str, str]:
        """Files of requests that checkpoints can be shrunk for, by name: the settings' and the uploaded ones."""
        return {name: str(path) for name, path in self.uploaded_files().items()} | self.data

    def uploaded_files(self) -> dict[str, Path]:
        """Absolute paths of the files that clients have uploaded, by name."""
        found = [] if self.uploads is None else sorted(self.uploads.resolve().glob("[!.]*"))
        # A link may lead out of the folder.
        return {path.name: path for path in found if path.is_file() and not path.is_symlink()}

    @property
    def upload_bytes(self) -> int:
        """Largest size of an uploaded file; 0 if none is taken."""
        return 0 if self.uploads is None else self.upload_mb * 10**6

    def read_tokens(self) -> dict[str, Token]:
        """Return the tokens by their text.

        Raises:
            UserError: the file can't be read, is readable by others, has a malformed line or no tokens; a token is too
                short; or other machines can connect and there are no tokens.
        """
        if self.tokens is None:
            given = {scope: os.environ.get(f"MOEVOLVE_{scope.upper()}_TOKEN") for scope in SCOPES}
            found = {text: Token(scope, f"the {scope} token") for scope, text in given.items() if text}
        else:
            found = _read_token_file(self.tokens)
        for token in found:
            if len(token) < _MIN_TOKEN_LENGTH:
                raise UserError(f"a token of {len(token)} characters can be guessed; use {_MIN_TOKEN_LENGTH} or more")
        if not found and self.tokens is not None:
            raise UserError(f"tokens: {self.tokens} has none: write lines `read TOKEN` or `write TOKEN` into it")
        others = [name for name in (self.host, *self.hosts) if name not in LOOPBACK]
        if not found and others:
            raise UserError(
                f"{', '.join(others)} can be reached from other machines, so tokens are needed: give --tokens FILE, or "
                "set MOEVOLVE_READ_TOKEN and MOEVOLVE_WRITE_TOKEN"
            )
        return found


def read_settings(path: Path | None, changes: Mapping[str, object]) -> ServerSettings:
    """Read the server's settings.

    Args:
        path: YAML file; relative paths in it start from its folder. None takes the defaults.
        changes: Settings from the command line, which replace those of the file unless they are None.

    Raises:
        UserError: the file doesn't exist, or a setting is wrong; the message names it.
    """
    data = {} if path is None else read_yaml(path)
    if path is not None:
        for key in ("tokens", "uploads", "exports", "logs"):
            if isinstance(data.get(key), str):
                data[key] = str(path.parent / data[key])
        if isinstance(data.get("configurations"), list):
            data["configurations"] = [str(path.parent / str(folder)) for folder in data["configurations"]]
    data |= {key: value for key, value in changes.items() if value is not None}
    try:
        return ServerSettings.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path or 'serve'}: {explain_validation(error, data)}") from None


def _machine_names() -> tuple[str, ...]:
    """This machine's host name, its full name with the domain, and its addresses in the network."""
    name = socket.gethostname()
    found, addresses = [name], []
    with suppress(OSError):
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
        found.append(answers[0][3])
        addresses += [str(answer[4][0]) for answer in answers]
    # Connecting a datagram socket sends nothing, but selects the address that packets to the outside would come from.
    # The two targets are addresses reserved for documentation.
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            addresses.append(str(probe.getsockname()[0]))
    found += [one for one in addresses if not (ip_address(one).is_loopback or ip_address(one).is_link_local)]
    return tuple(dict.fromkeys(filter(None, found)))


def _read_token_file(path: Path) -> dict[str, Token]:
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tokens: {path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"tokens: others than its owner may read {path}: chmod 600 {path}")
    found: dict[str, Token] = {}
    for number, line in enumerate(lines, 1):
        scope, *words = line.split(maxsplit=2) or ["#"]
        if scope.startswith("#"):
            continue
        if not words or scope not in SCOPES:
            raise UserError(f"tokens: {path}, line {number}: expected `read TOKEN` or `write TOKEN`, and maybe a name")
        name = words[1].strip() if words[1:] else f"the {scope} token of line {number}"
        found[words[0]] = Token("write" if scope == "write" else "read", name)
    return found
