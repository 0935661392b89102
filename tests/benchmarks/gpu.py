"""`make bench-gpu`: how fast optimizers step on a GPU, ours and their peers.

    python tests/benchmarks/gpu.py [--only NAME] [--sizes 24,300,2000] [--jax] [--tiles] [--page] [--json FILE]

A time is the median of CUDA events around single updates, warm. `of the copy` is a share of the GPU's own copy: the
bytes that the rule must read and write in its passes (traffic.py) a second, over those that a copy reads and writes.
`host` is what the call itself takes, `temporary` the memory that an update takes beside what stays, `graph` a replay of
the update in a CUDA graph, `fresh` the update where every gradient lies elsewhere than before.
`--jax` measures Optax and statekit.jax in a process of their own, `--tiles` other blocks of our kernels. `--page`
writes the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from page import fill
from traffic import TRAFFIC

SIZES = {24: 4096, 300: 1024, 2000: 64}
"""Matrices -> their side."""


@dataclass
class Figure:
    """What was measured of one optimizer."""

    name: str
    dtype: str
    count: int
    milliseconds: float = float("nan")
    share: float | None = None
    host: float | None = None
    temporary: int | None = None
    graph: float | None = None
    fresh: float | None = None
    fault: str = ""


def passes(rule: str, dtype: str, slots32: bool) -> float:
    """Returns the bytes for each element that a rule reads and writes in its passes."""
    traffic = TRAFFIC[rule.partition(" ")[0]]
    width = 2 if dtype == "bfloat16" else 4
    slots = traffic.slots + (2 if rule == "adafactor beta1" else 0)
    if rule == "lans" and dtype == "bfloat16":  # a master moves; the parameter is read for its norm
        slots, traffic = slots + 3, traffic._replace(params=2)
    return width * (traffic.grads + traffic.params) + (4 if slots32 else width) * slots


def makers(torch: Any) -> dict[str, tuple[str, Callable[[list[Any]], Any]]]:
    """Returns the optimizers: name -> its rule, and what makes it of named parameters."""
    import statekit.torch as ours

    def plain(kind: Any, **options: Any) -> Callable[[list[Any]], Any]:
        return lambda named: kind([param for _, param in named], **options)

    table: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
        "statekit AdamW": ("adamw", lambda named: ours.AdamW(named, lr=1e-3)),
        "statekit Adafactor": ("adafactor", lambda named: ours.Adafactor(named, lr=1e-3)),
        "statekit Adafactor, beta1": (
            "adafactor beta1",
            lambda named: ours.Adafactor(named, lr=1e-3, beta1=0.9),
        ),
        "statekit LAMB": ("lamb", lambda named: ours.LAMB(named, lr=1e-3)),
        "statekit LANS": ("lans", lambda named: ours.LANS(named, lr=1e-3, multi_precision=True)),
        "statekit ScaledAdam": ("scaled_adam", lambda named: ours.ScaledAdam(named, lr=1e-3)),
        "statekit Muon": ("muon", lambda named: ours.Muon(named, lr=1e-3)),
        "torch AdamW, fused": ("adamw", plain(torch.optim.AdamW, lr=1e-3, fused=True)),
        "torch AdamW, foreach": ("adamw", plain(torch.optim.AdamW, lr=1e-3, foreach=True)),
        "torch Adafactor, foreach": ("adafactor", plain(torch.optim.Adafactor, lr=1e-3, foreach=True)),
    }
    if hasattr(torch.optim, "Muon"):  # since PyTorch 2.9
        table["torch Muon"] = ("muon", plain(torch.optim.Muon, lr=1e-3))
    try:
        from transformers import Adafactor

        table["transformers Adafactor"] = (
            "adafactor", plain(Adafactor, lr=1e-3, relative_step=False, scale_parameter=True)
        )  # fmt: skip
    except ImportError:
        pass
    try:
        FusedLAMB = importlib.import_module("apex.optimizers").FusedLAMB
        table["apex FusedLAMB"] = ("lamb", plain(FusedLAMB, lr=1e-3))
    except ImportError:
        pass
    return table


def copy_speed(torch: Any) -> float:
    """Returns the bytes that a copy on the GPU reads and writes in a second."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    seconds = statistics.median(timed(torch, lambda: target.copy_(source), 10)) / 1e3
    return float(2 * source.numel() * 4 / seconds)


