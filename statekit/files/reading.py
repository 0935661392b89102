"""Files of a source: opened without waiting or following their word, with errors that say which file and why."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from statekit.errors import FormatError, NotFoundError, RefusedError, StatekitError


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Turns an OSError into an error that says where and why.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It can't be read.
    """
    try:
        yield
    except StatekitError:
        raise
    except FileNotFoundError:
        raise NotFoundError("A file of the checkpoint is missing.", place=place) from None
    except OSError as error:
        raise FormatError(
            f"A file of the checkpoint can't be read: {error.strerror or error}.",
            place=place,
            found=errno.errorcode.get(error.errno or 0, type(error).__name__),
            remedy="check its permissions and its disk",
        ) from error


def open_regular(path: Path) -> io.FileIO:
    """Opens a regular file for reading, unbuffered; never waits, as a FIFO would make it.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It can't be opened.
        RefusedError: It is a folder, a device, a FIFO or a socket.
    """
    with reading(path):
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            found = stat.filemode(facts.st_mode)
            raise RefusedError("This isn't a regular file.", place=path, found=found)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        return io.FileIO(path, "rb", opener=lambda name, _: os.open(name, flags))
