"""An HTTP proxy on loopback in front of an S3 server: it counts, refuses and loses answers.

Requests are forwarded as they came, with their Host header, which S3's signature covers. The
server sees another port in it than its own and does not mind.
"""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_HOP = {"connection", "keep-alive", "transfer-encoding", "proxy-connection"}
BUSY = (
    503,
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.'
    b"</Message></Error>",
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: method, decoded path (`/bucket/key`), query, answered status and body bytes.

    `status` is 0 where the answer was dropped. `received` are body bytes sent by the client,
    `sent` those of the answer. `range` is the Range header.
    """

    method: str
    path: str
    query: str
    status: int
    received: int
    sent: int
    range: str = ""


Answer = tuple[int, bytes]


class S3Proxy:
    """`endpoint` forwards to `target`. Use as a context manager, or `close` it."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target).netloc
        self.log: list[Request] = []
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._answer: Callable[[str, str], Answer | None] = lambda method, path: None
        self._drop: Callable[[str, str], bool] = lambda method, path: False
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False  # clients keep their connections open
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> S3Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- what to do ------------------------------------------------------------------------------

    def busy_share(self, share: float, seed: int = 0) -> None:
        """Answer 503 SlowDown to a share (0 to 1) of the requests."""
        draw = random.Random(seed)
        self._answer = lambda method, path: BUSY if draw.random() < share else None

    def busy_first(self, count: int) -> None:
        """Answer 503 SlowDown to the first `count` requests of each method and path."""
        seen: dict[tuple[str, str], int] = {}

        def answer(method: str, path: str) -> Answer | None:
            seen[method, path] = seen.get((method, path), 0) + 1
            return BUSY if seen[method, path] <= count else None

        self._answer = answer

    def answer(self, choose: Callable[[str, str], Answer | None]) -> None:
        """Answer by `choose(method, path)`, status and body, where it is not None."""
        self._answer = choose

    def drop_answer(self, method: str = "PUT", path_part: str = "") -> None:
        """Forward the next such request, then close the connection instead of answering."""
        left = 1

        def drop(found: str, path: str) -> bool:
            nonlocal left
            if left and found == method and path_part in path:
                left -= 1
                return True
            return False

        self._drop = drop

    def heal(self) -> None:
        """Forward everything again."""
        self._answer = lambda method, path: None
        self._drop = lambda method, path: False

    # -- what happened ---------------------------------------------------------------------------

    def requests(self, method: str = "", path_part: str = "") -> list[Request]:
        with self._lock:
            return [
                each for each in self.log if method in ("", each.method) and path_part in each.path
            ]

    def count(self, method: str = "", path_part: str = "") -> int:
        return len(self.requests(method, path_part))

    def bytes_sent(self, method: str = "GET", path_part: str = "") -> int:
        """Body bytes of the answers."""
        return sum(each.sent for each in self.requests(method, path_part))

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        url = urlsplit(handler.path)
        path = unquote(url.path)
        with self._lock:
            own = self._answer(handler.command, path)
            drop = own is None and self._drop(handler.command, path)
            self.headers.append(dict(handler.headers.items()))
        if own is not None:
            status, content = own
            headers = [("Content-Type", "application/xml")]
        else:
            status, headers, content = self._forward(handler, body)
        with self._lock:
            shown = 0 if drop else status
            self.log.append(
                Request(
                    handler.command,
                    path,
                    url.query,
                    shown,
                    len(body),
                    len(content),
                    handler.headers.get("Range", ""),
                )
            )
        if drop:
            handler.close_connection = True
            return
        handler.send_response_only(status)
        for name, value in headers:
            handler.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers) and status != 204:
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def _forward(
        self, handler: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._target, timeout=60)
        try:
            connection.putrequest(
                handler.command, handler.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in handler.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
            headers = [each for each in answer.getheaders() if each[0].lower() not in _HOP]
            return answer.status, headers, content
        finally:
            connection.close()
