"""What a server is told when it starts. Nothing of it can be changed, or read, by a request."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.yaml_files import explain_validation, read_yaml
from moevolve.search.running.webhooks import WebhookSection
from moevolve.search.settings.section import Section

Scope = Literal["read", "write"]
SCOPES: tuple[Scope, ...] = ("read", "write")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
EVERYWHERE = ("0.0.0.0", "::")
"""Stand for all addresses of a machine."""
_SHORTEST = 16
"""Characters of a token; shorter ones can be guessed."""


class ServerSettings(Section):
    """A server's settings.

    Attributes:
        store: URL of its store.
        host: address that it listens at.
        port: 0 takes a free one.
        hosts: names that it is reached under, without ports, besides `host`, those of this machine's loopback and, if
            `host` stands for all of its addresses, those that it has in its network.
        tokens: file of tokens, which nobody but its owner may read; lines are `read TOKEN` or `write TOKEN`. Without
            it they are taken from MOEVOLVE_READ_TOKEN and MOEVOLVE_WRITE_TOKEN.
        configurations: folders whose run files can be launched, by their names without `.yaml`.
        models: checkpoints that a launch may name in place of its run file's.
        exports: folder that exports are written into; None turns them off.
        logs: folder of the logs of searches that are launched from here.
        address: Ray cluster that searches launched from here join; None starts Ray on this machine for each.
        webhooks: who is told how searches that are launched from here end.
    """

    store: str = "sqlite:///moevolve.db"
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    hosts: tuple[str, ...] = ()
    tokens: Path | None = None
    configurations: tuple[Path, ...] = ()
    models: dict[str, str] = Field(default_factory=dict)
    exports: Path | None = None
    logs: Path = Path("moevolve-logs")
    address: str | None = None
    webhooks: tuple[WebhookSection, ...] = ()

    @model_validator(mode="after")
    def _folders_are_there(self) -> Self:
        for folder in self.configurations:
            if not folder.is_dir():
                raise ValueError(f"configurations: there is no folder {folder}")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it, by names of its own."""
        return {self.host, *self.hosts} <= set(LOOPBACK)

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Host names, lower case and without ports, that requests may be addressed to."""
        return frozenset(name.lower() for name in (*LOOPBACK, *self.hosts, *self.names))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What clients can reach it at: `host`, or the machine's names and addresses where that stands for all."""
        return _own_names() if self.host in EVERYWHERE else (self.host,)

    def run_files(self) -> dict[str, Path]:
        """The run files that can be launched, by name."""
        return {path.stem: path for folder in self.configurations for path in sorted(folder.glob("*.yaml"))}

    def read_tokens(self) -> dict[str, Scope]:
        """The tokens with their scopes.

        Raises:
            UserError: the file can't be read, others may read it, or a line of it is wrong, or it has none; or there is
                none where the server can be reached from other machines.
        """
        found = _tokens_of(self.tokens) if self.tokens is not None else _tokens_of_environment(os.environ)
        for token in found:
            if len(token) < _SHORTEST:
                raise UserError(f"a token of {len(token)} characters can be guessed; use {_SHORTEST} or more")
        if not found and self.tokens is not None:
            raise UserError(f"tokens: {self.tokens} has none: write lines `read TOKEN` or `write TOKEN` into it")
        if not found and not self.is_loopback:
            names = ", ".join(name for name in (self.host, *self.hosts) if name not in LOOPBACK)
            raise UserError(
                f"{names} can be reached from other machines, so tokens are needed: give --tokens FILE, or set "
                "MOEVOLVE_READ_TOKEN and MOEVOLVE_WRITE_TOKEN"
            )
        return found


def read_settings(path: Path | None, changes: Mapping[str, object]) -> ServerSettings:
    """Settings of a YAML file, if one is given, and of the command line, where None says nothing.

    Paths in the file that aren't absolute are taken from its folder.

    Raises:
        UserError: no such file, or a wrong setting; the message names it.
    """
    data = {} if path is None else read_yaml(path)
    if path is not None:
        for key in ("tokens", "exports", "logs"):
            if isinstance(data.get(key), str):
                data[key] = str(path.parent / data[key])
        if isinstance(data.get("configurations"), list):
            data["configurations"] = [str(path.parent / str(folder)) for folder in data["configurations"]]
    data |= {key: value for key, value in changes.items() if value is not None}
    try:
        return ServerSettings.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path or 'serve'}: {explain_validation(error, data)}") from None


def _own_names() -> tuple[str, ...]:
    """This machine's name, also with its domain, and its addresses as names lead to them and as it sends from."""
    name = socket.gethostname()
    found, addresses = [name], []
    with suppress(OSError):
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
        found.append(answers[0][3])
        addresses += [str(answer[4][0]) for answer in answers]
    # From where it would send to the outside (these are addresses for documentation); that sends nothing.
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((outside, 9))
            addresses.append(str(asking.getsockname()[0]))
    found += [one for one in addresses if not (ip_address(one).is_loopback or ip_address(one).is_link_local)]
    return tuple(dict.fromkeys(filter(None, found)))


def _tokens_of(path: Path) -> dict[str, Scope]:
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tokens: {path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"tokens: others than its owner may read {path}: chmod 600 {path}")
    found: dict[str, Scope] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) != 2 or words[0] not in SCOPES:
            raise UserError(f"tokens: {path}, line {number}: expected `read TOKEN` or `write TOKEN`")
        found[words[1]] = "write" if words[0] == "write" else "read"
    return found


def _tokens_of_environment(variables: Mapping[str, str]) -> dict[str, Scope]:
    names = {scope: f"MOEVOLVE_{scope.upper()}_TOKEN" for scope in SCOPES}
    return {variables[name]: scope for scope, name in names.items() if variables.get(name)}
