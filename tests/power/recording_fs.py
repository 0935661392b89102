"""Mounts an empty file system in memory that writes down every call that changes or syncs it.

    /usr/bin/python3 recording_fs.py MOUNTPOINT JOURNAL

Runs in the foreground until it is unmounted. A process of its own, as the kernel asks it what the process at work on
the file system waits for; by a Python that has pyfuse3 (Debian: python3-pyfuse3). The journal has a line of JSON for
each call: its name and arguments, folders and files by their number, bytes in base64.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pyfuse3
import trio


@dataclass
class Node:
    """A file, a folder or a link; `names` is what a folder holds, `data` what a file or a link does."""

    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[bytes, Node] = field(default_factory=dict)
    links: int = 1
    changed: int = field(default_factory=time.time_ns)


class Recording(pyfuse3.Operations):  # type: ignore[misc]
    """The file system."""

    def __init__(self, journal: Any) -> None:
        super().__init__()
        self._journal = journal
        self._nodes = {pyfuse3.ROOT_INODE: Node(pyfuse3.ROOT_INODE, stat.S_IFDIR | 0o755)}

    def _note(self, call: str, *arguments: Any) -> None:
        plain = [os.fsdecode(one) if isinstance(one, bytes) else one for one in arguments]
        self._journal.write(json.dumps([call, *plain]) + "\n")
        self._journal.flush()

    def _new(self, parent: int, name: bytes, mode: int) -> Node:
        if name in self._nodes[parent].names:
            raise pyfuse3.FUSEError(errno.EEXIST)
        node = Node(max(self._nodes) + 1, mode)
        self._nodes[node.number] = self._nodes[parent].names[name] = node
        self._note("folder" if stat.S_ISDIR(mode) else "file", parent, name, node.number)
        return node

    def _child(self, parent: int, name: bytes) -> Node:
        if name not in self._nodes[parent].names:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._nodes[parent].names[name]

    @staticmethod
    def _entry(node: Node) -> Any:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_mode, entry.st_nlink = node.number, node.mode, node.links
        entry.st_size, entry.st_blksize = len(node.data), 4096
        entry.st_blocks = -(-len(node.data) // 512)
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = node.changed
        entry.entry_timeout = entry.attr_timeout = 3600  # nobody else changes anything
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any) -> Any:
        return self._entry(self._child(parent, name))

    async def getattr(self, inode: int, ctx: Any) -> Any:
        return self._entry(self._nodes[inode])

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> Any:
        node = self._nodes[inode]
        if fields.update_size:
            self._resize(node, attr.st_size)
            self._note("resize", inode, attr.st_size)
        if fields.update_mode:
            node.mode = attr.st_mode
        return self._entry(node)

    @staticmethod
    def _resize(node: Node, size: int) -> None:
        node.data[size:] = bytes(max(0, size - len(node.data)))
        node.changed = time.time_ns()

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> Any:
        return self._entry(self._new(parent, name, stat.S_IFDIR | (mode & ~ctx.umask)))

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        node = self._new(parent, name, stat.S_IFREG | (mode & ~ctx.umask))
        return pyfuse3.FileInfo(fh=node.number), self._entry(node)

    async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> Any:
        node = self._new(parent, name, stat.S_IFLNK | 0o777)
        node.data[:] = target
        return self._entry(node)

    async def readlink(self, inode: int, ctx: Any) -> bytes:
        return bytes(self._nodes[inode].data)

    async def link(self, inode: int, parent: int, name: bytes, ctx: Any) -> Any:
        node = self._nodes[inode]
        if name in self._nodes[parent].names:
            raise pyfuse3.FUSEError(errno.EEXIST)
        self._nodes[parent].names[name] = node
        node.links += 1
        self._note("link", parent, name, inode)
        return self._entry(node)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        self._child(parent, name).links -= 1
        del self._nodes[parent].names[name]
        self._note("remove", parent, name)

    async def rmdir(self, parent: int, name: bytes, ctx: Any) -> None:
        if self._child(parent, name).names:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        del self._nodes[parent].names[name]
        self._note("remove", parent, name)

    async def rename(
        self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int, ctx: Any
    ) -> None:
        old, new = self._nodes[parent_old].names, self._nodes[parent_new].names
        moved, there = self._child(parent_old, name_old), new.get(name_new)
        if flags & pyfuse3.RENAME_NOREPLACE and there is not None:
            raise pyfuse3.FUSEError(errno.EEXIST)
        if flags & pyfuse3.RENAME_EXCHANGE:
            new[name_new], old[name_old] = moved, self._child(parent_new, name_new)
            self._note("exchange", parent_old, name_old, parent_new, name_new)
            return
        if there is not None and there.names:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        del old[name_old]
        new[name_new] = moved
        self._note("rename", parent_old, name_old, parent_new, name_new)

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        if flags & os.O_TRUNC:
            self._resize(self._nodes[inode], 0)
            self._note("resize", inode, 0)
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return bytes(self._nodes[fh].data[off : off + size])

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        node = self._nodes[fh]
        if off > len(node.data):
            self._resize(node, off)
        node.data[off : off + len(buf)] = buf
        node.changed = time.time_ns()
        self._note("write", fh, off, base64.b64encode(buf).decode())
        return len(buf)

    async def fsync(self, fh: int, datasync: bool) -> None:
        self._note("sync", fh)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        self._note("sync", fh)

    async def opendir(self, inode: int, ctx: Any) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        for place, (name, node) in enumerate(list(self._nodes[fh].names.items())):
            if place >= start_id and not pyfuse3.readdir_reply(token, name, self._entry(node), place + 1):
                return

    async def statfs(self, ctx: Any) -> Any:
        facts = pyfuse3.StatvfsData()
        facts.f_bsize = facts.f_frsize = 4096
        facts.f_blocks = facts.f_bfree = facts.f_bavail = 2**20
        facts.f_files = facts.f_ffree = facts.f_favail = 2**20
        facts.f_namemax = 255
        return facts

    async def access(self, inode: int, mode: int, ctx: Any) -> bool:
        return True

    async def flush(self, fh: int) -> None:
        pass

    async def release(self, fh: int) -> None:
        pass

    async def releasedir(self, fh: int) -> None:
        pass

    async def forget(self, inode_list: Any) -> None:
        pass


if __name__ == "__main__":
    with open(sys.argv[2], "w", encoding="utf-8", errors="surrogateescape") as journal:
        pyfuse3.init(Recording(journal), sys.argv[1], {*pyfuse3.default_options, "fsname=statekit-recording"})
        try:
            trio.run(pyfuse3.main)
        finally:
            pyfuse3.close(unmount=True)
