"""Who may ask, and how often: keys from a file, kept there only as hashes.

The file is TOML, a table a key:

    [[key]]
    name = "laptop"
    sha256 = "salt:hex of sha256(salt + key)"    # `cedar key laptop` prints this table and, once, the key
    admin = false                                 # may read /metrics and cancel anybody's request
    requests_per_minute = 60                      # optional
    tokens_per_minute = 100000                    # optional: prompt and answer, counted when an answer ends
    concurrency = 4                               # optional
    routes = ["/v1/chat/completions"]             # optional: nothing else then

Source: serving.md 6.6.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
import tomllib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from cedar.errors import ConfigError, RequestError

# known without a key: a probe and a browser have none
OPEN_ROUTES = ("/health", "/ready", "/version", "/openapi.json", "/")
_WINDOW_S = 60.0


class _Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    sha256: str
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    routes: list[str] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[_Entry]


@dataclass(slots=True, eq=False)
class Key:
    """One key and what it did in the last minute."""

    entry: _Entry
    running: int = 0
    starts: deque[float] = field(default_factory=deque)
    tokens: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def admin(self) -> bool:
        return self.entry.admin

    def matches(self, secret: str) -> bool:
        """Compared in constant time."""
        salt, _, digest = self.entry.sha256.partition(":")
        return hmac.compare_digest(_hash(salt, secret), digest)

    def enter(self, path: str) -> None:
        """Begin a request.

        Raises:
            RequestError: Another route than the key's, too many at once, or too many in this minute.
        """
        if self.entry.routes is not None and path not in self.entry.routes:
            raise RequestError(f"the key {self.name!r} may not use {path}", code="forbidden", status=403)
        now = time.monotonic()
        while self.starts and self.starts[0] <= now - _WINDOW_S:
            self.starts.popleft()
        while self.tokens and self.tokens[0][0] <= now - _WINDOW_S:
            self.tokens.popleft()
        limits = (
            ("requests at once", self.entry.concurrency, self.running, 1.0),
            ("requests a minute", self.entry.requests_per_minute, len(self.starts), _wait(self.starts, now)),
            (
                "tokens a minute",
                self.entry.tokens_per_minute,
                sum(count for _, count in self.tokens),
                _wait(deque(began for began, _ in self.tokens), now),
            ),
        )
        for what, limit, used, wait_s in limits:
            if limit is not None and used >= limit:
                raise RateError(f"the key {self.name!r} has {limit} {what}; try again later", wait_s)
        self.starts.append(now)
        self.running += 1

    def leave(self) -> None:
        """The request has ended."""
        self.running -= 1

    def spend(self, num_tokens: int) -> None:
        """An answer ended that cost this much."""
        self.tokens.append((time.monotonic(), num_tokens))


class RateError(RequestError):
    """A key's limit is reached.

    Attributes:
        retry_after_s: When it may be worth to try again.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, code="rate_limit_exceeded", status=429)
        self.retry_after_s = retry_after_s


def _wait(starts: deque[float], now: float) -> float:
    return max(1.0, starts[0] + _WINDOW_S - now) if starts else 1.0


def load_keys(file: Path) -> list[Key]:
    """The keys of a file.

    Raises:
        ConfigError: Not readable, not of the shape above, a name given twice, or no key at all.
    """
    try:
        entries = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _File).key
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the keys in {file}: {error} (`cedar key NAME` makes one)") from None
    for entry in entries:
        if not re.fullmatch(r"[^:]*:[0-9a-f]{64}", entry.sha256):
            raise ConfigError(f'{file}: the key {entry.name!r} needs sha256 = "salt:64 hex digits"')
    names = [entry.name for entry in entries]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{file} holds {len(names)} keys, expected at least one, each with a name of its own")
    return [Key(entry) for entry in entries]


def new_key(name: str) -> tuple[str, str]:
    """A fresh key, and the table that goes into the file."""
    secret, salt = f"ck-{secrets.token_urlsafe(32)}", secrets.token_hex(8)
    return secret, f'[[key]]\nname = "{name}"\nsha256 = "{salt}:{_hash(salt, secret)}"\n'


def _hash(salt: str, secret: str) -> str:
    return hashlib.sha256((salt + secret).encode("utf-8", errors="replace")).hexdigest()


def find_key(keys: list[Key], headers: dict[bytes, bytes]) -> Key:
    """The key of a request, from `authorization: Bearer` or `x-api-key`.

    Raises:
        RequestError: 401, without a word about what would be right.
    """
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    secret = bearer[7:] if bearer[:7].lower() == "bearer " else headers.get(b"x-api-key", b"").decode("latin-1")
    # all are compared: the time says nothing about which one it was
    found = [key for key in keys if key.matches(secret.strip())]
    if not found:
        what = "wrong" if secret else "missing"
        raise RequestError(
            f"the API key is {what}; send authorization: Bearer KEY, or x-api-key", code="invalid_api_key", status=401
        )
    return found[0]


def key_of(request: HttpRequest) -> Key | None:
    """The key of a request that was let in; None where the server has no keys."""
    key: Any = request.scope["state"].get("api_key")
    return key if isinstance(key, Key) else None


def check_admin(request: HttpRequest) -> None:
    """Refuse a key that may only ask.

    Raises:
        RequestError: 403.
    """
    key = key_of(request)
    if key is not None and not key.admin:
        raise RequestError(
            f"the key {key.name!r} may not use {request.url.path}: it is not an admin's", code="forbidden", status=403
        )
