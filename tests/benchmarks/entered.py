"""How many modules one has to read to follow a call, and how fast the command line starts.

    python tests/benchmarks/entered.py [--json]

Counted are the modules of statekit with a function called, by `sys.setprofile`, in a process of its own for each call,
once what makes the call is imported; a module that is only imported doesn't count. Start-up times are the least of
several runs, with all modules compiled as pip leaves them, beside those of a Python that does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "golden" / "t5x" / "momentum_f32" / "checkpoint"
HOMES = {
    ROOT / "statekit": ("statekit",),
    ROOT / "converters": ("statekit", "converters"),
    ROOT / "schemas": ("statekit", "schemas"),
    ROOT / "cli": ("statekit", "cli"),
}
"""The folders of this checkout by the names they are imported by."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
"""Lets processes import statekit from this checkout, wherever the installed one comes from."""
RUNS = 7

COMMAND_LINE = "from statekit.cli.main import main"
PROFILED = """
import inspect, sys, threading
report, package, source, target, shapes = sys.argv[1:]
import statekit
assert statekit.__file__.startswith(package), f"{{statekit.__file__}} is not of this checkout"
{prepare}
files = {{}}

def profile(frame, event, _):
    code, caller = frame.f_code, frame.f_back
    if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:  # the text of a module or of a class
        return
    # A generator in a module's own text is part of that text: it runs as the module is imported.
    if code.co_name.startswith("<") and caller and caller.f_code.co_name == "<module>" and (
        caller.f_code.co_filename == code.co_filename
    ):
        return
    files.setdefault(code.co_filename)

threading.setprofile(profile)
sys.setprofile(profile)
try:
    {call}
finally:
    sys.setprofile(None)
    threading.setprofile(None)
open(report, "w").write("\\n".join(files))
"""
"""Makes a call and writes the files whose functions it entered, in order."""

MODEL = """
import json, torch, statekit.torch
named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in json.loads(shapes).items()]
"""


class Call(NamedTuple):
    """Python that is run before the counting begins, and the call that is counted."""

    prepare: str
    call: str


CONVERT = Call(COMMAND_LINE, "assert main(['convert', source, target]) == 0")
VERIFY = Call(
    f"{COMMAND_LINE}\nassert main(['convert', source, target, '--replace']) == 0",
    "assert main(['verify', source, target, '--hparams', 'beta1=0.9']) == 0",
)
INSPECT = Call(COMMAND_LINE, "assert main(['inspect', source]) == 0")
LOAD_OPTIMIZER = Call(MODEL, "statekit.torch.load_optimizer(source, named, lr=1e-3, beta1=0.9)")
OPTIMIZER = f"""{MODEL}
optimizer = {LOAD_OPTIMIZER.call}
for _, param in named:
    param.grad = torch.ones_like(param)
"""
STEP = Call(OPTIMIZER, "optimizer.step()")
STEP_BY_TEXT = Call(
    f"{OPTIMIZER}for group in optimizer.param_groups: group['foreach'] = False", "optimizer.step()"
)
CALLS = {
    "statekit convert, T5X -> torch": CONVERT,
    "statekit verify, T5X -> torch": VERIFY,
    "statekit inspect, T5X": INSPECT,
    "statekit.torch.load_optimizer, T5X": LOAD_OPTIMIZER,
    "its step()": STEP,
    "its step(), foreach=False": STEP_BY_TEXT,
}


def entered(call: Call, source: Path, target: Path) -> list[str]:
    """Returns the modules of statekit that a call enters, in order, each by the name it is imported by."""
    with tempfile.NamedTemporaryFile("r") as report:
        shapes = json.dumps(param_shapes(source)) if call.prepare.startswith(MODEL) else ""
        command = [
            sys.executable,
            "-c",
            PROFILED.format(**call._asdict()),
            report.name,
            str(ROOT / "statekit"),
            str(source),
            str(target),
        ]
        subprocess.run([*command, shapes], stdout=subprocess.DEVNULL, check=True, env=ENVIRONMENT)
        names = [module_name(Path(line)) for line in report.read().splitlines()]
    return list(dict.fromkeys(name for name in names if name))


def module_name(file: Path) -> str:
    """Returns the name by which a file of this checkout is imported, through its links; "" for any other file."""
    path = file.resolve().with_suffix("")
    home = next((folder for folder in path.parents if folder in HOMES), None)
    return "" if home is None else ".".join([*HOMES[home], *path.relative_to(home).parts])


def param_shapes(source: Path) -> dict[str, list[int]]:
    """Returns the parameters of a T5X checkpoint, named as PyTorch names them, with their shapes."""
    arrays = sorted(source.glob("checkpoint_*/target.*/.zarray"))
    return {a.parent.name.removeprefix("target."): json.loads(a.read_text())["shape"] for a in arrays}


def seconds(arguments: Sequence[str], compiled: str) -> float:
    """Returns the wall time of a Python process, the least of several; `compiled` is where modules stay compiled."""
    environment = {**ENVIRONMENT, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, env=environment)
        times.append(time.perf_counter() - start)
    return min(times)


def start_times(source: Path, target: Path) -> dict[str, float]:
    """Returns the seconds that the smallest commands take, from the start of Python to its end."""
    statekit = ["-c", f"import sys\n{COMMAND_LINE}\nsys.exit(main())"]
    with tempfile.TemporaryDirectory() as compiled:
        return {
            "python -c pass": seconds(["-c", "pass"], compiled),
            "statekit --help": seconds([*statekit, "--help"], compiled),
            "statekit inspect, T5X": seconds([*statekit, "inspect", str(source)], compiled),
            "statekit inspect, torch": seconds([*statekit, "inspect", str(target)], compiled),
        }


def show(out: Console, counts: dict[str, int], times: dict[str, float]) -> None:
    """Prints two tables."""
    modules = Table("call", "modules entered")
    for call, count in counts.items():
        modules.add_row(call, str(count))
    starts = Table("command", "seconds")
    for command, time_taken in times.items():
        starts.add_row(command, f"{time_taken:.2f}")
    out.print(modules)
    out.print(starts)


def main() -> None:
    """Counts, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the names of the modules too, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "torch-ckpt.pt")
        modules = {name: entered(call, SOURCE, target) for name, call in CALLS.items()}
        times = start_times(SOURCE, target)
    if options.json:
        print(json.dumps({"entered": modules, "seconds": times}, indent=1))
    else:
        show(Console(width=100), {name: len(names) for name, names in modules.items()}, times)


if __name__ == "__main__":
    main()
