"""A program of the original's users in a process of its own, run piece by piece: `from llm_datadist import *` has been
done, and each line of JSON on standard input is a piece of source. What it leaves in `answer` goes back.

    python -m tests.integration.peers.program

It ends as such programs do, by running out of source.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kvpull_sync


def answer_to(source: str, names: dict[str, Any]) -> dict[str, Any]:
    names["answer"] = None
    try:
        exec(source, names)
    except Exception as error:  # noqa: BLE001  (the parent judges it)
        status = getattr(error, "status_code", None)
        return {"raised": type(error).__name__, "status": getattr(status, "name", None), "text": str(error)}
    return {"answer": names["answer"]}


def main() -> None:
    kvpull_sync.install_as_llm_datadist()
    names: dict[str, Any] = {}
    exec("from llm_datadist import *\nimport numpy as np", names)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer_to(json.loads(line), names)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
