"""Ask a Ray cluster whether it lets us in: `python -m moevolve.search.pools.ray_knock ADDRESS`.

In a process of its own, because Ray keeps trying for 40 s, warns below Python as it does, and reads how to authenticate
only once per process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Literal

from ray._private.services import canonicalize_bootstrap_address_or_die, get_node_to_connect_for_driver
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

MODE = "RAY_AUTH_MODE"
LIMIT_S = 10
"""Seconds a cluster has to answer."""
_NODE_S = 5
"""Seconds in which a node of it must be found on this machine."""

Answer = Literal["open", "token", "no token", "wrong token", "no node", "nothing there"]
"""How the cluster lets us in: as anybody, or with the token that Ray finds here. Or why it doesn't: there is no token
here, it is another cluster's, this machine is none of its nodes, or nothing answers."""


def main(address: str) -> tuple[Answer, str]:
    """Knock at a cluster.

    Args:
        address: `host:port` or `auto`.

    Returns:
        Its answer, and its `host:port` or, without an answer, what went wrong.
    """
    try:
        found = str(canonicalize_bootstrap_address_or_die(address))
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=LIMIT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        return "nothing there", " ".join(str(error).split())
    # Ends this process in the middle of what Python can't interrupt.
    signal.alarm(LIMIT_S)
    if _enters("disabled", found):
        return ("open" if _is_node(found) else "no node"), found
    try:
        has_token = AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    except AuthenticationError:  # RAY_AUTH_TOKEN_PATH names no file
        has_token = False
    if not has_token:
        return "no token", found
    if not _enters("token", found):
        return "wrong token", found
    return ("token" if _is_node(found) else "no node"), found


def _enters(mode: str, address: str) -> bool:
    os.environ[MODE] = mode
    Config.initialize("")
    try:
        GcsClient(address=address)
    except AuthenticationError:
        return False
    return True


def _is_node(address: str) -> bool:
    """Whether one of the cluster's nodes runs on this machine; Ray itself looks for one for a minute."""
    signal.alarm(LIMIT_S + _NODE_S)
    try:
        get_node_to_connect_for_driver(GcsClient(address=address), timeout_seconds=_NODE_S)
    except RuntimeError as error:
        return "No node info found" not in str(error)  # but that the cluster is slow to tell, say
    return True


if __name__ == "__main__":
    print(*main(sys.argv[1]), sep="\n")  # noqa: T201 - what the process that started this one reads
