"""Coroutines go on in the order in which what they await arrives, and hold up nobody else."""

import pytest

from plurax.server.coroutines import Coroutines, arrival, together


@pytest.fixture
def running():
    return Coroutines()


def test_each_goes_on_where_its_own_arrives(running):
    seen = []

    async def twice(name):
        seen.append(name)
        seen.append(await arrival(f"{name}0"))
        seen.append(await arrival(f"{name}1"))

    for name in "ab":
        running.start(twice(name))
    assert seen == ["a", "b"]
    assert running.awaited == ["a0", "b0"]
    running.resume(["b0"])
    assert running.awaited == ["a0", "b1"]
    running.resume(["b1", "a0"])
    assert seen == ["a", "b", "b0", "b1", "a0"]
    assert running.awaited == ["a1"]
    running.resume(["a1"])
    assert running.awaited == []


async def echo(reference):
    return await arrival(reference)


async def nothing():
    return "at once"


def test_together_is_all_of_them_in_their_order(running):
    seen = []

    async def every():
        inner = together(echo(f"inner {index}") for index in range(2))
        seen.append(await together([echo("first"), inner, nothing(), echo("last")]))
        seen.append(await together([]))

    running.start(every())
    assert sorted(running.awaited) == ["first", "inner 0", "inner 1", "last"]
    for reference in ("last", "inner 1", "first"):
        running.resume([reference])
        assert seen == []
    running.resume(["inner 0"])
    assert seen == [["first", ["inner 0", "inner 1"], "at once", "last"], []]
    assert running.awaited == []


def test_an_error_is_raised_where_it_is_resumed(running):
    async def fails():
        await together([echo("a"), echo("b")])
        raise ValueError("of its own")

    running.start(fails())
    running.resume(["b"])
    with pytest.raises(ValueError, match="of its own"):
        running.resume(["a"])
    assert running.awaited == []


def test_one_may_start_another(running):
    async def outer():
        await arrival("outer")
        running.start(echo("inner"))

    running.start(outer())
    running.resume(["outer"])
    assert running.awaited == ["inner"]
    running.resume(["inner"])
    assert running.awaited == []
