"""When a node is left out, and when it is tried again."""

from __future__ import annotations

from moevolve.search.pools.node_failures import LEFT_OUT_S, NodeFailures


def test_three_failures_in_a_row_leave_a_node_out_for_a_while() -> None:
    now = 1000.0
    nodes = NodeFailures(lambda: now)
    assert [nodes.failed("bad", what) for what in ("start 1", "start 1", "run 1", "run 1")] == [False] * 4
    nodes.succeeded("bad")
    assert [nodes.failed("bad", what) for what in ("start 2", "run 2", "run 3")] == [False, False, True]
    assert nodes.left_out == {"bad"} and not nodes.failed("other", "run 4")
    assert not nodes.failed("bad", "run 5"), "by a worker that is still there"
    now += LEFT_OUT_S
    assert nodes.left_out == set()
    assert nodes.failed("bad", "start 6") and nodes.left_out == {"bad"}, "once more was enough"
    now += LEFT_OUT_S
    nodes.succeeded("bad")
    assert not nodes.failed("bad", "start 7"), "it is counted anew"
