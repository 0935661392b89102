"""The repository's layout: top-level folders that are imported as parts of one package, and stay so when installed."""

from __future__ import annotations

import ast
import filecmp
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from goldens import COMPACT, GOLDEN

ROOT = Path(__file__).parents[1]
HOMES = {"statekit/converters": "converters", "statekit/schemas": "schemas", "statekit/cli": "cli"}
RECORDING = "tests/golden/t5x_train/t5_11_unscanned"
LINKS = {**{link: f"../{home}" for link, home in HOMES.items()}, "cli/recording": f"../{RECORDING}"}
"""Links by which tools that resolve by path see the package as it is installed."""
OTHERS = {
    *sys.stdlib_module_names, "accelerate", "click", "deepspeed", "flax", "h5py", "isal", "jax", "keras", "megatron",
    "msgpack", "mxnet", "numba", "numpy", "optax", "orbax", "rich", "safetensors", "tensorflow", "tensorstore", "torch",
    "transformers", "zarr",
}  # fmt: skip
"""Names by which others' modules are imported."""
MAX_GOLDEN_BYTES = 25_000_000
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FAMILIES = {family: PROJECT["entry-points"][f"statekit.{family}"] for family in ("containers", "layouts")}


def _setuptools() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(project["tool"]["setuptools"])


def packages_on_disk(root: Path) -> set[str]:
    """Returns the dotted name of every folder with an `__init__.py`, as it is imported."""
    packages = {
        ".".join(init.parent.relative_to(root).parts)
        for top in ("statekit", *HOMES.values())
        for init in (root / top).rglob("__init__.py")
    }
    return {name if name.partition(".")[0] == "statekit" else f"statekit.{name}" for name in packages}


def test_every_package_is_declared() -> None:
    assert set(_setuptools()["packages"]) == packages_on_disk(ROOT) | {"statekit.cli.recording"}


def test_a_package_that_nobody_declared_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "converters" / "new").mkdir(parents=True)
    (tmp_path / "converters" / "new" / "__init__.py").touch()
    assert packages_on_disk(tmp_path) == {"statekit.converters.new"}


def test_the_map_and_the_links_say_the_same() -> None:
    mapped = {name.replace(".", "/"): home for name, home in _setuptools()["package-dir"].items()}
    assert mapped == {"statekit": "statekit", **HOMES, "statekit/cli/recording": RECORDING}
    for link, home in LINKS.items():
        assert (ROOT / link).is_symlink(), f"{link} is no symbolic link; check out with core.symlinks=true"
        assert os.readlink(ROOT / link) == home


MOST_MODULES = 25
"""How many one looks over in a folder."""


def crowded(root: Path) -> dict[str, int]:
    """Returns the folders of the package with more modules than that."""
    folders = Counter(
        f"{path.parent.relative_to(root)}"
        for top in ("statekit", *HOMES.values())
        for path in (root / top).rglob("*.py")
    )
    return {folder: count for folder, count in folders.items() if count > MOST_MODULES}


def test_no_folder_has_more_modules_than_one_looks_over() -> None:
    assert crowded(ROOT) == {}


def test_a_folder_that_has_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    for number in range(MOST_MODULES + 1):
        (tmp_path / "cli" / f"m{number}.py").touch()
    assert crowded(tmp_path) == {"cli": MOST_MODULES + 1}


UNSAYING = {"own", "found", "held", "told"}
"""What a variable may not be called: such a name says whose it is or where it came from, and not what it holds."""


PRONOUNS = {"one", "said", "known", "what", "each", "made", "there", "ours", "theirs", "mine", "beside"}
"""What a variable of the package may not be called; records keep their fields, which are public."""


@cache  # of each module two laws ask
def named(text: str) -> tuple[list[str], list[str]]:
    """Returns the names that a module assigns to, fields of records aside, and those of its parameters."""
    stored, params, fields = list[ast.Name](), list[str](), set[ast.expr]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.append(node)
        elif isinstance(node, ast.arg):
            params.append(node.arg)
        elif isinstance(node, ast.ClassDef):
            fields |= {part.target for part in node.body if isinstance(part, ast.AnnAssign)}
    return [name.id for name in stored if name not in fields], params


def variables(text: str) -> list[str]:
    """Returns the names that a module assigns to, fields of records aside."""
    return named(text)[0]


def unsaying(text: str) -> list[str]:
    """Returns the variables and parameters of a module that don't say what they hold; errors have a keyword `found`."""
    stored, params = named(text)
    return [name for name in (*stored, *(name for name in params if name != "found")) if name in UNSAYING]


