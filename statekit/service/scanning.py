"""A scan of a root: its folders are listed here, and what may be a checkpoint is looked into by a process with limits.

What hasn't changed since the last scan isn't looked into again; what couldn't be read is, ever more rarely. What ends
that process is listed as what can't be read, with how it ended.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from statekit.errors import StatekitError, printable
from statekit.files.manifest import FILE, beside, is_manifest
from statekit.service.tasks.child import Child, Died, Zygote
from statekit.service.tasks.confinement import Reach

LOOK_SECONDS = 120
"""How long looking into one file or folder may take."""
LOOK_LIMITS: Mapping[str, int] = {"memory": 4 * 2**30, "files": 4096, "written": 2**20, "cpu": 110}
LOOKS = 2000
"""After how many looks the process is started anew: what libraries keep of files doesn't grow for ever."""
MOST_FILES = 2_000_000
MOST_BYTES = 2**53
"""What a checkpoint's size says at most: files without stored bytes can say more than a record has room for."""
DEEPEST = 64
"""Folders below each other at most."""
AGAIN_SECONDS = 60.0
"""When what couldn't be read is looked into again, though it hasn't changed: memory, disk or network may have failed
it. Each time after twice as long, up to `LATEST_SECONDS`."""
LATEST_SECONDS = 86400.0
_OF_STEPS = frozenset(
    re.findall(
        r"\w+",
        "step steps global iter iters iteration epoch e s b update updates at checkpoint checkpoints ckpt "
        "ckp save saved model state train weights run last latest newest best final end good backup "
        "current previous old new val valid validation loss acc accuracy metric score top v of with pt "
        "pth th bin tar safetensors keras h hdf msgpack npz pkl d",
    )
)
"""Words of a step's name that tell steps of one run apart, or say what a file is."""
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM})
"""Of a folder that isn't there any more, or is no folder, or not for us to see; anything else says nothing of it."""


@dataclass
class Folder:
    """A folder, a file if it holds nothing and `facts` are there, as one listing shows it.

    Attributes:
        path: Where it is.
        inside: What it holds, by name; None of a file.
        facts: Of a file: size in bytes, time of change in nanoseconds, number on its disk.
        print: Digest of the names and facts of all below, but manifests.
        size: Bytes of all files below, but manifests.
        modified: Time of the youngest of them, in nanoseconds.
        proof: Digest of the names and facts of all manifests below.
    """

    path: str
    inside: dict[str, Folder] | None
    facts: tuple[int, int, int] | None = None
    print: str = ""
    size: int = 0
    modified: int = 0
    proof: str = ""

    def count(self) -> int:
        """Returns how many files and folders lie below."""
        return sum(1 + child.count() for child in (self.inside or {}).values())

    def child(self, relative: str) -> Folder | None:
        """Returns what lies below, by names joined by `/`."""
        node: Folder | None = self
        for name in relative.split("/") if relative else ():
            node = None if node is None or node.inside is None else node.inside.get(name)
        return node


def listed(root: Path) -> Folder:
    """Lists a root with all below it; links are passed over.

    Raises:
        StatekitError: It can't be listed, or holds too much.
    """
    left = MOST_FILES

    def node(path: str, opened: int, depth: int) -> Folder:
        nonlocal left
        inside: dict[str, Folder] = {}
        try:
            with os.scandir(opened) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            _check_gone(error, path)
            entries = []
        for entry in entries:
            left -= 1
            if left < 0:
                raise StatekitError(
                    "There are more files below the root than a scan looks at.",
                    place=root,
                    expected=f"at most {MOST_FILES}",
                    remedy="name the folders below it that hold checkpoints",
                )
            place = os.path.join(path, entry.name)
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth < DEEPEST and not entry.name.startswith("."):
                        inside[entry.name] = folder(entry.name, place, opened, depth)
                elif entry.is_file(follow_symlinks=False):
                    facts = entry.stat(follow_symlinks=False)
                    inside[entry.name] = _file(place, (facts.st_size, facts.st_mtime_ns, facts.st_ino))
            except OSError as error:  # it went meanwhile
                _check_gone(error, place)
        return _folder_of(path, inside)

    def folder(name: str, place: str, opened: int, depth: int) -> Folder:
        # By its name in the folder that is open: what is put in its place meanwhile isn't followed.
        try:
            with _opened(name, opened) as below:
                return node(place, below, depth + 1)
        except PermissionError:
            return Folder(place, {}, print=_digest(()))

    try:
        with _opened(str(root), None) as top:
            return node(str(root), top, 0)
    except OSError as error:
        raise StatekitError("The root can't be listed.", place=root, found=error.strerror) from error


