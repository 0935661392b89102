"""Converts as it is told, each time in a process of its own that can be killed: what test_remote_targets.py drives.

Each line of standard input is a JSON list, source, target and options; answered are the process and, after an empty
line, how it ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import obstore  # noqa: F401  # which may be imported before a fork, and used after it only

import statekit
from statekit.conversion import registry
from statekit.errors import StatekitError
from statekit.files import store_home  # noqa: F401

for name in registry.container_names():  # so that each process needn't
    registry.container(name)
for name in registry.layout_names():
    registry.layout(name)


def converted(source: str, target: str, options: dict[str, Any]) -> str:
    try:
        statekit.convert(source, target, **options)
    except StatekitError as error:
        return f"{type(error).__name__}: {error.line}"
    return "done"


for line in iter(sys.stdin.readline, ""):
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.write(into, converted(*json.loads(line)).encode())
        os._exit(0)
    os.close(into)
    print(child, flush=True)
    sys.stdin.readline()  # who kills it has a descriptor of it now
    with os.fdopen(out) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    print(json.dumps(text or "killed"), flush=True)
