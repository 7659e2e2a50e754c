"""Maintenance of stores: `moevolve.db` has a function for each command `moevolve db ...`."""

from __future__ import annotations

from moevolve._asking import asks
from moevolve.search.requests.stores import CheckRequest, CopyRequest, PruneRequest, UpgradeRequest

upgrade = asks(UpgradeRequest)
check = asks(CheckRequest)
prune = asks(PruneRequest)
copy = asks(CopyRequest)