def _folder_of(path: str, inside: dict[str, Folder]) -> Folder:
    """Returns a folder with what lies in it; manifests count as proof of the rest, and not as a part of it."""
    manifests = {name for name, entry in inside.items() if entry.inside is None and is_manifest(name)}
    proofs = [(name, inside[name].print) for name in inside if name in manifests]
    proofs += [
        (name, entry.proof) for name, entry in inside.items() if entry.inside is not None and entry.proof
    ]
    rest = {name: entry for name, entry in inside.items() if name not in manifests}
    return Folder(
        path,
        inside,
        None,
        _digest((name, entry.print) for name, entry in rest.items()),
        sum(entry.size for entry in rest.values()),
        max((entry.modified for entry in rest.values()), default=0),
        _digest(proofs) if proofs else "",
    )


def _check_gone(error: OSError, path: str) -> None:
    """Passes over what is gone; what merely can't be listed now isn't taken for gone, with all that lies below."""
    if error.errno not in _GONE:
        raise StatekitError(
            "A folder can't be listed: nothing that lies below the root is taken for gone.",
            place=path,
            found=error.strerror,
            remedy="look whether the disk is sound, and the service may open enough files",
        ) from error


@contextmanager
def _opened(name: str, folder: int | None) -> Iterator[int]:
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield opened
    finally:
        os.close(opened)


def _file(path: str, facts: tuple[int, int, int]) -> Folder:
    return Folder(path, None, facts, _digest([("", repr(facts))]), facts[0], facts[1])


def _digest(pairs: Any) -> str:
    digest = blake2b(digest_size=16)
    for name, fact in pairs:
        digest.update(f"{len(name)}:{name}:{fact};".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True)
class Seen:
    """A checkpoint that a scan has seen.

    Attributes:
        place: Where it is, relative to the root, as the system's bytes.
        print: Digest of its files' names, sizes and times.
        proof: The same of its manifests.
        size: Bytes of its files.
        modified: Time of the youngest, in seconds since 1970.
        columns: What is known of it, by the names of the table's columns.
    """

    place: bytes
    print: str
    proof: str
    size: int
    modified: float
    columns: Mapping[str, Any]


