"""Gives one object a class of its own, and takes it off again.

    module.__class__      Linear  ->  Linear, a subclass with some methods replaced  ->  Linear

`isinstance`, attributes and names stay what they are, and Python looks methods up in a class: so what an attribute of
the object cannot replace (`__call__`) is replaced too, and nothing is added to what is saved of the object or copied
with it. The class says that it is the one that it stands for, in messages and to whoever asks for its documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def put_on(wearer: Any, members: Mapping[str, Any]) -> Callable[[], None]:
    """Give an object a class of its own, derived from the present one.

    Args:
        wearer: the object; it may wear such a class already, and the new one then goes over it.
        members: methods and other attributes of the class, by name.

    Returns:
        What takes the class off, and others that were put over it since.
    """
    base: Any = type(wearer)
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    wearer.__class__ = type(base.__name__, (base,), {**same, **members})

    def take_off() -> None:
        wearer.__class__ = base

    return take_off
