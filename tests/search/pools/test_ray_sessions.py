"""Several searches of one process, as in a notebook: which Ray they get, one after the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import ray

from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_cluster import cluster_name, leave_ray, start_ray

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """In no Ray before and after."""
    ray.shutdown()
    yield
    ray.shutdown()


@contextlib.contextmanager
def used(**settings: object) -> Iterator[str | None]:
    """A search's Ray, by the name of its session, while the search runs."""
    user = object()
    start_ray(WorkersSection.model_validate(settings), user)
    try:
        yield cluster_name()
    finally:
        leave_ray(user)


def cpus() -> float:
    return float(ray.cluster_resources()["CPU"])


def test_a_search_gets_another_ray_if_it_does_not_fit_into_the_one_before(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PoolError, match=r"127\.0\.0\.1:1: no Ray cluster answers there"), used(address="127.0.0.1:1"):
        pass
    with used(address=ray_address) as joined:
        assert cpus() == 4
    for address in ("auto", ray_address):
        with used(address=address) as again:
            assert again == joined
    with used(num_cpus=0.5) as first:
        assert first != joined
        assert cpus() >= (os.cpu_count() or 1), "it may be scaled up later"
        enough = int(cpus())
        with used(num_cpus=enough) as second:
            assert second == first
        for wanted in ({"count": 2, "num_cpus": enough}, {"address": ray_address}, {"address": "auto"}):
            with pytest.raises(PoolError, match=rf"is in the Ray at \S+ already, with {enough} CPUs"), used(**wanted):
                pass
    with used(count="auto", min=0) as same:
        assert same == first

    def no_more(num_cpus: int, **_: object) -> None:
        raise RuntimeError(f"no Ray of {num_cpus} CPUs")

    with monkeypatch.context() as patch:
        patch.setattr(ray, "init", no_more)
        with pytest.raises(PoolError, match=f"no Ray of {2 * enough} CPUs"), used(count=2, num_cpus=enough):
            pass
    assert not ray.is_initialized(), "it was too small, and nobody used it"
    with used(address=ray_address) as again:
        assert again == joined


def test_a_ray_that_is_the_users_own_is_taken_and_never_left(ray_address: str) -> None:
    ray.init(ray_address, log_to_driver=False)
    mine = cluster_name()
    for settings in ({}, {"count": 2, "num_cpus": 64}, {"address": "auto"}, {"address": ray_address}):
        with used(**settings) as found:
            assert found == mine
    with pytest.raises(PoolError, match=r"call ray\.shutdown\(\) first"), used(address="127.0.0.1:1"):
        pass
    assert cluster_name() == mine
