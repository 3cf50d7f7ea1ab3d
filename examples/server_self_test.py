"""The client half of async_server.py's self-test: questions over HTTP, and a check of every answer.

Its job: ask many things at once, hang up on one, watch that the server keeps answering quickly meanwhile, and compare
with what one process alone generates. It must not use the library: it is a client like any other.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from tiny_transformer import ContiguousKV, TinyTransformer, contiguous_arrays, continue_greedily, encode, greedy

CLIENTS = 16
LIMIT_SECONDS = 240.0
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Client:
    """One HTTP request per call."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def ask(self, prompt: str) -> tuple[int, dict[str, Any]]:
        """``POST /generate``; returns the HTTP status and the content."""
        return await asyncio.wait_for(self._request("POST", "/generate", json.dumps({"prompt": prompt})), LIMIT_SECONDS)

    async def health(self) -> float:
        """``GET /health``; returns the seconds it took."""
        began = time.perf_counter()
        await asyncio.wait_for(self._request("GET", "/health", ""), LIMIT_SECONDS)
        return time.perf_counter() - began

    async def hang_up(self, prompt: str, *, after: float) -> None:
        """Ask, and leave without waiting for the answer."""
        try:
            await asyncio.wait_for(self._request("POST", "/generate", json.dumps({"prompt": prompt})), after)
        except asyncio.TimeoutError:
            print(f"one client hung up after {after * 1000:.0f} ms: what its request awaited is cancelled")

    async def _request(self, method: str, path: str, body: str) -> tuple[int, dict[str, Any]]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"{method} {path} HTTP/1.1\r\ntraceparent: {TRACEPARENT}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body.encode())
            status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
            return status, json.loads(await reader.read())
        finally:
            writer.close()


async def run_test(host: str, port: int, *, new_tokens: int) -> int:
    """Prints what happened; 0 when every answer is right."""
    client = Client(host, port)
    prompts = [f"Question {number}: " + "why? " * (number * 7 % 50 + 1) for number in range(CLIENTS)]
    began = time.perf_counter()
    questions = asyncio.gather(client.hang_up("x" * 900, after=0.02), *(client.ask(prompt) for prompt in prompts))
    slowest = 0.0
    while not questions.done():
        slowest = max(slowest, await client.health())
        await asyncio.sleep(0.01)
    answers = (await questions)[1:]
    seconds = time.perf_counter() - began
    print(f"{CLIENTS} requests at once took {seconds:.2f} s; the slowest GET /health meanwhile {slowest * 1000:.0f} ms")
    expected = _one_process(prompts, new_tokens)
    wrong = [number for number, answer in enumerate(answers) if not _right(answer, expected[number])]
    for number in wrong:
        print(f"request {number} answered {answers[number]}")
    refused, _ = await client.ask("")
    if wrong or refused != 400:
        print(f"FAILED: wrong answers to the requests {wrong}; an empty prompt got HTTP {refused} (400 is right)")
        return 1
    print(f"OK: all {CLIENTS} answers are those of one process doing both; an empty prompt is refused")
    return 0


def _right(answer: Any, tokens: list[int]) -> bool:
    status, content = answer
    return bool(status == 200 and content["tokens"] == tokens)


def _one_process(prompts: list[str], new_tokens: int) -> list[list[int]]:
    model = TinyTransformer()
    answers = []
    for prompt in prompts:
        tokens, kv = encode(prompt), ContiguousKV(contiguous_arrays(model.config, 1), 0)
        first = greedy(model.prefill(tokens, kv))
        answers.append(continue_greedily(model, first, length=len(tokens), count=new_tokens, kv=kv))
    return answers


if __name__ == "__main__":
    sys.exit(asyncio.run(run_test(sys.argv[1], int(sys.argv[2]), new_tokens=int(sys.argv[3]))))
