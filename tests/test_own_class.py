"""An object in a class of its own answers as before, but for what was replaced."""

from __future__ import annotations

import copy
from typing import Any

from lightning_ptdp.own_class import put_on


class Bell:
    """Rings."""

    def __init__(self, sound: str) -> None:
        self.sound = sound

    def __call__(self) -> str:
        return self.sound


def louder(self: Bell) -> str:
    return Bell.__call__(self).upper()


def describes(thing: Any) -> tuple[Any, ...]:
    kind = type(thing)
    return kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__, vars(thing)


def test_members_replace_those_of_one_object_alone() -> None:
    bell, other = Bell("ding"), Bell("dong")
    put_on(bell, {"__call__": louder})
    assert (bell(), other()) == ("DING", "dong")


def test_the_class_says_that_it_is_the_one_it_stands_for() -> None:
    bell = Bell("ding")
    put_on(bell, {"__call__": louder})
    assert isinstance(bell, Bell)
    assert describes(bell) == describes(Bell("ding"))


def test_a_copy_wears_it_too() -> None:
    bell = Bell("ding")
    put_on(bell, {"__call__": louder})
    assert copy.deepcopy(bell)() == "DING"


def test_taken_off_nothing_is_left() -> None:
    bell = Bell("ding")
    take_off = put_on(bell, {"__call__": louder})
    take_off()
    assert type(bell) is Bell


def test_one_goes_over_another_and_each_comes_off_in_turn() -> None:
    bell = Bell("ding")
    first = put_on(bell, {"__call__": louder})
    below = type(bell)
    second = put_on(bell, {"__call__": lambda self: f"{below.__call__(self)}!"})
    assert bell() == "DING!"
    second()
    assert bell() == "DING"
    first()
    assert bell() == "ding"
