"""Checks on a GPU what no CPU can; prints a line for each check, ends with 1 if one fails.

    python tests/gpu_checks.py [bounds] [NAME ...]

Without names it makes all checks but those of the derived bound. A name is the beginning of a check's.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch

import statekit.torch
from statekit.torch.kernels import grouped
from statekit.torch.kernels.direct import DirectUpdate

DEVICE = "cuda"
SHAPES = ((300, 200), (300, 200), (257, 513), (128, 128), (5, 7), (4096,), (77,), (1000, 129), ())
CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "LAMB": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-3},
    "LANS": {"lr": 1e-3},
    "ScaledAdam": {"lr": 1e-3},
}


def optimizer(
    kind: str, dtype: torch.dtype, device: str, foreach: bool = True, seed: int = 0, **options: Any
) -> Any:
    """Returns an optimizer over fresh parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    named = [
        (f"p{i}", torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.1).to(dtype).to(device)))
        for i, shape in enumerate(SHAPES)
    ]
    if kind == "LANS" and dtype is not torch.float32:
        options = {"multi_precision": True, **options}
    return getattr(statekit.torch, kind)(named, foreach=foreach, **{**CLASSES[kind], **options})


def params_of(made: Any) -> list[torch.Tensor]:
    """Returns the parameters of an optimizer."""
    return [param for group in made.param_groups for param in group["params"]]


