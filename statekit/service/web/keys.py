"""What lets somebody in: the service's token, links that sign in once, and the cookies of those who signed in."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path
from typing import Literal

from starlette.datastructures import Headers

from statekit.errors import FormatError, NotFoundError

TOKEN_FILE = "token"
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
    """

    def __init__(self, token: str) -> None:
        self._token = _digest(token)
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
        """Returns the value of a cookie that is good for `SESSION_SECONDS`."""
        ends = f"{int(time.time()) + SESSION_SECONDS:x}"
        return f"{ends}.{self._signature(ends)}"

    def is_session(self, value: str) -> bool:
        """Tells whether a cookie's value is one of ours, under this token, and not too old."""
        ends, _, signature = value.partition(".")
        if not hmac.compare_digest(_digest(signature), _digest(self._signature(ends))):
            return False
        return int(ends, 16) > time.time()

    def _signature(self, ends: str) -> str:
        return hmac.digest(self._session_key, ends.encode("utf-8", "surrogateescape"), "sha256").hex()

    def admits(self, headers: Headers) -> Literal["bearer", "cookie"] | None:
        """Returns by what a request is let in; None if by nothing. A wrong token isn't made good by a cookie."""
        said = headers.get("authorization")
        if said is not None:
            scheme, _, token = said.partition(" ")
            return "bearer" if scheme.lower() == "bearer" and self.is_token(token.strip()) else None
        for line in headers.getlist("cookie"):
            for pair in line.split(";"):
                name, _, value = pair.strip().partition("=")
                if name == self.cookie and self.is_session(value):
                    return "cookie"
        return None


def _digest(text: str) -> bytes:
    """Returns what is compared instead of a secret: of one length, whatever it is."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
