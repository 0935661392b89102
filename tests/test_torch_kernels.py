"""Generated kernels: without Triton nothing changes, and through its interpreter they are what the text says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[1]
TRITON = Path(os.environ.get("STATEKIT_TRITON", ROOT / ".triton"))
"""Where `make .triton/.ready` puts Triton: not beside TensorFlow, with which it doesn't live in one process."""


needs_triton = pytest.mark.skipif(
    not (TRITON / "triton").is_dir(), reason="Triton isn't there: make .triton/.ready"
)


def environment_with_triton() -> dict[str, str]:
    """Returns an environment whose Python finds Triton."""
    paths = [str(TRITON), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@needs_triton
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_do_through_the_interpreter_what_the_text_says(cases: str) -> None:
    environment = {**environment_with_triton(), "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        cases,
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    ended = subprocess.run(
        [*command, str(ROOT / "tests" / "kernels_interpreted.py")],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_share_tensors_move_them_by_the_rule_of_the_whole(world: int) -> None:
    environment = {**environment_with_triton(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "kernels_sharded.py"), str(world)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-400:] + ended.stderr[-4000:]


@needs_triton
@pytest.mark.parametrize(
    "kinds",
    [
        ("Adafactor",),
        pytest.param(("AdamW", "LAMB", "Adafactor", "LANS", "ScaledAdam"), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_kernels_in_bfloat16_compile_for_a_gpu(kinds: Sequence[str], tmp_path: Path) -> None:
    environment = {**environment_with_triton(), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "kernels_compiled.py"), *kinds],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-400:] + ended.stderr[-2000:]
    assert ended.stdout.split() == [*kinds]


def test_nothing_imports_triton_on_a_cpu() -> None:
    code = (
        "import sys, torch, statekit.torch\n"
        "linear = torch.nn.Linear(3, 2)\n"
        "optimizer = statekit.torch.AdamW(linear.named_parameters(), lr=0.1)\n"
        "linear(torch.ones(1, 3)).sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.step()\n"
        "print('triton.language' in sys.modules, 'statekit.torch.kernels.generated' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["False", "False"]
