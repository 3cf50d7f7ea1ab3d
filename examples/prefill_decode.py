"""The demo: one process reads the prompts, another one writes the answers, and the KV cache travels between them.

Its job: start the two processes, tell in words what happens, and judge: the exit status is 0 only if the two of them
generate exactly the tokens that one process doing both generates. It must not touch the KV cache itself.

Run it with ``make demo`` or ``python examples/prefill_decode.py``; ``--logs`` shows the library's events as JSON lines
on standard error, ``--spoil 3`` flips one bit of what was pulled for prompt 3, which the demo must notice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass, field

from decode_node import run_decode
from demo_plan import CONFIG, IN_WORDS, NEW_TOKENS, PROMPTS, Way, blocks_for
from kvpull_async import LLMException, observe
from line_pipe import Child, ChildFailed, Message, Parent
from prefill_node import run_prefill
from tiny_transformer import ContiguousKV, TinyTransformer, contiguous_arrays, continue_greedily, encode, greedy

MILLION = 1e6
BILLION = 1e9
ROLES = {"prefill": run_prefill, "decode": run_decode}
TRANSPORTS = {
    "shm": "shm (shared memory: the decode process copies straight out of the prefill process's cache)",
    "tcp": "tcp (ordinary sockets, here between two processes of one machine)",
}
STAGED = "by way of page-locked memory on both sides, and a socket between them"
INTRODUCTION = f"""\
A language model that reads a text keeps notes for every word: its KV cache (keys and values). With them it can write
the next words without reading everything again. Reading the prompt (PREFILL) and writing the answer (DECODE) often run
on different machines, so those notes have to travel. Here two processes play the two machines: the decode process
PULLS the KV cache of {len(PROMPTS)} prompts out of the memory of the prefill process, and continues texts that it
has never seen.
"""


@dataclass
class Outcome:
    """What each side said, by prompt number."""

    prefilled: dict[int, Message] = field(default_factory=dict)
    pulled: dict[int, Message] = field(default_factory=dict)
    decoded: dict[int, Message] = field(default_factory=dict)
    control: Message = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    transports: list[str] = field(default_factory=list)
    why: str = ""
    memory: Message = field(default_factory=dict)
    on_npu: list[bool] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)


async def run_alone() -> None:
    """The yardstick: a process that does both, prefill and decode, and has no use for the library."""
    parent = await Parent.connect()
    parent.say("ready", pid=os.getpid())
    model = TinyTransformer(CONFIG)
    for number, (text, _) in enumerate(PROMPTS):
        began = time.perf_counter()
        tokens, kv = encode(text), ContiguousKV(contiguous_arrays(CONFIG, 1), 0)
        first = greedy(model.prefill(tokens, kv))
        answer = continue_greedily(model, first, length=len(tokens), count=NEW_TOKENS, kv=kv)
        parent.say("answered", number=number, tokens=answer, seconds=time.perf_counter() - began)


async def one_process() -> dict[int, list[int]]:
    """Start the yardstick process, collect its answers by prompt number."""
    child = await Child.start("yardstick", __file__, "--role", "alone")
    try:
        ready = await child.hear("ready")
        answers = [await child.hear("answered") for _ in PROMPTS]
    finally:
        await child.stop()
    seconds = sum(answer["seconds"] for answer in answers)
    print(f"1. The yardstick: ONE process (pid {ready['pid']}) reads the prompts and writes {NEW_TOKENS} tokens for")
    print(f"   each, in {_ms(seconds)}. Two processes must come to the same answers.\n")
    return {answer["number"]: answer["tokens"] for answer in answers}


async def two_processes(*, logs: bool, spoiled: int | None) -> Outcome:
    """Run the prefill and the decode process side by side; both are gone when this returns or raises."""
    outcome = Outcome()
    children: list[Child] = []
    try:
        for role in ROLES:
            arguments = [__file__, "--role", role] + (["--logs"] if logs else [])
            children.append(await Child.start(role, *arguments))
        prefill, decode = children
        address = await _hear_prefill(prefill, outcome)
        job = {"ip": address["ip"], "port": address["port"], "requests": _requests(outcome), "spoiled": spoiled}
        await _hear_decode(decode, prefill, job=job, outcome=outcome)
    finally:
        outcome.exit_codes = [await child.stop() for child in reversed(children)]
    return outcome


async def _hear_prefill(prefill: Child, outcome: Outcome) -> Message:
    address = await prefill.hear("listening")
    print(f"2. The PREFILL process (pid {address['pid']}, cluster 1) listens on {address['ip']}:{address['port']}.")
    message = await prefill.hear("prefilled", "published")
    while message["event"] == "prefilled":
        outcome.prefilled[message["number"]] = message
        message = await prefill.hear("prefilled", "published")
    outcome.on_npu.append(message["on_npu"])
    total = sum(item["length"] for item in outcome.prefilled.values())
    seconds = sum(item["seconds"] for item in outcome.prefilled.values())
    print(f"   It read {len(PROMPTS)} prompts ({total} tokens) in {_ms(seconds)} and published their keys and values:")
    print("   the batch under one CacheKey per prompt, and a paged cache under a BlocksCacheKey.\n")
    return address


async def _hear_decode(decode: Child, prefill: Child, *, job: Message, outcome: Outcome) -> None:
    ready = await decode.hear("ready")
    await decode.say("decode", **job)
    linked = await decode.hear("linked")
    print(
        f"3. The DECODE process (pid {ready['pid']}, cluster 2) never sees a prompt. It linked to the other one in "
        f"{_ms(linked['seconds'])}"
    )
    print("   and pulls, for each prompt, the KV cache of having read it:\n")
    print(f"   {'prompt':<24} {'tokens':>6}  {'how the KV cache was pulled':<42} {'MB':>6} {'ms':>7} {'GB/s':>6}")
    message = await decode.hear()
    while message["event"] != "finished":
        await _note(message, prefill, outcome=outcome)
        message = await decode.hear()
    outcome.phases, outcome.transports, outcome.why = message["phases"], message["transports"], message["why"]
    outcome.memory = message["memory"]
    outcome.on_npu.append(message["on_npu"])


async def _note(message: Message, prefill: Child, *, outcome: Outcome) -> None:
    """Keep one line of the decode process, print it, or pass it on."""
    number, event = message["number"], message["event"]
    if event == "pulled":
        outcome.pulled[number] = message
        print(_pull_line(message, outcome.prefilled[number]))
    elif event == "release":
        await prefill.say("release", number=number)
        await prefill.hear("released")
    elif event == "control":
        outcome.control = message
    elif event == "decoded":
        outcome.decoded[number] = message
    else:
        raise ChildFailed(f"the decode process said {event!r}, which nobody expected")


def _requests(outcome: Outcome) -> list[Message]:
    """What a router knows: which prompt, how long it is, its first token, and where its blocks lie."""
    requests = []
    for number, (_, way) in enumerate(PROMPTS):
        said = outcome.prefilled[number]
        requests.append(
            {
                "number": number,
                "way": way.value,
                "length": said["length"],
                "first_token": said["first_token"],
                "src_blocks": said.get("src_blocks", []),
            }
        )
    return requests


def _pull_line(message: Message, prefilled: Message) -> str:
    way = PROMPTS[message["number"]][1]
    words = IN_WORDS[way]
    if way in (Way.KEY_TO_BLOCKS, Way.BLOCKS_TO_BLOCKS):
        words += f" ({blocks_for(prefilled['length'])})"
    gigabytes = message["bytes"] / message["seconds"] / BILLION
    return (
        f"   {_short(message['number']):<24} {prefilled['length']:>6}  {words:<42} "
        f"{message['bytes'] / MILLION:>6.2f} {message['seconds'] * 1000:>7.1f} {gigabytes:>6.2f}"
    )


def _short(number: int) -> str:
    text = PROMPTS[number][0]
    return f"{number}: {text[:18]}..." if len(text) > 21 else f"{number}: {text}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _place(outcome: Outcome) -> str:
    """In which memory the caches of both processes were."""
    if not any(outcome.on_npu):
        return f"memory of the host on both sides: {outcome.memory.get('reason')}"
    if not all(outcome.on_npu):
        return "device memory of an NPU on one side, in memory of the host on the other"
    soc = str(outcome.memory.get("soc"))
    npu = "the emulated NPU" if "Emulated" in soc else "the NPU"
    return f"device memory of {npu} on both sides (device {outcome.memory.get('device_id')}, {soc})"


def _transport(name: str, outcome: Outcome) -> str:
    return f"{name} ({STAGED})" if any(outcome.on_npu) else TRANSPORTS.get(name, name)


def _print_totals(outcome: Outcome) -> None:
    nbytes = sum(item["bytes"] for item in outcome.pulled.values())
    seconds = sum(item["seconds"] for item in outcome.pulled.values())
    decoding = sum(item["seconds"] for item in outcome.decoded.values())
    transport = " and ".join(_transport(name, outcome) for name in outcome.transports)
    parts = ", ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in outcome.phases.items())
    print(f"\n   Pulled: {nbytes / MILLION:.1f} MB in {_ms(seconds)}, {nbytes / seconds / BILLION:.2f} GB/s.")
    print(f"   The KV cache lay in {_place(outcome)}.")
    print(f"   The transport used was {transport}.")
    print(f"   It was chosen when the two linked; the library's reason: {outcome.why}.")
    print(f"   Where the time went, by the library's own events: {parts}.")
    print(f"   Decoded: {len(outcome.decoded)} x {NEW_TOKENS} tokens in {_ms(decoding)}.\n")


def _print_answers(expected: dict[int, list[int]], outcome: Outcome) -> list[int]:
    """One line per prompt; returns the numbers of those whose cache or tokens differ."""
    print("4. Are the answers the same? (The weights are random: they are nonsense, but always the same nonsense.)\n")
    print(f"   {'prompt':<24} {'KV cache':<10} {NEW_TOKENS} tokens from two processes")
    wrong = []
    for number, tokens in expected.items():
        given = outcome.decoded.get(number, {}).get("tokens")
        whole = outcome.pulled.get(number, {}).get("checksum") == outcome.prefilled.get(number, {}).get("checksum")
        if given != tokens or not whole:
            wrong.append(number)
        beginning = " ".join(str(token) for token in (given or [])[:8])
        print(
            f"   {_short(number):<24} {'same' if whole else 'DIFFERENT':<10} {beginning} ... "
            f"{'as from one process' if given == tokens else 'DIFFERENT from one process'}"
        )
    return wrong


def judge(expected: dict[int, list[int]], outcome: Outcome) -> int:
    """Print the verdict; the exit status of the demo."""
    _print_totals(outcome)
    wrong = _print_answers(expected, outcome)
    blind = outcome.control.get("tokens") == expected[outcome.control.get("number", 0)]
    print(
        f"\n   Counter-check: decoding prompt {outcome.control.get('number')} on an empty cache gives "
        f"{'THE SAME tokens, so this comparison proves nothing' if blind else 'other tokens, as it must'}."
    )
    failed = [code for code in outcome.exit_codes if code != 0]
    if wrong or blind or failed:
        print(f"\nFAILED: prompts with another cache or answer: {wrong or 'none'}; exit codes: {outcome.exit_codes}.")
        return 1
    print(f"\nOK: all {len(expected)} token sequences are identical to those of one process doing both.")
    return 0


async def run_demo(*, logs: bool, spoiled: int | None) -> int:
    """The parent's part, from the yardstick to the verdict."""
    print(INTRODUCTION)
    try:
        expected = await one_process()
        return judge(expected, await two_processes(logs=logs, spoiled=spoiled))
    except ChildFailed as error:
        print(f"\nFAILED: {error}.")
        return 1


def run_child(role: str) -> int:
    """One of the processes; a failure of the library is told without the way that led to it."""
    try:
        asyncio.run({"alone": run_alone, **ROLES}[role]())
    except LLMException as error:
        print(f"the {role} process: {error.status_code}: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Command line; with a role this is one of the children."""
    parser = argparse.ArgumentParser(description="Prefill in one process, decode in another, and the KV cache between.")
    parser.add_argument("--logs", action="store_true", help="show the library's events as JSON lines on standard error")
    parser.add_argument(
        "--spoil", type=int, choices=range(len(PROMPTS)), help="flip one bit of what was pulled for this prompt"
    )
    parser.add_argument("--role", choices=("alone", *ROLES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.logs:
        observe.json_lines(sys.stderr, level="DEBUG")
    try:
        if arguments.role is not None:
            return run_child(arguments.role)
        return asyncio.run(run_demo(logs=arguments.logs, spoiled=arguments.spoil))
    except KeyboardInterrupt:
        print("\nInterrupted; both processes have been stopped.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
