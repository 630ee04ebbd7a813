"""The circuit: what a failure costs the commands after it."""

from types import SimpleNamespace

import pytest
from redis import exceptions

from manthan.manager.tiers import redis_client
from manthan.manager.tiers.redis_client import BREAK_FIRST_S, BREAK_MOST_S, Circuit, RedisFullError, StoreDownError


class World:
    """A circuit, a clock that stands until it is moved, and jitter as it is set: 0 the shortest, 1 the longest."""

    def __init__(self) -> None:
        self.now, self.jitter, self.rings = 1000.0, 1.0, 0
        self.circuit = Circuit(self._ring)

    def _ring(self) -> None:
        self.rings += 1

    def uniform(self, low: float, high: float) -> float:
        return low + self.jitter * (high - low)

    def command(self, error: Exception | None = None) -> None:
        with self.circuit.guard():
            if error:
                raise error

    def fail(self) -> float:
        """Fail as soon as a command is let through; returns the wait until the next one."""
        self.now += self.circuit.wait_s
        with pytest.raises(StoreDownError):
            self.command(exceptions.ConnectionError("refused"))
        return self.circuit.wait_s


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(redis_client, "time", SimpleNamespace(monotonic=lambda: world.now))
    monkeypatch.setattr(redis_client, "random", world)
    return world


def test_a_circuit_is_closed_at_first_and_after_an_answer(world: World) -> None:
    for _ in range(2):
        assert (world.circuit.is_up, world.circuit.wait_s, world.rings) == (True, 0, 0)
        world.command()


def test_after_a_failure_no_command_is_let_through_for_a_while(world: World) -> None:
    wait = world.fail()
    assert not world.circuit.is_up
    world.now += wait * 0.99
    with (
        pytest.raises(StoreDownError, match=r"not asked for another .* ConnectionError: refused"),
        world.circuit.guard(),
    ):
        raise AssertionError("was let through")
    world.now += wait * 0.01
    world.command()
    assert world.circuit.is_up


@pytest.mark.parametrize(("jitter", "share"), [(1.0, 1.0), (0.0, 0.5)])
def test_the_wait_doubles_up_to_a_bound(world: World, jitter: float, share: float) -> None:
    world.jitter = jitter
    waits = [world.fail() for _ in range(7)]
    longest = [BREAK_FIRST_S * 2**at for at in range(4)] + [BREAK_MOST_S] * 3
    assert waits == pytest.approx([share * wait for wait in longest])


def test_it_rings_when_the_state_changes_and_not_else(world: World) -> None:
    world.fail()
    world.fail()
    assert world.rings == 1
    world.now += 10
    world.command()
    world.command()
    assert world.rings == 2


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError("refused"),
        exceptions.TimeoutError("too slow"),
        exceptions.BusyLoadingError("loading"),
        exceptions.ResponseError("READONLY You can't write against a read only replica."),
        exceptions.NoPermissionError("this user has no permissions"),
        OSError("broken pipe"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_client_raises_is_a_store_that_is_down(world: World, error: Exception) -> None:
    with pytest.raises(StoreDownError) as raised:
        world.command(error)
    assert str(raised.value) == str(error)
    assert raised.value.cause == "store_down"
    assert str(error) in world.circuit.last_error
    assert not world.circuit.is_up


def test_that_the_memory_is_full_is_an_answer(world: World) -> None:
    for rings in (0, 2):  # the second time after a failure
        with pytest.raises(RedisFullError) as raised:
            world.command(exceptions.OutOfMemoryError("used memory > 'maxmemory'"))
        assert raised.value.cause == "store_full"
        assert (world.circuit.is_up, world.rings) == (True, rings)
        world.now += 0 if rings else world.fail()


def test_our_own_mistakes_are_not_the_stores(world: World) -> None:
    with pytest.raises(KeyError):
        world.command(KeyError("x"))
    assert world.circuit.is_up
