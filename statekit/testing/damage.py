"""What befalls the files of a checkpoint: cut, flipped, lost, replaced, poisoned; each put right again afterwards."""

from __future__ import annotations

import io
import os
import pickletools
import resource
import shutil
import signal
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 20.0
"""How long a reader may be busy with one damaged checkpoint."""
MEMORY = 512 * 2**20
"""How much memory it may ask for meanwhile, in bytes, whether it is used or not."""
PICKLE = b"\x80"
"""The first byte of every pickle since protocol 2."""

Apply = Callable[[Path], object]


@dataclass(frozen=True)
class Damage:
    """One accident or attack.

    Attributes:
        what: For people.
        apply: Does it to a file, whose bytes can be had again.
        flips: Whether single bits are changed, which only a checksum can show everywhere.
        loses: Whether the file is gone, whatever lies in its place.
    """

    what: str
    apply: Apply
    flips: bool = False
    loses: bool = False


def files_of(root: Path) -> list[Path]:
    """Returns the files of a checkpoint, sorted: the file itself, or all below the folder."""
    return [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())


def damages(data: bytes, places: int) -> Iterator[Damage]:
    """Yields what may befall a file.

    Args:
        data: Its bytes.
        places: How many lengths and how many bits are tried, evenly spread, besides the first and last ones.
    """
    yield Damage("is missing", Path.unlink, loses=True)
    yield Damage("is empty", lambda path: path.write_bytes(b""))
    yield Damage("is a folder", _as_folder, loses=True)
    yield Damage("is a link to nothing", lambda path: as_link(path, path.with_name("nothing")), loses=True)
    yield Damage("is a link to itself", lambda path: as_link(path, path), loses=True)
    yield Damage("is a pipe", _as_pipe, loses=True)
    yield Damage("is a socket", _as_socket, loses=True)
    yield Damage("is a link to a device", lambda path: as_link(path, Path("/dev/zero")), loses=True)
    size = len(data)
    for length in sorted({*_spread(size, places), size - 1, 1} - {0, -1, size}):
        yield Damage(f"ends after {length} of {size} bytes", _writing(data[:length]))
    for number, place in enumerate(sorted({*_spread(size, places), size - 1} - {-1})):
        bit = 1 << number * 5 % 8
        flipped = data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
        yield Damage(f"has bit {bit} of byte {place} flipped", _writing(flipped), flips=True)


def poisons(data: bytes, canary: Path) -> Iterator[Damage]:
    """Yields attacks on a file: pickles in its place and inside of it that make the file `canary` if they run."""
    call = f"cos\nopen\n(V{canary}\nI{os.O_CREAT | os.O_WRONLY}\ntR0".encode()
    yield Damage("is a pickle that calls os.open", _writing(PICKLE + b"\2" + call + b"N."))
    for changed in _poisoned_zip(data, call) if data.startswith(b"PK\3\4") else _poisoned(data, call):
        yield Damage("holds a pickle that calls os.open", _writing(changed))


def _poisoned(data: bytes, call: bytes) -> Iterator[bytes]:
    start = 0
    while data[start : start + 1] == PICKLE:
        yield data[: start + 2] + call + data[start + 2 :]
        stream = io.BytesIO(data[start:])
        try:
            for _ in pickletools.genops(stream):
                pass
        except Exception:  # what follows isn't a pickle
            return
        start += stream.tell()


def _poisoned_zip(data: bytes, call: bytes) -> Iterator[bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    for victim, content in members:
        for changed in _poisoned(content, call):
            output = io.BytesIO()
            with zipfile.ZipFile(output, "w") as archive:
                for info, part in members:
                    archive.writestr(info.filename, changed if info is victim else part)
            yield output.getvalue()


def as_link(path: Path, target: Path) -> None:
    """Puts a link in the place of a file."""
    path.unlink()
    path.symlink_to(target)


@contextmanager
def restored(file: Path, data: bytes) -> Iterator[None]:
    """Puts a file right again at the end, whatever lies in its place."""
    try:
        yield
    finally:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
        file.write_bytes(data)


@contextmanager
def within_budget() -> Iterator[None]:
    """Allows some seconds and some memory; only in a process' main thread.

    What asks for more memory gets a MemoryError.
    """
    before = signal.signal(signal.SIGALRM, _too_long)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_held() + MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def _held() -> int:
    """Returns how much memory this process has of the kind that RLIMIT_DATA bounds, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


class _TooLongError(BaseException):
    """A reader doesn't come to an end. Isn't an Exception, so that none takes it for the file's fault."""


def _too_long(*_: Any) -> None:
    raise _TooLongError(f"is busy for more than {SECONDS} s")


def _spread(size: int, count: int) -> set[int]:
    return {size * i // count for i in range(count)} if size else set()


def _writing(data: bytes) -> Apply:
    return lambda path: path.write_bytes(data)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)
