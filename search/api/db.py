"""Maintenance of stores: `moevolve.db` has a function for each command `moevolve db ...`."""

from __future__ import annotations

from moevolve._asking import function_of
from moevolve.search.interface.stores import CopyRequest, PruneRequest, UpgradeRequest
from moevolve.search.shrink.check import CheckRequest

upgrade = function_of(UpgradeRequest)
check = function_of(CheckRequest)
prune = function_of(PruneRequest)
copy = function_of(CopyRequest)
