"""Queues and resources, on cases small enough to be worked out by hand."""

import pytest

from bench.streams.times import TimelineTask, run


def task(name, queue, seconds, after=(), **uses):
    shares = {(resource,): share for resource, share in uses.items()}
    return TimelineTask((name,), (0, queue), seconds, tuple((other,) for other in after), shares, name)


def times(*tasks, lines=()):
    return {key[0]: (ran.start, ran.stop) for key, ran in run(tasks, lines).items()}


def test_queues_keep_their_order_and_lines_serve_who_comes_first():
    found = times(
        task("slow", "other", 3.0),
        task("first", "stream", 1.0, after=["slow"]),
        task("second", "stream", 1.0),
    )
    assert found == {"slow": (0, 3), "first": (3, 4), "second": (4, 5)}
    tasks = (
        task("slow", "other", 3.0),
        task("first", "socket", 1.0, after=["slow"]),
        task("second", "socket", 1.0),
    )
    assert times(*tasks, lines=[(0, "socket")]) == {"second": (0, 1), "slow": (0, 3), "first": (3, 4)}
    assert times(task("a", "one", 2.0), task("b", "two", 3.0)) == {"a": (0, 2), "b": (0, 3)}
    assert times(task("a", "one", 0.0), task("b", "one", 0.0, after=["a"])) == {"a": (0, 0), "b": (0, 0)}


def test_resources_are_shared_and_the_scarcest_counts():
    found = times(task("short", "one", 1.0, link=1.0), task("long", "two", 2.0, link=1.0))
    assert found == {"short": (0, 2), "long": (0, 3)}  # half speed until 2, then alone
    found = times(task("copy", "one", 1.0, processors=0.25), task("product", "two", 1.0, processors=1.0))
    assert found["copy"] == (0, 1)
    assert found["product"] == (0, pytest.approx(1.25))  # 0.75 in the first second
    found = times(
        task("copy", "one", 1.0, out=1.0, into=1.0), task("busy", "two", 4.0, into=1.0), task("x", "x", 0.5)
    )
    assert found["copy"] == (0, 2)


def test_tasks_that_cannot_run_are_told():
    tasks = [task("first", "stream", 1.0, after=["second"]), task("second", "stream", 1.0)]
    with pytest.raises(RuntimeError, match=r"these tasks wait for each other: .*'first'.*'second'"):
        run(tasks)
    with pytest.raises(ValueError, match=r"waits for .*'gone'.*, which do not exist"):
        run([task("a", "one", 1.0, after=["gone"])])
    with pytest.raises(ValueError, match="same key"):
        run([task("a", "one", 1.0), task("a", "two", 1.0)])
