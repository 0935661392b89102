"""What lets somebody in: the service's token, links that sign in once, and the cookies of those who signed in."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from starlette.datastructures import Headers

from statekit.errors import FormatError, NotFoundError
from statekit.files.durable import replace_file

TOKEN_FILE = "token"
SIGNED_OUT_FILE = "signed-out"
"""Lists the sessions that were ended before their time: digests of cookies, each with when it would have ended."""
TOKEN_BYTES = 32
SESSION_SECONDS = 30 * 24 * 3600


def read_token(folder: Path) -> str:
    """Returns the token of a data folder; makes it, readable by its user alone, where there is none.

    Raises:
        FormatError: The file can be read by others, or holds no token.
    """
    path = folder / TOKEN_FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _stored_token(path)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token


def _stored_token(path: Path) -> str:
    remedy = "delete it: the service makes another when it starts"
    try:
        if not path.is_file():
            raise OSError(errno.EINVAL, "it is no file")
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotFoundError(
            "The token can't be read.", place=path, found=error.strerror, remedy=remedy
        ) from error
    with os.fdopen(handle, encoding="ascii", errors="replace") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        token = file.read(1024).strip()
    if mode & 0o077:
        raise FormatError(
            "Others than its user can reach the token.",
            place=path,
            expected="0600",
            found=f"{mode:04o}",
            remedy=remedy,
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{43,}", token):
        raise FormatError(
            "The file holds no token.", place=path, expected=f"{TOKEN_BYTES} bytes", remedy=remedy
        )
    return token


class Keys:
    """What lets somebody in: the token, a code that works once, and the cookie that a browser gets for either.

    Args:
        token: The token; a cookie is worth nothing under another.
        folder: The data folder, which remembers who signed out; nobody does after the process if None.
    """

    def __init__(self, token: str, folder: Path | None = None) -> None:
        self._token = _digest(token)
        self._signed_out = SignedOut(None if folder is None else folder / SIGNED_OUT_FILE)
        self._session_key = hmac.digest(self._token, b"statekit session", "sha256")
        self._codes: set[bytes] = set()
        self.cookie = f"statekit-{self._session_key[:4].hex()}"
        """The cookie's name: two services on one machine have one each, as cookies know no ports."""

    def is_token(self, text: str) -> bool:
        """Tells whether somebody knows the token."""
        return hmac.compare_digest(_digest(text), self._token)

    def new_code(self) -> str:
        """Returns a code for a link that signs in once."""
        code = secrets.token_urlsafe(TOKEN_BYTES)
        self._codes.add(_digest(code))
        return code

    def redeem(self, code: str) -> bool:
        """Tells whether a code is one that was given out and not used yet; from now on it is used."""
        try:
            self._codes.remove(_digest(code))
        except KeyError:
            return False
        return True

    def new_session(self) -> str:
        """Returns the value of a cookie that is good for `SESSION_SECONDS`, or until it is signed out."""
        signed = f"{int(time.time()) + SESSION_SECONDS:x}.{secrets.token_hex(8)}"
        return f"{signed}.{self._signature(signed)}"

    def is_session(self, value: str) -> bool:
        """Tells whether a cookie's value is ours, under this token, not too old and not signed out."""
        signed, _, signature = value.rpartition(".")
        if not hmac.compare_digest(_digest(signature), _digest(self._signature(signed))):
            return False
        return _end_of(value) > time.time() and value not in self._signed_out

    def sign_out(self, headers: Headers) -> None:
        """Ends the sessions whose cookies a request brings: from now on they let nobody in.

        Raises:
            OSError: That can't be written down.
        """
        for value in self._cookies(headers):
            if self.is_session(value):
                self._signed_out.add(value)

    def _signature(self, signed: str) -> str:
        return hmac.digest(self._session_key, signed.encode("utf-8", "surrogateescape"), "sha256").hex()

    def _cookies(self, headers: Headers) -> Iterator[str]:
        """Yields the values that a request gives to our cookie."""
        for line in headers.getlist("cookie"):
            for pair in line.split(";"):
                name, _, value = pair.strip().partition("=")
                if name == self.cookie:
                    yield value

    def admits(self, headers: Headers) -> Literal["bearer", "cookie"] | None:
        """Returns by what a request is let in; None if by nothing. A wrong token isn't made good by a cookie."""
        header = headers.get("authorization")
        if header is not None:
            scheme, _, token = header.partition(" ")
            return "bearer" if scheme.lower() == "bearer" and self.is_token(token.strip()) else None
        return "cookie" if any(map(self.is_session, self._cookies(headers))) else None


class SignedOut:
    """The sessions that were signed out, for as long as their cookies would be good.

    Args:
        file: Where they are listed, for the next start; nowhere if None.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._digests: set[str] = set()
        if file is not None and file.is_file():
            lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
            kept = [line for line in lines if len(line) == 2 and float(line[0]) > time.time()]
            self._digests = {digest for _, digest in kept}
            if len(kept) < len(lines):
                replace_file(file, "".join(f"{end} {digest}\n" for end, digest in kept).encode(), 0o600)

    def __contains__(self, value: str) -> bool:
        return _digest(value).hex() in self._digests

    def add(self, value: str) -> None:
        """Adds a session, by its cookie's value."""
        digest = _digest(value).hex()
        self._digests.add(digest)
        if self._file is not None:
            listed = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(listed, "wb") as file:
                file.write(f"{_end_of(value)} {digest}\n".encode())
                file.flush()
                os.fsync(file.fileno())


def _end_of(value: str) -> int:
    """Returns when a signed cookie ends, in seconds since 1970."""
    return int(value.partition(".")[0], 16)


def _digest(text: str) -> bytes:
    """Returns what is compared instead of a secret: of one length, whatever it is."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
