"""`make bench`: memory and speed of converting, against `cp` of the same bytes in the same run.

    python tests/benchmarks/convert.py [--gigabytes 4]

Peak memory is the resident set of a whole process (VmHWM), less that of a process that has only imported the same
modules. Throughput counts the source's tensor bytes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rich.console import Console
from rich.table import Table
from synthetic import moments, state, write_neutral, write_t5x

from statekit.conversion import registry
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import nbytes

MIB, GB = 2**20, 1e9


MEASURED = """
import pathlib, re, sys
report, *arguments = sys.argv[1:]
{body}
status = pathlib.Path("/proc/self/status").read_text()
pathlib.Path(report).write_text(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""
"""Runs something and leaves the process's own peak; that of a child also counts its parent's pages at the fork."""


def run(*command: str) -> float:
    """Runs a process and returns its wall time in seconds."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def measured(body: str, *arguments: str) -> tuple[float, float]:
    """Runs Python in a process of its own; returns its wall time in seconds and its peak resident set in MiB."""
    with tempfile.NamedTemporaryFile("r") as report:
        seconds = run(sys.executable, "-c", MEASURED.format(body=body), report.name, *arguments)
        return seconds, int(report.read()) / 1024


def statekit(*arguments: str) -> tuple[float, float]:
    """Runs the command line in a process of its own."""
    return measured("from statekit.cli.main import main\nassert main(arguments) == 0", *arguments)


def folder_bytes(path: Path) -> int:
    """Returns the bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def conversions(work: Path, gigabytes: float, out: Console) -> None:
    """Measures conversions of a large T5X checkpoint."""
    matrices = max(1, round(gigabytes * GB / (2 * 4 * 4096 * 4096)))
    tensor_bytes = matrices * 4 * (2 * 4096 * 4096 + 2 * 4096)
    source = work / "t5x-source"
    out.print(f"making a T5X checkpoint of {tensor_bytes / GB:.2f} GB in {4 * matrices} tensors ...")
    write_t5x(source, state(matrices, 4096, 4096))
    _, idle = measured("import statekit.cli.convert_command, msgpack, safetensors, zstandard")
    table = Table("operation", "seconds", "GB/s", "of cp", "peak MiB above imports")
    copied = run("cp", "-r", str(source), str(work / "copy")) + run("sync")
    stored = folder_bytes(source)
    copy_speed = stored / GB / copied
    table.add_row("cp -r of the source, and sync", f"{copied:.1f}", f"{copy_speed:.2f}", "1", "")
    shutil.rmtree(work / "copy")
    for name, begin, target, options in (
        ("T5X to torch", source, work / "out.pt", ()),
        ("T5X to statekit", source, work / "out-statekit", ("--to", "statekit")),
        ("torch to statekit", work / "out.pt", work / "again-statekit", ("--to", "statekit")),
        ("torch to T5X", work / "out.pt", work / "again-t5x", ("--to", "t5x")),
    ):
        seconds, peak = statekit("convert", str(begin), str(target), *options)
        speed = tensor_bytes / GB / seconds
        table.add_row(
            name, f"{seconds:.1f}", f"{speed:.2f}", f"{speed / copy_speed:.2f}", f"{peak - idle:.0f}"
        )
        if target.name.startswith("again") or target.name == "out-statekit":
            shutil.rmtree(target)
    out.print(table)


def containers(work: Path, gigabytes: float, out: Console) -> None:
    """Measures every container: a state of a layout at home in it, from statekit's folder and back to it."""
    table = Table("container", "layout", "written, GB/s", "of cp", "read, GB/s", "of cp")
    for name in registry.container_names():
        home = next(homes(name), None)
        if registry.container(name).target_kind is None or home is None:
            continue
        layout, schema, variant = home
        made = state(4, 2048, 2048) if schema == "adafactor" else moments(schema, variant, 4, 2048)
        matrices = max(1, round(gigabytes * GB / tensor_bytes(made))) * 4
        made = (
            state(matrices, 2048, 2048) if schema == "adafactor" else moments(schema, variant, matrices, 2048)
        )
        source, target, again = work / "neutral", work / "native", work / "again"
        write_neutral(source, made)
        copied = run("cp", "-r", str(source), str(work / "copy")) + run("sync")
        there, _ = statekit("convert", str(source), str(target), "--to", name, "--layout", layout)
        back, _ = statekit("convert", str(target), str(again), "--to", "statekit", *hints(schema, variant))
        speeds = [tensor_bytes(made) / GB / seconds for seconds in (copied, there, back)]
        cells = (f"{cell:.2f}" for speed in speeds[1:] for cell in (speed, speed / speeds[0]))
        table.add_row(name, layout, *cells)
        for folder in (source, target, again, work / "copy"):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    out.print(table)


def homes(container: str) -> Iterator[tuple[str, str, str]]:
    """Yields the layouts at home in a container, with an optimizer of which a state of any size can be made."""
    for layout in map(registry.layout, registry.layout_names()):
        for schema in ("adamw", "adafactor", "lans"):
            if container in layout.containers and schema in layout.variants and container != "keras":
                yield layout.name, schema, layout.variants[schema][0]


def hints(schema: str, variant: str) -> tuple[str, ...]:
    """Returns what a file of this optimizer may not tell."""
    return ("--variant", variant) if schema == "lans" else ()


def tensor_bytes(made: TrainState) -> int:
    """Returns the size of a state's values."""
    slots = (slot for tensors in made.slots.values() for slot in tensors.values())
    return sum(map(nbytes, (*made.params.values(), *slots)))


def inspections(work: Path, out: Console) -> None:
    """Measures how soon a checkpoint of 10 000 tensors is inspected."""
    source = work / "many"
    write_t5x(source, state(2500, 8, 8))
    table = Table("inspect", "seconds", "peak MiB")
    for label, options in (("10 000 tensors, T5X", ()), ("the same, --json", ("--json",))):
        seconds, peak = statekit("inspect", str(source), *options)
        table.add_row(label, f"{seconds:.2f}", f"{peak:.0f}")
    statekit("convert", str(source), str(work / "many.pt"))
    seconds, peak = statekit("inspect", str(work / "many.pt"))
    table.add_row("10 000 tensors, torch", f"{seconds:.2f}", f"{peak:.0f}")
    out.print(table)


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", help="where to put the files (default: a temporary folder)")
    arguments = parser.parse_args()
    out = Console()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        inspections(Path(folder), out)
        containers(Path(folder), arguments.gigabytes / 16, out)
        conversions(Path(folder), arguments.gigabytes, out)


if __name__ == "__main__":
    main()
