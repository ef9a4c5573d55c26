"""Reward servers by name, from a file that the user keeps: `flashgrpo_servers.json`.

    {"hpsv3": {"url": "http://127.0.0.1:8190"},
     "farm": {"url": ["http://10.0.0.5:8190", "http://10.0.0.6:8190"], "token_file": "token.txt"},
     "unified": {"kind": "judge", "url": "http://127.0.0.1:8000/v1", "model": "UnifiedReward"}}

A workflow or a run names a server; where it is and what token opens it stand in this file only, so
neither leaves the machine with a shared workflow, and no workflow decides where data is sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FlashGRPOError

FILE_NAME = "flashgrpo_servers.json"
KINDS = ("reward", "judge")
_KEYS = {"kind", "url", "token", "token_file", "model"}


@dataclass(frozen=True)
class Server:
    """Where a reward or judge is served.

    Attributes:
        urls: addresses of equal servers.
        token: what the servers ask for, or empty.
        kind: `reward` (`flashgrpo reward-server`) or `judge` (OpenAI-compatible).
        model: for a judge, the model's name there.
    """

    urls: tuple[str, ...]
    token: str = field(default="", repr=False)
    kind: str = "reward"
    model: str = ""


class _Place:
    """The file of this process; a host sets it when it starts."""

    file: Path | None = None


def use_file(path: Path | None) -> None:
    """Take servers from this file from now on; it need not exist yet."""
    _Place.file = path


def servers_file() -> Path | None:
    """The file servers are taken from, or None."""
    return _Place.file


def server_names(kind: str) -> list[str]:
    """Names of all servers of a kind; empty when the file is missing or broken."""
    try:
        found = read_servers(_Place.file) if _Place.file is not None else {}
    except FlashGRPOError:
        return []  # choosing one says what is wrong
    return sorted(name for name, server in found.items() if server.kind == kind)


def find_server(name: str, kind: str, file: Path | None = None) -> Server:
    """A server by its name.

    Args:
        name: its name.
        kind: `reward` or `judge`.
        file: servers file; default the process's.

    Raises:
        FlashGRPOError: there is no file, it is broken, or it names no such server.
    """
    path = file or _Place.file
    if path is None:
        raise FlashGRPOError(
            f"server {name[:80]!r} is unknown: no servers file was given; write {FILE_NAME} and "
            "name it in the environment variable FLASHGRPO_SERVERS, or give `url` instead"
        )
    found = {key: server for key, server in read_servers(path).items() if server.kind == kind}
    if name not in found:
        raise FlashGRPOError(
            f"server {name[:80]!r} is not in {str(path)!r}: add it there, or choose one of "
            f"{', '.join(sorted(found)) or 'none: the file names no ' + kind}"
        )
    return found[name]


def read_servers(path: Path) -> dict[str, Server]:
    """All servers of a file.

    Raises:
        FlashGRPOError: the file is missing or broken.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FlashGRPOError(
            f"{str(path)!r} does not exist: write it with one line per server, e.g. "
            '{"hpsv3": {"url": "http://127.0.0.1:8190"}}'
        ) from None
    except (OSError, ValueError, RecursionError) as exc:
        raise FlashGRPOError(f"{str(path)!r} cannot be read as JSON: {str(exc)[:200]}") from None
    if not isinstance(table, dict):
        raise FlashGRPOError(f"{str(path)!r} must hold a JSON object: server name -> settings")
    return {name: _server(path, name, entry) for name, entry in table.items()}


def _server(path: Path, name: str, entry: Any) -> Server:
    where = f"server {name[:80]!r} in {path.name!r}"
    if not isinstance(entry, dict) or set(entry) - _KEYS:
        raise FlashGRPOError(f"{where} must be a table of {', '.join(sorted(_KEYS))}")
    kind = entry.get("kind", "reward")
    if kind not in KINDS:
        raise FlashGRPOError(f"{where}: kind = {kind!r:.40} must be one of {', '.join(KINDS)}")
    token, model = entry.get("token", ""), entry.get("model", "")
    if not isinstance(token, str) or not isinstance(model, str):
        raise FlashGRPOError(f"{where}: token and model must be text")
    if entry.get("token_file"):
        token = read_token(path.parent / str(entry["token_file"]))
    return Server(check_urls(where, entry.get("url")), token, kind, model)


def check_urls(where: str, value: Any) -> tuple[str, ...]:
    """Addresses of servers, checked.

    Args:
        where: for the message.
        value: one address, or a list of them.

    Raises:
        FlashGRPOError: there is none, or one is no plain http address.
    """
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, list) or not urls:
        raise FlashGRPOError(f"{where}: url must be an address or a list of them")
    for url in urls:
        scheme, _, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
        bad = scheme not in ("http", "https") or not rest or set(rest) & set("@?# \t\r\n")
        if bad:
            raise FlashGRPOError(
                f"{where}: url {str(url)[:80]!r} must be like http://127.0.0.1:8190, without name, "
                "password or query"
            )
    return tuple(url.rstrip("/") for url in urls)


def read_token(path: Path) -> str:
    """The token in a file, without white space around it.

    Raises:
        FlashGRPOError: the file is missing or empty.
    """
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise FlashGRPOError(f"token file {str(path)!r} cannot be read: {exc}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise FlashGRPOError(f"token file {str(path)!r} must hold one line of printable ASCII")
    return token
