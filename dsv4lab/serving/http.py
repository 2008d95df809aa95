"""One plain request to a server, with the API key where the environment has one."""

import http.client
import json
import os
import urllib.request
from typing import Any

from dsv4lab.serving.guard import API_KEY, one_line

_SECRET = "api_key"
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine's servers


class NoAnswer(OSError):
    """The server did not answer, or not with what was asked for."""


def headers() -> dict[str, str]:
    """Of every request."""
    key = os.environ.get(API_KEY)
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def call(url: str, path: str, body: dict | None = None, *, timeout: float = 300.0) -> Any:
    """The JSON of the answer; a body makes it a POST. NoAnswer with path and reason."""
    try:
        return json.loads(tell(url, path, body, timeout=timeout))
    except ValueError as error:
        raise NoAnswer(f"{path} was not answered: {one_line(str(error))}") from None


def tell(url: str, path: str, body: dict | None = None, *, timeout: float = 300.0) -> bytes:
    """The answer as it is. NoAnswer with path and reason."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with _DIRECTLY.open(urllib.request.Request(url + path, data, headers()), timeout=timeout) as answer:
            return answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{path} was not answered: {one_line(str(error))}") from None


def healthy(url: str) -> bool:
    """Whether the server is ready for requests."""
    try:
        with _DIRECTLY.open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def server_info(url: str) -> dict[str, Any]:
    """What the server says of itself, keys left out. NoAnswer if it says nothing that could be that."""
    info = call(url, "/server_info")
    states = info.get("internal_states") if isinstance(info, dict) and "version" in info else None
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise NoAnswer("/server_info was not answered by an SGLang server")
    return _public(info)


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(item) for name, item in value.items() if _SECRET not in name}
    return [_public(item) for item in value] if isinstance(value, list) else value
