"""A text server on asyncio: many requests at once, each awaiting its own pull, and a loop that stays free.

Its job: show the awaitable API inside a service. A prefill process (started by this one) reads the prompts; for every
``POST /generate`` the server awaits the pull of that prompt's KV cache and continues it. A client that hangs up cancels
its pull, and the slot can be used again at once, because a cancelled pull has stopped writing when the call raises.
HTTP is done by hand and only as far as needed: this must not be taken for a web framework.

    python examples/async_server.py --port 8080
    curl -d '{"prompt": "Hi"}' http://127.0.0.1:8080/generate
    python examples/async_server.py --self-test
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kvpull_async import (
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from line_pipe import Child, ChildFailed, Message, Parent, child_environment
from tiny_transformer import ContiguousKV, KVMemory, ModelConfig, TinyTransformer, continue_greedily, encode, greedy

PREFILL_CLUSTER, SERVER_CLUSTER = 1, 2
CONFIG = ModelConfig()
SLOTS = 8
NEW_TOKENS = 24
LINK_TIMEOUT_MS = 30_000
PULL_TIMEOUT_MS = 30_000
HEADER_SECONDS = 30.0
PREFILL_SECONDS = 120.0
TEST_SECONDS = 300.0
BODY_LIMIT = 65_536

Response = tuple[int, dict[str, Any]]


# --- the prefill process ------------------------------------------------------------------------------------------


async def run_prefill() -> None:
    """Reads prompts until its parent closes the pipe."""
    parent = await Parent.connect()
    config = LLMConfig()
    config.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
    config.listen_ip_info = "127.0.0.1:0"
    datadist = LLMDataDist(LLMRole.PROMPT, PREFILL_CLUSTER)
    await datadist.init(config.generate_options())
    async with datadist:
        assert datadist.listen_address is not None  # it was told to listen
        ip, port = datadist.listen_address
        parent.say("listening", ip=ip, port=port)
        model = await asyncio.to_thread(TinyTransformer, CONFIG)
        message = await parent.hear()
        while message is not None:
            await _obey(message, datadist, model=model, parent=parent)
            message = await parent.hear()


async def _obey(message: Message, datadist: LLMDataDist, *, model: TinyTransformer, parent: Parent) -> None:
    key = CacheKey(PREFILL_CLUSTER, req_id=message["req_id"])
    if message["do"] == "forget":
        await datadist.kv_cache_manager.remove_cache_key(key)
        return
    tokens = encode(message["prompt"])
    manager = datadist.kv_cache_manager
    desc = CacheDesc(CONFIG.kv_tensors, [1, CONFIG.max_seq, CONFIG.kv_width], DataType.DT_FLOAT)
    cache = await manager.allocate_cache(desc, cache_keys=[key])
    tensors = [manager.get_cache_tensors(cache, index)[0].numpy() for index in range(CONFIG.kv_tensors)]
    logits = await asyncio.to_thread(model.prefill, tokens, ContiguousKV(tensors, 0))
    # From here on the key alone keeps the memory: it is freed when the server has pulled it, or asks to forget it.
    await manager.deallocate_cache(cache)
    parent.say("prefilled", req_id=message["req_id"], length=len(tokens), first_token=greedy(logits))


class PrefillClient:
    """The prefill process, seen by the server: many requests at once over one pipe, answers matched by request id."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._listener: asyncio.Task[None] | None = None

    async def prefill(self, req_id: int, prompt: str) -> Message:
        """Have a prompt read; returns its ``length`` and ``first_token``."""
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen())
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[req_id] = future
        await self._child.say("prefill", req_id=req_id, prompt=prompt)
        return await asyncio.wait_for(future, PREFILL_SECONDS)

    async def forget(self, req_id: int) -> None:
        """Nobody will pull this one."""
        self._waiting.pop(req_id, None)
        await self._child.say("forget", req_id=req_id)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        await self._child.stop()

    async def _listen(self) -> None:
        try:
            while True:
                message = await self._child.hear("prefilled", seconds=None)
                future = self._waiting.pop(message["req_id"], None)
                if future is not None and not future.done():
                    future.set_result(message)
        except ChildFailed as error:
            # Nobody is left to answer; requests that come later find the pipe closed.
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)


