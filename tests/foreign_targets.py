"""What may lie where a target shall be: of ours, of others, and what is no file."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from statekit.conversion.convert import convert, plan


def put(what: str, source: Path, target: Path) -> None:
    """Puts something where a target shall be."""
    real = target.with_name("precious")
    real.mkdir()
    (real / "train.py").write_text("precious")
    match what.split():
        case ["file"]:
            target.write_text("precious")
        case ["empty", "file"]:
            target.touch()
        case ["folder"]:
            target.mkdir()
            (target / "train.py").write_text("precious")
        case ["nested", "folder"]:
            (target / "below").mkdir(parents=True)
            (target / "below" / "train.py").write_text("precious")
        case ["link", "to", kind]:
            target.symlink_to({"file": "precious/train.py", "folder": "precious", "nothing": "gone"}[kind])
        case ["fifo"]:
            os.mkfifo(target)
        case ["socket"]:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(target))
        case ["device"]:
            os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        case ["our", kind, *changed]:
            place = real / "ours"  # no target may have a manifest's name
            convert(plan(source, place, to={"file": "torch", "folder": "statekit"}[kind]))
            place.rename(target)
            if changed:
                written = target if kind == "file" else max(target.glob("*.safetensors"))
                written.write_bytes(written.read_bytes()[:-1] + b"x")


def facts(path: Path) -> tuple[int, str, bytes]:
    """Returns what tells whether something else has come to a path."""
    link = os.readlink(path) if path.is_symlink() else ""
    content = b"".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())
    return path.lstat().st_ino, link, path.read_bytes() if path.is_file() else content


FOREIGN = [
    *("file", "empty file", "folder", "nested folder", "link to file", "link to folder", "link to nothing"),
    *("fifo", "socket", "device", "our file changed", "our folder changed"),
]
"""What `--replace` alone never takes the place of."""