def test_variables_of_the_package_are_nouns() -> None:
    modules = [path for top in ("statekit", *HOMES.values()) for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(modules) > 400
    wrong = {path: PRONOUNS & {*variables(path.read_text(encoding="utf-8"))} for path in modules}
    assert {f"{path.relative_to(ROOT)}": names for path, names in wrong.items() if names} == {}


def test_a_pronoun_is_noticed() -> None:
    assert PRONOUNS & {*variables("class A:\n    what: str\n\nfor one in (): ...\n")} == {"one"}


def test_variables_say_what_they_hold() -> None:
    modules = [
        path
        for top in ("statekit", *HOMES.values(), "tests")
        for path in sorted((ROOT / top).rglob("*.py"))
        if "golden" not in path.parts
    ]
    assert len(modules) > 400
    wrong = {f"{path.relative_to(ROOT)}": unsaying(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_a_variable_that_does_not_is_noticed() -> None:
    assert unsaying("found = [own for own in range(3)]") == ["found", "own"]
    assert unsaying("def f(held, found=None): ...") == ["held"]


MOST_LINES = 133_000
"""Lines of Python that the package has at most: what a feature adds, a simplification takes away."""
_TOP = re.compile(r"(?<=\n\n)(?:(?:async )?def|class) (\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)


def unread(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """Returns the names at the top of modules that stand nowhere else, decorated ones aside: private ones in theirs."""
    every, counted = Counter[str](), [(text, Counter(re.findall(r"\w+", text))) for text in modules]
    for words in (words for _, words in counted):
        every.update(words)
    for text in others:
        every.update(re.findall(r"\w+", text))
    names = ((top[1] or top[2], words) for text, words in counted for top in _TOP.finditer(text))
    return [
        name
        for name, words in names
        if not name.startswith("__") and (words if name.startswith("_") else every)[name] == 1
    ]


def package_texts() -> list[str]:
    return [
        path.read_text(encoding="utf-8")
        for top in ("statekit", *HOMES.values())
        for path in sorted((ROOT / top).rglob("*.py"))
        if not any(folder.is_symlink() for folder in path.parents)
    ]


def test_every_name_of_the_package_is_read_and_it_does_not_grow_unnoticed() -> None:
    modules = package_texts()
    tests = [path for path in sorted((ROOT / "tests").rglob("*.py")) if "golden" not in path.parts]
    texts = [path.read_text(encoding="utf-8") for path in [*tests, ROOT / "pyproject.toml"]]
    assert unread(modules, texts) == []
    assert sum(text.count("\n") for text in modules) <= MOST_LINES


TWO_DOCSTRINGS = re.compile(r'[."]"""\n *"""\S.*')


def test_no_constant_has_the_docstring_of_another() -> None:
    assert [match[0] for text in package_texts() for match in TWO_DOCSTRINGS.finditer(text)] == []
    assert TWO_DOCSTRINGS.search('A = 1\nB = 2\n"""Of B."""\n"""Of A."""\n')


def test_a_name_that_nothing_reads_is_noticed() -> None:
    module = "A = 1\n\n\ndef f():\n    return g\n\n\n@command\ndef named(): ...\n\n\ndef _own(): ...\n"
    assert unread([module], ["f()", "_own"]) == ["A", "_own"]


# A script's own folder is the first place that Python imports from. Below converters/ many folders and modules bear
# the names of others' (formats/pickle, huggingface/safetensors.py, layouts/keras): they shadow nothing only because no
# file there is ever run as a script, and because the top folders, which tools put on the path, hold none of them.


@pytest.mark.parametrize("top", sorted(HOMES.values()))
def test_no_top_level_folder_holds_a_module_that_others_import(top: str) -> None:
    assert {path.stem for path in (ROOT / top).iterdir()} & OTHERS == set()


@pytest.mark.parametrize("top", sorted(HOMES.values()))
def test_nothing_in_a_top_level_folder_is_a_script(top: str) -> None:
    assert [path for path in sorted((ROOT / top).rglob("*.py")) if is_script(path)] == []


def is_script(path: Path) -> bool:
    """Tells whether a file says that it is to be run: by its name, mode, first line, or a look at `__name__`."""
    text = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text)) if "__name__" in text else ()
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    executable = bool(path.stat().st_mode & 0o111)
    return path.name == "__main__.py" or executable or text.startswith("#!") or "__name__" in names


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("__main__.py", "pass\n"),
        ("reader.py", "#!/usr/bin/env python\n"),
        ("reader.py", "if __name__ == '__main__':\n    pass\n"),
    ],
)
def test_a_script_is_noticed(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("KIND = type(3).__name__\n")
    assert not is_script(tmp_path / "module.py")
    (tmp_path / name).write_text(text)
    assert is_script(tmp_path / name)


def bears_name(name: str, target: str) -> bool:
    """Tells whether a file or folder on the way to an entry point's module contains the registered name."""
    return any(name.replace("-", "_") in part for part in target.partition(":")[0].split(".")[3:])


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, points in FAMILIES.items() for name in points]
)
def test_each_registered_name_is_found_by_a_file_or_folder_of_its_name(family: str, name: str) -> None:
    assert bears_name(name, FAMILIES[family][name])


def test_a_registered_name_that_no_file_bears_is_noticed() -> None:
    assert bears_name("hf-trainer", "statekit.converters.containers.huggingface.hf_trainer:CONTAINER")
    assert not bears_name("hf-trainer", "statekit.converters.containers.huggingface.container:TRAINER")
    assert not bears_name("containers", "statekit.converters.containers.torch_file:CONTAINER")


def test_entry_points_name_modules_that_exist() -> None:
    points = [p for group in PROJECT["entry-points"].values() for p in group.values()]
    modules = [p.partition(":")[0] for p in [*points, *PROJECT["scripts"].values()]]
    assert [m for m in modules if not (ROOT / f"{m.replace('.', '/')}.py").is_file()] == []


def test_the_recordings_are_small_and_unaltered() -> None:
    files = [path for path in COMPACT.rglob("*") if path.is_file() and path.name != "README.md"]
    assert sum(path.stat().st_size for path in files) < MAX_GOLDEN_BYTES
    if GOLDEN != COMPACT:
        # Those of low precision were recorded here, beside the living originals, and MXNet's folders laid out anew;
        # all others are copies.
        ours = ("low_precision", "mxnet_folders")
        copies = [p for p in files if p.relative_to(COMPACT).parts[0] not in ours]
        assert [p for p in copies if not filecmp.cmp(p, GOLDEN / p.relative_to(COMPACT), shallow=False)] == []