def run_key(place: bytes, columns: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Returns what checkpoints of one run have in common: their folder, parameters, optimizer, and the run's own name.

    A folder that is called as a step alone, as `checkpoint-10`, is that step's, and the run is what it lies in.

    Several runs of one model may lie in one folder, each under a name of its own: the older isn't spare then.

    Args:
        place: Where a checkpoint is, relative to the root.
        columns: What is known of it.

    Returns:
        None of what is no step of a run: it has no optimizer.
    """
    if columns.get("optimizer") is None:
        return None
    folder, _, name = os.fsdecode(place).rpartition("/")
    names = ("container", "layout", "optimizer", "parameters", "elements")
    outer, _, inner = folder.rpartition("/")
    if _is_step(inner, columns.get("step")):
        return (os.fsencode(outer), _own_words(name), name, *(columns[column] for column in names))
    return (os.fsencode(folder), _own_words(name), *(columns[column] for column in names))


def _is_step(name: str, step: Any) -> bool:
    """Tells whether a folder is called as a step: by its number alone, or behind words for steps and nothing else."""
    named = re.fullmatch(
        r"(?:(?:global|checkpoint|ckpt|step|iter(?:ation)?|epoch|update)[-_.=]?)+([0-9]+)", name
    )
    return named is not None or (name.isascii() and name.isdigit() and int(name) == step)


def _own_words(name: str) -> tuple[str, ...]:
    """Returns the words of a step's name that say nothing of steps, such as a run's name."""
    return tuple(word for word in re.split(r"[^a-z]+", name.lower()) if word and word not in _OF_STEPS)


@dataclass
class _Looked:
    """What looking into something came to.

    Attributes:
        stamp: What it was then.
        answer: What was said.
        again: When to look again though it is the same, in seconds of the machine.
        pause: How long that was after the last look.
    """

    stamp: tuple[str, str]
    answer: Mapping[str, Any]
    again: float = math.inf
    pause: float = 0.0


def _remembered(stamp: tuple[str, str], answer: Mapping[str, Any], before: _Looked | None) -> _Looked:
    """Returns an answer as it is remembered: for as long as its files stay the same, if they could be read."""
    if answer.get("unreadable") is None:
        return _Looked(stamp, answer)
    last = before.pause if before is not None and before.stamp == stamp else 0.0
    pause = min(max(2 * last, AGAIN_SECONDS), LATEST_SECONDS)
    return _Looked(stamp, answer, time.monotonic() + pause, pause)


@dataclass
class Scanner:
    """What scans one root, and remembers what it has looked into.

    Args:
        root: The root, without links.
        hidden: A folder that what looks into files mustn't read: the service's data.
        zygote: What forks the process that looks.
        ask: What looks into a file or folder instead of that process, and trusts what lies there not to end it.
    """

    root: Path
    hidden: str = ""
    zygote: Zygote = field(default_factory=Zygote)
    ask: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    looked: int = 0
    entries: int = 0
    _known: dict[tuple[Any, ...], _Looked] = field(default_factory=dict)
    _before: dict[tuple[Any, ...], _Looked] = field(default_factory=dict)
    _child: Child | None = None
    _looks: int = 0

    def scan(self) -> Iterator[Seen]:
        """Yields every checkpoint below the root.

        Raises:
            StatekitError: It can't be listed, or no process be begun that looks.
        """
        if not self.root.is_dir():
            raise StatekitError(
                "The root isn't there.", place=self.root, remedy="mount it, or end the service"
            )
        top = listed(self.root)
        self.looked, self._before, self._known = 0, self._known, {}
        self.entries = top.count()
        try:
            yield from self._visit(top, top)
        except StatekitError:
            self._known = {**self._before, **self._known}
            raise
        finally:
            self._close()

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _visit(self, node: Folder, top: Folder) -> Iterator[Seen]:
        answer = self._look({"kind": "places", "path": node.path}, (node.print, node.proof))
        seen_below: list[Seen] = []
        covered: set[str] = set()
        if "unreadable" in answer:
            facts = {"container": answer.get("container"), **_unread(answer["unreadable"])}
            seen_below.append(self._seen(node, [node], top, facts))
            covered.add(node.path)
        for place in answer.get("places", ()):
            seen, parts = self._described(answer["container"], place, node, top)
            covered |= parts
            seen_below += [] if seen is None else [seen]
        if node.path not in covered:
            yield from seen_below
            yield from self._below(node, top, covered, answer.get("recording", False))
            return
        if node.inside is not None and all(_is_unread(record) for record in seen_below):
            below = list(self._below(node, top, set()))
            broken = {seen.columns["unreadable"] for seen in seen_below}
            is_part = any(seen.columns.get("unreadable") in broken for seen in below)
            if not is_part and not all(map(_is_unread, below)):  # the folder is no checkpoint: it holds some
                seen_below = below
        yield from seen_below

    def _below(self, node: Folder, top: Folder, covered: set[str], folders: bool = False) -> Iterator[Seen]:
        """Yields what lies in a folder beside the checkpoints that it is itself; of folders alone if so asked."""
        for child in (node.inside or {}).values():
            if child.path in covered:
                continue
            if child.inside is None:
                if not folders and not is_manifest(os.path.basename(child.path)):
                    yield from self._visit(child, top)
            elif not any(
                path.startswith(f"{child.path}/") for path in covered
            ):  # else it holds parts of a checkpoint
                yield from self._visit(child, top)

    def _described(
        self, container: str, place: Mapping[str, Any], node: Folder, top: Folder
    ) -> tuple[Seen | None, set[str]]:
        request = {"kind": "describe", "container": container, **place}
        key = _key(request)
        before = self._before.get(key)
        if before is not None and time.monotonic() < before.again:
            nodes = self._parts(before.answer, top)
            if nodes is not None and before.stamp == self._stamp(nodes, top):
                self._known[key] = before
                return self._of_answer(before.answer, nodes, top), {node.path for node in nodes}
        answer = self._asked(request)
        nodes = self._parts(answer, top)
        if nodes is None:  # it can't be opened: it is where it was looked for
            looked_for = top.child(self._relative(place["path"]))
            if (
                "path" in answer or looked_for is None
            ):  # it came after the listing: the next scan sees all of it
                return None, set()
            step = place["step"]
            guess = [
                child
                for child in (node.inside or {}).values()
                if step is not None and _numbered(child.path, step)
            ]
            nodes = guess[:1] or [looked_for]
            answer = {
                "path": nodes[0].path,
                "parts": [],
                "container": container,
                **_unread(answer["unreadable"]),
            }
        self._known[key] = _remembered(self._stamp(nodes, top), answer, before)
        return self._of_answer(answer, nodes, top), {node.path for node in nodes}

    def _of_answer(self, answer: Mapping[str, Any], nodes: list[Folder], top: Folder) -> Seen | None:
        columns = {name: value for name, value in answer.items() if name not in ("path", "parts")}
        node = top.child(self._relative(answer["path"]))
        return None if node is None else self._seen(node, nodes, top, columns)

    def _parts(self, answer: Mapping[str, Any], top: Folder) -> list[Folder] | None:
        if "path" not in answer:
            return None
        nodes = [top.child(self._relative(path)) for path in answer["parts"] or [answer["path"]]]
        return [node for node in nodes if node is not None] or None

    def _relative(self, path: str) -> str:
        relative = os.path.relpath(path, self.root)
        return "" if relative == "." else relative

    def _stamp(self, nodes: list[Folder], top: Folder) -> tuple[str, str]:
        return _digest((node.path, node.print) for node in nodes), self._proof(nodes, top)

    def _proof(self, nodes: list[Folder], top: Folder) -> str:
        first = Path(nodes[0].path)
        manifests = [beside(first), first.parent / FILE, first.parent.parent / FILE]
        near = [top.child(self._relative(str(path))) for path in manifests if path.is_relative_to(self.root)]
        return _digest(
            [(node.path, node.proof) for node in nodes] + [(o.path, o.print) for o in near if o is not None]
        )

    def _seen(self, node: Folder, nodes: list[Folder], top: Folder, columns: Mapping[str, Any]) -> Seen:
        stamp, proof = self._stamp(nodes, top)
        modified = max(node.modified for node in nodes) / 1e9
        size = min(sum(node.size for node in nodes), MOST_BYTES)
        place = os.fsencode(self._relative(node.path))
        return Seen(place, stamp, proof, size, min(max(modified, 0.0), 2.0**36), columns)

    def _look(self, request: Mapping[str, Any], stamp: tuple[str, str]) -> Mapping[str, Any]:
        key = _key(request)
        before = self._before.get(key)
        if before is None or before.stamp != stamp or time.monotonic() >= before.again:
            before = _remembered(stamp, self._asked(request), before)
        self._known[key] = before
        return before.answer

    def _asked(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.looked += 1
        if self.ask is not None:
            return self.ask(request)
        self._looks += 1
        if self._looks % LOOKS == 0:
            self._close()
        asked = {
            **request,
            "limits": LOOK_LIMITS,
            "reach": Reach((str(self.root),), (), self.hidden)._asdict(),
        }
        if self._child is None:
            try:
                self._child = self.zygote.fork()
            except Died as end:
                raise StatekitError(
                    "No process can be begun that looks into files.",
                    place=self.root,
                    found=f"it {end}",
                    remedy="look whether the machine has memory, processes and room for temporary files left",
                ) from end
        try:
            answer = self._child.result(asked, LOOK_SECONDS)
        except Died as end:
            self._close()
            return {"unreadable": f"Looking into it has ended the process: it {end}."}
        if answer.kind == "problem":
            parts = [str(answer.data[name]) for name in ("subject", "found") if answer.data.get(name)]
            return {"unreadable": " ".join(parts)}
        facts: Mapping[str, Any] = answer.data
        return facts


def _key(request: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(request.get(name) for name in ("kind", "container", "path", "step"))


def _numbered(path: str, step: int) -> bool:
    name = os.path.basename(path)
    return name.endswith(str(step)) and not name.removesuffix(str(step))[-1:].isdigit()


def _is_unread(seen: Seen) -> bool:
    return seen.columns.get("unreadable") is not None


def _unread(why: str) -> dict[str, Any]:
    return {"unreadable": printable(why)[:2000], "seal": "unknown", "resumable": False}
