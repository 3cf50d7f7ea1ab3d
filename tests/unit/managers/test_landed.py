"""Which layers have landed: counted in bytes, taken in order, and told to those only who wait."""

from __future__ import annotations

import threading

import pytest

from kvpull_async.managers.landed import Landed


@pytest.fixture
def landed() -> Landed:
    made = Landed()
    made.expect(range(3, 7), 100)
    return made


def taken(landed: Landed) -> list[int]:
    found = []
    while (layer := landed.take()) is not None:
        found.append(layer)
    return found


def test_a_layer_has_landed_with_its_last_byte(landed: Landed) -> None:
    landed.bytes_landed(99)
    assert landed.take() is None
    landed.bytes_landed(100)
    assert taken(landed) == [3]
    landed.bytes_landed(399)
    assert taken(landed) == [4, 5]
    assert not landed.all_taken
    landed.bytes_landed(400)
    assert taken(landed) == [6]
    assert landed.all_taken


def test_nothing_has_landed_before_it_is_known_what_is_to_come() -> None:
    landed = Landed()
    assert landed.take() is None
    assert not landed.all_taken
    landed.bytes_landed(2**40)
    assert landed.take() is None


def test_only_who_waits_is_told_and_once(landed: Landed) -> None:
    told: list[str] = []
    landed.signal = lambda: told.append("landed")
    landed.bytes_landed(100)
    assert told == []  # nobody has asked
    assert taken(landed) == [3]
    landed.bytes_landed(150)
    assert told == []  # nothing to take
    landed.bytes_landed(200)
    landed.bytes_landed(300)
    assert told == ["landed"]
    assert taken(landed) == [4, 5]
    landed.bytes_landed(400)
    assert told == ["landed"] * 2


def test_at_the_end_all_is_there_whatever_was_told_before(landed: Landed) -> None:
    landed.bytes_landed(150)
    landed.all_landed()
    assert taken(landed) == [3, 4, 5, 6]
    assert landed.all_taken


def test_no_layer_is_missed_between_two_threads() -> None:
    landed, bell, layers = Landed(), threading.Event(), 3000
    landed.expect(range(layers), 2)
    landed.signal = bell.set

    def move() -> None:
        for total in range(2 * layers + 1):
            landed.bytes_landed(total)

    mover = threading.Thread(target=move)
    mover.start()
    found: list[int] = []
    while len(found) < layers:
        bell.clear()
        layer = landed.take()
        if layer is not None:
            found.append(layer)
        else:
            assert bell.wait(20), "a layer landed and nobody was told"
    mover.join()
    assert found == list(range(layers))


def test_it_says_how_far_it_is(landed: Landed) -> None:
    landed.bytes_landed(200)
    landed.take()
    assert repr(landed) == "<Landed 2 of 4 layers, 1 taken>"
