"""Rules that have no row number: one body each, for both faces, over tcp under the one and in-process under the other.

A body is a coroutine that takes the scene and asserts. `differs` is that of `Row`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance.api import BLOCKING, Api
from tests.conformance.scene import BOTH, NEW, OLD, Scene, Setup, scene

Body = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Rule:
    body: Body
    manager: str
    differs: str | None
    setup: dict[str, Any]


@dataclass(frozen=True)
class RuleCase:
    rule: Rule
    manager: str

    async def play(self, api: Api) -> None:
        transport = "inproc" if api is BLOCKING else "tcp"
        async with scene(api, Setup(**{"manager": self.manager, "transport": transport, **self.rule.setup})) as made:
            await self.rule.body(made)

    def __str__(self) -> str:
        return f"{self.rule.body.__name__}-{self.manager}"


class Rules:
    """The rules of one module, collected by decorating their bodies."""

    def __init__(self) -> None:
        self.all: list[Rule] = []

    def rule(self, manager: str = BOTH, *, differs: str | None = None, **setup: Any) -> Callable[[Body], Body]:
        """Take a body up; `setup` are fields of `Setup`."""

        def take(body: Body) -> Body:
            self.all.append(Rule(body, manager, differs, setup))
            return body

        return take

    def cases(self) -> list[RuleCase]:
        return [
            RuleCase(rule, manager)
            for rule in self.all
            for manager in ((OLD, NEW) if rule.manager == BOTH else (rule.manager,))
        ]
