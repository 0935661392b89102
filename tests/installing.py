"""Builds statekit as it is published, installs it into environments that hold nothing else, and tries it there.

    python tests/installing.py [EXTRA ...]          `make package`

installs from a registry, as a user does, with no extra and with each by itself. tests/test_package.py does the same
without a network: what an extra asks for is lent from the environment of the tests, and nothing besides.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "tests" / "golden" / "t5x_train" / "t5_11_unscanned"
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md")
FOLDERS = ("statekit", "converters", "schemas", "cli", "docs")

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
IMPORTS = {
    "torch": """
import statekit.torch, torch
layer = torch.nn.Linear(4, 4)
optimizer = statekit.torch.Adafactor(layer.named_parameters(), lr=0.1)
before = layer.weight.clone()
layer(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert not torch.equal(before, layer.weight)
""",
    "cpu": "import isal, numba",
    "hf": """
import pathlib, statekit, torch, transformers
config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=16)
model = transformers.GPT2LMHeadModel(config)
groups = [[p for p in model.parameters() if (p.ndim > 1) is decayed] for decayed in (True, False)]
optimizer = torch.optim.AdamW([{"params": group} for group in groups])
model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
optimizer.step()
step = pathlib.Path("checkpoint-1")
model.save_pretrained(step)
torch.save(optimizer.state_dict(), step / "optimizer.pt")
step.joinpath("trainer_state.json").write_text('{"global_step": 1}')
with statekit.open(step, names_from="config") as state:
    moment = state.slots["transformer/ln_f/weight"]["m"].read()
    assert (moment == optimizer.state[model.transformer.ln_f.weight]["exp_avg"].numpy()).all()
""",
    "jax": """
import jax, jax.numpy as jnp, statekit.jax
params = {"w": jnp.ones((4, 4))}
optimizer = statekit.jax.adafactor(0.1)
updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
assert float(jnp.abs(updates["w"]).min()) > 0
""",
    "service": """
import pathlib
from statekit.client import Client
from statekit.service.server import Settings, opened
root, data = pathlib.Path("root"), pathlib.Path("data")
root.mkdir(), data.mkdir()
with opened(Settings([root], data)) as service:
    assert service.catalogue.scan().seen == 0
Client("http://127.0.0.1:1", "token").close()
""",
    "tensorflow": """
import keras, statekit.tensorflow
variable = keras.Variable([[1.0, 2.0], [3.0, 4.0]], name="w")
before = variable.numpy().copy()
statekit.tensorflow.Adafactor(learning_rate=0.1).apply([keras.ops.ones((2, 2))], [variable])
assert (variable.numpy() != before).all()
""",
}
"""For each extra, what it is there for. (`dev` and `tpu` are for working on statekit.)"""
BROUGHT = {"hf": {"torch"}, "all": {"torch", "jax", "tensorflow"}}
"""The frameworks that an extra brings, where it isn't the one of its own name."""


def build(work: Path) -> tuple[Path, Path]:
    """Builds an sdist of the sources as a checkout without symbolic links has them, and a wheel from that sdist."""
    source = work / "source"
    for top in FOLDERS:
        shutil.copytree(ROOT / top, source / top, ignore=_links)
    for name in SOURCES:
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(RECORDING, source / RECORDING.relative_to(ROOT))
    sdist = _built("build_sdist", source, work)
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return sdist, _built("build_wheel", unpacked, work)


def _links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or Path(folder, name).is_symlink()]


def _built(kind: str, source: Path, work: Path) -> Path:
    out = work / kind
    subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=source, check=True, capture_output=True)
    (file,) = out.iterdir()
    return file


def empty_environment(folder: Path) -> Path:
    """Makes an environment that holds nothing, not even pip, and returns its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    """Returns where an environment's packages are."""
    (folder,) = (python.parents[1] / "lib").glob("python3.*/site-packages")
    return folder


def install(python: Path, wheel: Path) -> None:
    """Installs a wheel and nothing else."""
    pip(python, "--no-deps", "--no-index", str(wheel))


def pip(python: Path, *arguments: str) -> None:
    """Installs into an environment, whether or not it has a pip of its own."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
        "-qq",
    ]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)


def lend(python: Path, extra: str) -> None:
    """Links what an installed statekit asks for with an extra, and what that asks for, from our environment."""
    place = site_packages(python)
    (installed,) = distributions(name="statekit", path=[str(place)])
    for needed in _closure(installed, frozenset({extra}), set()):
        for top in {path.parts[0] for path in needed.files or ()} - {"..", "__pycache__"}:
            link = place / top
            if not link.exists():
                link.symlink_to(Path(str(needed.locate_file(top))))


def _closure(
    of: Distribution, extras: AbstractSet[str], seen: set[tuple[str, AbstractSet[str]]]
) -> Iterator[Distribution]:
    for line in of.requires or ():
        needed = Requirement(line)
        applies = needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras | {""})
        key = (needed.name, frozenset(needed.extras))
        if not applies or key in seen:
            continue
        seen.add(key)
        package = of if needed.name == "statekit" else distribution(needed.name)
        yield from _closure(package, key[1], seen)
        if package is not of:
            yield package


def trial(python: Path, extra: str, work: Path) -> None:
    """Inspects, converts, and uses what the extra is for; with Transformers, goes through the demo.

    Raises:
        AssertionError: Says which command failed, with what it printed.
    """
    work.mkdir()
    statekit = python.with_name("statekit")
    source = site_packages(python) / "statekit" / "cli" / "recording" / "checkpoint"
    _run(0, work, statekit, "--version")
    _run(0, work, python, "-m", "statekit", "--help")
    _run(0, work, statekit, "formats")
    _run(0, work, statekit, "inspect", source, "--stats")
    _run(0, work, statekit, "convert", source, "torch-ckpt.pt")
    _run(0, work, statekit, "convert", "torch-ckpt.pt", "back-to-t5x", "--to", "t5x")
    _run(0, work, statekit, "inspect", "back-to-t5x", "--json")
    brought = BROUGHT.get(extra, {extra})
    for name in {"torch", "jax", "tensorflow"} - brought:
        assert f"pip install '.[{name}]'" in _run(1, work, python, "-c", f"import statekit.{name}")
    for name in IMPORTS if extra == "all" else [extra] if extra else []:
        _run(0, work, python, "-c", IMPORTS[name])
    if extra in ("hf", "all"):
        assert "goes on as T5X did" in _run(0, work, statekit, "demo")
    else:
        assert "pip install '.[hf]'" in _run(3, work, statekit, "demo")


def _run(code: int, folder: Path, *command: str | Path) -> str:
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**kept, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def main(extras: Sequence[str]) -> None:
    """Installs from a registry into empty environments, tries each, and prints what it took."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sdist, wheel = build(work)
        print(f"{sdist.name}: {sdist.stat().st_size} bytes; {wheel.name}: {wheel.stat().st_size} bytes")
        for extra in extras:
            start = time.perf_counter()
            python = empty_environment(work / f"with-{extra}")
            wanted = f"{wheel}[{extra}]" if extra else str(wheel)
            pip(python, "--constraint", str(ROOT / "constraints.txt"), wanted)
            installed = time.perf_counter() - start
            trial(python, extra, work / f"trial-{extra}")
            tried = time.perf_counter() - start - installed
            print(
                f"{extra or 'no extra':10}  installed in {installed:.0f} s, tried in {tried:.0f} s",
                flush=True,
            )
            shutil.rmtree(work / f"with-{extra}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["", *IMPORTS, "all"])
