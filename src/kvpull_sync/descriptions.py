"""The docstrings of the blocking classes at run time: those of the awaitable ones, which the sources only point to.

It must not change anything but docstrings.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import kvpull_async

__all__ = ["fill_in"]

_POINTER: Final = "As `kvpull_async."
_LIKE: Final = re.compile(r"\bAs `(?:(KvCacheManager|CacheManager)\.)?(\w+)`")


def fill_in(*classes: type) -> None:
    """Put the whole text where a member's docstring points to the awaitable one; the pointer comes last.

    A text that describes itself by another method (As `KvCacheManager.pull_cache`) is followed by that one's, and so
    on.
    """
    for owner in classes:
        for part in owner.__mro__[:-1]:
            for name, member in vars(part).items():
                pointer = getattr(member, "__doc__", None)
                if isinstance(pointer, str) and pointer.startswith(_POINTER):
                    described = _whole(owner.__name__, name)
                    if described:
                        member.__doc__ = f"{described}\n\n{inspect.cleandoc(pointer)}"


def _whole(owner: str, name: str) -> str:
    """Empty where docstrings are left out (`python -OO`)."""
    paths, texts = [(owner, name)], list[str]()
    for of, what in paths:  # which grows meanwhile
        text = _described(of, what)
        texts += [f"`{of}.{what}`:", text] if texts else [text]
        likes = ((other or of, like) for other, like in _LIKE.findall(text))
        paths += [path for path in likes if path not in paths]
    return _blocking("\n\n".join(texts))


def _described(owner: str, name: str) -> str:
    member: Any = inspect.getattr_static(getattr(kvpull_async, owner), name)
    return inspect.getdoc(member) or ""


def _blocking(text: str) -> str:
    """Its examples, for those who do not await."""
    return text.replace("async with", "with").replace("async for", "for")