def timed(torch: Any, call: Callable[[], Any], rounds: int, warm: int = 3) -> list[float]:
    """Returns the milliseconds of calls on the device."""
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        pairs.append((start, stop))
        torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in pairs]


def measured(torch: Any, name: str, rule: str, make: Any, dtype: str, count: int, copy: float) -> Figure:
    """Measures one optimizer on one model."""
    figure, side = Figure(name, dtype, count), SIZES[count]
    kind = getattr(torch, dtype)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        named = [
            (f"p{i}", torch.nn.Parameter(torch.randn(side, side, device="cuda").to(kind)))
            for i in range(count)
        ]
        for _, param in named:
            param.grad = torch.randn(side, side, device="cuda").to(kind)
        optimizer = make(named)
        slow = timed(torch, optimizer.step, 1, 2)[0] > 100
        figure.milliseconds = statistics.median(
            timed(torch, optimizer.step, 3 if slow else 12, 0 if slow else 3)
        )
        wide = any(
            slot.dtype == torch.float32 and slot.numel() >= side * side
            for slot in optimizer.state[named[0][1]].values()
            if isinstance(slot, torch.Tensor)
        )
        if figure.count != 2000 and rule != "muon":  # matrix products limit Muon, not memory
            moved = passes(rule, dtype, wide) * count * side * side
            figure.share = moved / (figure.milliseconds / 1e3) / copy
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        optimizer.step()
        figure.host = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        figure.temporary = torch.cuda.max_memory_allocated() - before
        figure.fresh = statistics.median(fresh_times(torch, optimizer, [param for _, param in named]))
        if name.startswith("statekit") and rule != "muon":  # which no graph can hold
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(1e-3, device="cuda")
            timed(torch, optimizer.step, 1, 2)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            figure.graph = statistics.median(timed(torch, graph.replay, 8))
    except Exception as error:
        figure.fault = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return figure


def fresh_times(torch: Any, optimizer: Any, params: list[Any], rounds: int = 4) -> list[float]:
    """Returns the milliseconds of updates with gradients in memory that the optimizer hasn't seen."""
    times = []
    for _ in range(rounds if params[0].numel() < 2**24 else 1):
        for param in params:
            param.grad = param.grad.clone()
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def tiles(torch: Any, copy: float) -> Iterator[str]:
    """Measures other blocks."""
    from statekit.torch.kernels import grouped

    table = makers(torch)
    usual = dict(grouped.BLOCKS), dict(grouped.TILES), grouped.WARPS
    vectors = [(block, (8, 256), warps) for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8))]
    tiles = ((8, 256, 4), (16, 256, 4), (8, 512, 4), (32, 128, 4))
    wide = ((8, 512, 4), (4, 512, 4), (4, 1024, 4), (2, 1024, 4), (8, 1024, 8), (16, 512, 8))
    matrices, rows = ([(1024, tile[:2], tile[2]) for tile in choices] for choices in (tiles, wide))
    plans = (
        ("statekit LAMB", "bfloat16", vectors), ("statekit AdamW", "bfloat16", vectors),
        ("statekit LANS", "bfloat16", vectors), ("statekit ScaledAdam", "bfloat16", vectors),
        ("statekit Adafactor", "bfloat16", rows), ("statekit Adafactor", "float32", matrices),
    )  # fmt: skip
    for name, dtype, choices in plans:
        for choice in choices:
            grouped.BLOCKS, grouped.TILES = dict.fromkeys((2, 4), choice[0]), dict.fromkeys((2, 4), choice[1])
            grouped.WARPS = choice[2]
            rule, make = table[name]
            figure = measured(torch, name, rule, make, dtype, 24, copy)
            said = f"block {choice[0]} tile {choice[1]} warps {choice[2]}"
            yield f"{name} {dtype} {said}: {figure.milliseconds:.2f} ms {figure.share or 0:.2f} {figure.fault}"
    grouped.BLOCKS, grouped.TILES, grouped.WARPS = usual


