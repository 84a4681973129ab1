"""The few requests that the launcher makes to the server it started."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from rolaq.common.errors import RolaqError, one_line


class Client:
    """Requests to `url`, with `key` as bearer token, past any proxy.

    The server is one that this process started: a certificate of its own name is not asked for.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url, key
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def status(self, path: str, timeout: float = 5, key: bool = True) -> int | None:
        """The HTTP status of a GET; None when nothing answers. `key=False` leaves the key out."""
        try:
            with self._open(path, None, timeout, key) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, ValueError):
            return None

    def get(self, path: str, timeout: float = 60) -> Any:
        """The JSON of a GET. Raises `RolaqError` when there is none."""
        return self._json(path, None, timeout)

    def post(self, path: str, body: Any, timeout: float = 300) -> Any:
        """The JSON of a POST. Raises `RolaqError` when there is none."""
        return self._json(path, body, timeout)

    def _json(self, path: str, body: Any, timeout: float) -> Any:
        try:
            with self._open(path, body, timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            raise RolaqError(f"{self.url}{path} answers {error.code}: {one_line(text, 200)}") from error
        except (OSError, ValueError) as error:
            raise RolaqError(f"{self.url}{path} does not answer: {one_line(error, 200)}") from error

    def _open(self, path: str, body: Any, timeout: float, key: bool = True) -> Any:
        headers = {"Content-Type": "application/json"}
        if key and self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        return self._opener.open(urllib.request.Request(self.url + path, data, headers), timeout=timeout)