# --- the server ---------------------------------------------------------------------------------------------------


class Server:
    """Slots of one KV cache, handed to requests in turn."""

    def __init__(
        self, datadist: LLMDataDist, cache: KvCache, *, prefill: PrefillClient, model: TinyTransformer
    ) -> None:
        self._manager = datadist.kv_cache_manager
        self._cache, self._prefill = cache, prefill
        self._tensors = [self._manager.get_cache_tensors(cache, i)[0].numpy() for i in range(CONFIG.kv_tensors)]
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(SLOTS):
            self._slots.put_nowait(slot)
        self._model = model
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="decode")
        self._last_id = 0
        self.in_flight = 0

    async def generate(self, prompt: str, *, traceparent: str | None) -> Response:
        """One request: prefill elsewhere, pull, decode here."""
        self._last_id = req_id = self._last_id + 1
        slot = await self._slots.get()
        self.in_flight += 1
        try:
            return await self._in_slot(slot, req_id, prompt=prompt, traceparent=traceparent)
        finally:
            self.in_flight -= 1
            self._slots.put_nowait(slot)

    async def _in_slot(self, slot: int, req_id: int, *, prompt: str, traceparent: str | None) -> Response:
        pulled = False
        try:
            said = await self._prefill.prefill(req_id, prompt)
            key = CacheKey(PREFILL_CLUSTER, req_id=req_id)
            # Only the bytes in use; the pull uses the key up all the same, and with it the memory over there.
            size = said["length"] * CONFIG.kv_row_bytes
            await self._manager.pull_cache(
                key, self._cache, slot, size, timeout=PULL_TIMEOUT_MS, traceparent=traceparent
            )
            pulled = True
        finally:
            if not pulled:
                await self._prefill.forget(req_id)
        tokens = await self._decode(said, ContiguousKV(self._tensors, slot))
        return 200, {"tokens": tokens, "bytes_pulled": size * CONFIG.kv_tensors}

    async def _decode(self, said: Message, kv: KVMemory) -> list[int]:
        """In a worker thread. A cancelled request waits for it: a thread cannot be stopped, and writes to the slot."""
        work = asyncio.get_running_loop().run_in_executor(self._executor, self._continue, said, kv)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def _continue(self, said: Message, kv: KVMemory) -> list[int]:
        return continue_greedily(self._model, said["first_token"], length=said["length"], count=NEW_TOKENS, kv=kv)

    def close(self) -> None:
        self._executor.shutdown()
        self._tensors.clear()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            answer = await self._answer_or_cancel(reader)
            if answer is not None:
                await _send(writer, answer)
        except (ConnectionError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError) as error:
            print(f"dropped a connection without a complete request: {error!r}", file=sys.stderr)
        finally:
            writer.close()

    async def _answer_or_cancel(self, reader: asyncio.StreamReader) -> Response | None:
        """The answer; None when the client hung up first, and its work was cancelled."""
        method, path, headers, body = await asyncio.wait_for(_read_request(reader), HEADER_SECONDS)
        work = asyncio.create_task(self._answer(method, path, headers=headers, body=body))
        hang_up = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hang_up.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        return None if work.cancelled() else work.result()

    async def _answer(self, method: str, path: str, *, headers: dict[str, str], body: bytes) -> Response:
        if (method, path) == ("GET", "/health"):
            return 200, {"in_flight": self.in_flight}
        if (method, path) != ("POST", "/generate"):
            return 404, {"error": "there are POST /generate and GET /health"}
        prompt = _prompt(body)
        if prompt is None:
            longest = CONFIG.max_seq - NEW_TOKENS
            return 400, {"error": f'the body must be {{"prompt": text}}, the text 1 to {longest} bytes long'}
        try:
            return await self.generate(prompt, traceparent=headers.get("traceparent"))
        except LLMException as error:
            return 503, {"error": str(error), "status": str(error.status_code), "retry_safe": error.retry_safe}
        except (ChildFailed, ConnectionError, asyncio.TimeoutError) as error:
            return 503, {"error": f"the prefill process does not answer: {error!r}"}