def jax_figures(sizes: list[int]) -> Iterator[Figure]:
    """Measures Optax and statekit.jax, jitted and donated."""
    import jax
    import jax.numpy as jnp
    import optax

    import statekit.jax as ours

    table: dict[str, Any] = {
        "optax adamw": lambda: optax.adamw(1e-3), "optax adafactor": lambda: optax.adafactor(1e-3),
        "optax lamb": lambda: optax.lamb(1e-3), "statekit.jax adamw": lambda: ours.adamw(1e-3),
        "statekit.jax adafactor": lambda: ours.adafactor(1e-3), "statekit.jax lamb": lambda: ours.lamb(1e-3),
        "statekit.jax lans": lambda: ours.lans(1e-3),
    }  # fmt: skip
    for count in sizes:
        for name, make in table.items():
            figure = Figure(name, "float32", count)
            try:
                transformation: Any = make()
                shape = (SIZES[count], SIZES[count])
                params = {f"p{i}": jnp.ones(shape) * 0.1 for i in range(count)}
                grads = {f"p{i}": jnp.ones(shape) * 0.01 for i in range(count)}
                state = transformation.init(params)

                def step(params: Any, state: Any, grads: Any, transformation: Any = transformation) -> Any:
                    updates, state = transformation.update(grads, state, params)
                    return optax.apply_updates(params, updates), state

                run: Any = jax.jit(step, donate_argnums=(0, 1))
                times = []
                for _ in range(8):
                    start = time.perf_counter()
                    params, state = run(params, state, grads)
                    jax.block_until_ready(params)
                    times.append((time.perf_counter() - start) * 1e3)
                figure.milliseconds = statistics.median(times[3:])
            except Exception as error:
                figure.fault = f"{type(error).__name__}: {str(error)[:200]}"
            yield figure


def table_of(figures: list[Figure]) -> str:
    """Returns a table in Markdown."""
    lines = [
        "| | dtype | tensors | ms | of the copy | host, ms | temporary, MiB | graph, ms | fresh, ms |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for figure in figures:
        cells = [
            figure.name, figure.dtype, f"{figure.count} of {SIZES[figure.count]}x{SIZES[figure.count]}",
            figure.fault or f"{figure.milliseconds:.2f}",
            "" if figure.share is None else f"{figure.share:.2f}",
            "" if figure.host is None else f"{figure.host:.2f}",
            "" if figure.temporary is None else f"{figure.temporary / 2**20:.1f}",
            "" if figure.graph is None else f"{figure.graph:.2f}",
            "" if figure.fresh is None else f"{figure.fresh:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def jax_apart(sizes: list[int]) -> list[Figure]:
    """Measures JAX in a process of its own, for at most 200 seconds."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("JAX_PLATFORMS", None)
    large = ",".join(str(size) for size in sizes if size < 2000)
    command = [sys.executable, __file__, "--jax-alone", "--sizes", large]
    try:
        ended = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=200
        )
        output = ended.stdout
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
    return [Figure(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]


def torch_figures(torch: Any, copy: float, options: argparse.Namespace) -> Iterator[Figure]:
    """Measures what is asked for; peers only until the time is up."""
    start = time.monotonic()
    for dtype in options.dtypes.split(","):
        for count in options.sizes:
            for name, (rule, make) in makers(torch).items():
                late = time.monotonic() - start > options.seconds and not name.startswith("statekit")
                if options.only in name and not late:
                    yield measured(torch, name, rule, make, dtype, count, copy)


def read_options() -> argparse.Namespace:
    """Returns what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], default=list(SIZES)
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=200.0)
    for name in ("jax", "jax-alone", "tiles", "page"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints a table."""
    options = read_options()
    if options.jax_alone:
        for figure in jax_figures(options.sizes):
            print(json.dumps(asdict(figure)), flush=True)
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("There is no GPU here: run this where torch.cuda.is_available().")
    copy = copy_speed(torch)
    head = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy / 1e9:.0f} GB/s read and written"
    print(head, flush=True)
    if options.tiles:
        for line in tiles(torch, copy):
            print(line, flush=True)
        return
    figures: list[Figure] = []
    for figure in torch_figures(torch, copy, options):
        print(table_of([figure]).splitlines()[-1], flush=True)
        figures.append(figure)
    gc.collect()
    torch.cuda.empty_cache()
    figures += jax_apart(options.sizes) if options.jax else []
    text = f"{head}\n\n{table_of(figures)}"
    print(text)
    if options.json:
        Path(options.json).write_text(json.dumps({"head": head, "figures": [asdict(f) for f in figures]}))
    if options.page:
        fill("gpu", text)


if __name__ == "__main__":
    main()