def give(made: Any, step: int, factor: float = 1.0) -> None:
    """Gives every parameter a gradient, the same for the same step, in the memory of the last one."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params_of(made):
        grad = (torch.randn(param.shape, generator=generator) * factor).to(param.dtype).to(param.device)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)


def arrays_of(made: Any) -> dict[str, torch.Tensor]:
    """Returns parameters and slots by name."""
    arrays = {}
    for i, param in enumerate(params_of(made)):
        arrays[f"p{i}"] = param.detach().cpu().float()
        arrays |= {f"p{i} {name}": slot.cpu().float() for name, slot in made.state[param].items()}
    return arrays


def gap(left: Any, right: Any) -> float:
    """Returns the largest difference, relative to the largest value of each array."""
    theirs = arrays_of(right)
    gaps = [
        float((value - theirs[name]).abs().max() / (theirs[name].abs().max() + 1e-30))
        for name, value in arrays_of(left).items()
    ]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def like_the_text(kind: str, dtype: torch.dtype) -> str:
    ours, text = optimizer(kind, dtype, DEVICE), optimizer(kind, dtype, "cpu", foreach=False)
    for step in range(3):
        for made in (ours, text):
            give(made, step)
            made.step()
    allowed = 2e-6 if dtype is torch.float32 else 2e-2
    difference = gap(ours, text)
    assert all(
        type(batch.fast).__name__ == "GroupedMove" for plan in ours._plans.values() for batch in plan.batches
    )
    assert difference < allowed, f"differs by {difference:.2e}"
    return f"differs by {difference:.1e}"


def many_tiles(dtype: torch.dtype) -> str:
    """Compares a rule where a block takes several tiles, as of large models, with one where each takes one."""
    moved = []
    for fewest in (2**40, 0):
        with patch.object(grouped, "MANY_BLOCKS", fewest):
            made = optimizer("Adafactor", dtype, DEVICE)
            for step in range(3):
                give(made, step)
                made.step()
            moved.append(made)
    most = [max(batch.launches.tiles for batch in made._direct[0].batches) for made in moved]
    assert most == [1, grouped.TILES_OF_BLOCK], most
    difference = gap(*moved)
    assert difference < (2e-6 if dtype is torch.float32 else 2e-2), f"differs by {difference:.2e}"
    return f"differs by {difference:.1e}"


def never_waits(kind: str, dtype: torch.dtype) -> str:
    made = optimizer(kind, dtype, DEVICE)
    for step in range(2):
        give(made, step)
        made.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.step()
        for param in params_of(made):  # gradients that lie elsewhere
            param.grad = None if param.grad is None else param.grad.clone()
        made.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    direct = made._direct.get(0)
    return "directly" if isinstance(direct, DirectUpdate) else "by the general way"


def captured(kind: str, dtype: torch.dtype) -> str:
    ours = optimizer(kind, dtype, DEVICE, lr=torch.tensor(1e-3, device=DEVICE))
    eager = optimizer(kind, dtype, DEVICE)
    for made in (ours, eager):
        for step in range(2):
            give(made, step)
            made.step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(2, 6):
        for made in (ours, eager):
            give(made, step)
        if step == 4:
            ours.param_groups[0]["lr"].fill_(5e-4)
            eager.param_groups[0]["lr"] = 5e-4
        graph.replay()
        eager.step()
    torch.cuda.synchronize()
    counts = ours.state_dict()["param_groups"][0]["step"], eager.state_dict()["param_groups"][0]["step"]
    assert counts == (6, 6), counts
    difference = gap(ours, eager)
    assert difference < (1e-6 if dtype is torch.float32 else 1e-2), difference
    return f"4 replays, differs by {difference:.1e}"


def scaled(kind: str, dtype: torch.dtype) -> str:
    plain, ours = optimizer(kind, dtype, DEVICE), optimizer(kind, dtype, DEVICE)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.ones((), device=DEVICE))
    done = 0
    for step in range(5):
        give(ours, step, scaler.get_scale())
        before = arrays_of(ours)
        if step == 3:
            poisoned = params_of(ours)[2].grad
            assert poisoned is not None
            poisoned.view(-1)[7] = float("inf")
        scaler.step(ours)
        scaler.update()
        if step == 3:
            after = arrays_of(ours)
            assert all(torch.equal(before[name], after[name]) for name in before), (
                "moved by an infinite gradient"
            )
            continue
        give(plain, step)
        plain.step()
        done += 1
    counted = ours.state_dict()["param_groups"][0]["step"]
    assert counted == done, f"counts {counted}, not {done}"
    difference = gap(ours, plain)
    assert difference < (1e-5 if dtype is torch.float32 else 2e-2), difference
    return f"differs by {difference:.1e}"


def same_bits(kind: str, dtype: torch.dtype) -> str:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            made = optimizer(kind, dtype, DEVICE)
            for step in range(3):
                give(made, step)
            made.step()
            runs.append(arrays_of(made))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    return "the same bits"


def compiled_training(kind: str, dtype: torch.dtype) -> str:
    made = optimizer(kind, dtype, DEVICE)
    give(made, 0)
    made.step()

    @torch.compile
    def train() -> None:
        made.step()

    train()
    train()
    return "not traced into"


def short_forms() -> str:
    from gpu_quotients import differing

    quotients, roots = differing()
    assert quotients == roots == 0, f"{quotients} quotients and {roots} roots differ"
    return "2**32 quotients and 2**16 roots are the same"


def within_the_bound(schema: str, variant: str, options: Any) -> str:
    from kernel_judging import judged
    from test_torch_fast import about_as_large, of_size, poisoned

    changes: Sequence[tuple[Any, ...]] = (
        (),
        (of_size, 1e-16),
        (about_as_large, 3e19),
        (poisoned, float("nan")),
    )
    total, left = 0, []
    for change in changes:
        count, outside = judged(schema, variant, options, *change, device=DEVICE)
        total += count
        left += [(*change[:1], *key) for key in outside]
    assert not left, f"{len(left)} of {total} outside: {left[:12]}"
    return f"{total} arrays, all within"


def listed() -> list[tuple[str, Callable[[], str]]]:
    """Returns all checks by name."""
    checks: list[tuple[str, Callable[[], str]]] = []
    for check in (like_the_text, never_waits, captured, scaled, same_bits):
        for kind in CLASSES:
            for dtype in (torch.float32, torch.bfloat16):
                if dtype is torch.float32 or check is not scaled:
                    name = f"{check.__name__} {kind} {str(dtype)[6:]}"
                    checks.append((name, partial(check, kind, dtype)))
    checks.append(("like_the_text LANS float16", partial(like_the_text, "LANS", torch.float16)))
    for dtype in (torch.float32, torch.bfloat16):
        checks.append((f"many_tiles {str(dtype)[6:]}", partial(many_tiles, dtype)))
    checks.append(("short_forms bfloat16", short_forms))
    checks.append(("compiled_training AdamW", partial(compiled_training, "AdamW", torch.float32)))
    return checks


def bounds() -> list[tuple[str, Callable[[], str]]]:
    """Returns the checks of the derived bound."""
    from test_torch_fast import SETTINGS

    return [
        (
            f"within_the_bound {schema} {variant} {options}",
            partial(within_the_bound, schema, variant, options),
        )
        for schema, variant, options in SETTINGS
    ]


def main() -> int:
    checks = bounds() if sys.argv[1:] == ["bounds"] else listed()
    names = tuple(name for name in sys.argv[1:] if name != "bounds")
    checks = [(name, run) for name, run in checks if not names or name.startswith(names)]
    failed = 0
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name, run in checks:
        start = time.perf_counter()
        try:
            line = run()
        except Exception as error:
            failed += 1
            line = f"FAILED {type(error).__name__}: {str(error)[:600]}"
            if failed <= 4:
                line += "\n" + "".join(traceback.format_exc().splitlines(keepends=True)[-14:])
        print(f"{name}: {line} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