def _prompt(body: bytes) -> str | None:
    try:
        prompt = json.loads(body)["prompt"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(prompt, str) or not 0 < len(encode(prompt)) <= CONFIG.max_seq - NEW_TOKENS:
        return None
    return prompt


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, path, *_ = [*first.split(" "), "", ""]
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    size = min(int(length), BODY_LIMIT) if length.isdigit() else 0
    return method, path, headers, await reader.readexactly(size)


async def _send(writer: asyncio.StreamWriter, answer: Response) -> None:
    status, content = answer
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


# --- putting it together ------------------------------------------------------------------------------------------


async def _link(datadist: LLMDataDist, address: Message) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PREFILL_CLUSTER
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(address["ip"], address["port"])
    status, _ = await datadist.link_clusters([cluster], timeout=LINK_TIMEOUT_MS)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise ChildFailed(f"linking to the prefill process ended with {status}")
    return cluster


async def run_server(port: int, *, testing: bool) -> int:
    """Start the prefill process, link, serve (or test); everything is taken down again on the way out."""
    child = await Child.start("prefill", __file__, "--role", "prefill")
    prefill = PrefillClient(child)
    datadist = LLMDataDist(LLMRole.DECODER, SERVER_CLUSTER)
    try:
        model = await asyncio.to_thread(TinyTransformer, CONFIG)
        address = await child.hear("listening")
        config = LLMConfig()
        config.device_backend = "host"
        await datadist.init(config.generate_options())
        async with datadist:
            cluster = await _link(datadist, address)
            desc = CacheDesc(CONFIG.kv_tensors, [SLOTS, CONFIG.max_seq, CONFIG.kv_width], DataType.DT_FLOAT)
            cache = await datadist.kv_cache_manager.allocate_cache(desc)
            server = Server(datadist, cache, prefill=prefill, model=model)
            try:
                return await _listen(server, port, testing=testing)
            finally:
                server.close()
                await datadist.kv_cache_manager.deallocate_cache(cache)
                await datadist.unlink_clusters([cluster], timeout=LINK_TIMEOUT_MS)
    finally:
        await prefill.close()


async def _listen(server: Server, port: int, *, testing: bool) -> int:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", port)
    async with listener:
        host, bound = listener.sockets[0].getsockname()[:2]
        print(f"serving on http://{host}:{bound}", flush=True)
        if testing:
            return await _test(host, bound)
        await listener.serve_forever()
    return 0


async def _test(host: str, port: int) -> int:
    """Be asked by another process, as in real life; returns its exit status."""
    script = str(Path(__file__).with_name("server_self_test.py"))
    tester = await asyncio.create_subprocess_exec(
        sys.executable, script, host, str(port), str(NEW_TOKENS), env=child_environment()
    )
    try:
        return await asyncio.wait_for(tester.wait(), TEST_SECONDS)
    finally:
        if tester.returncode is None:
            tester.kill()
            await tester.wait()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="A text server whose KV cache comes from another process.")
    parser.add_argument("--port", type=int, default=0, help="port to serve on (default: any free one)")
    parser.add_argument("--self-test", action="store_true", help="ask itself some questions, check the answers, leave")
    parser.add_argument("--role", choices=("server", "prefill"), default="server", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.role == "prefill":
            asyncio.run(run_prefill())
            return 0
        return asyncio.run(run_server(arguments.port, testing=arguments.self_test))
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
