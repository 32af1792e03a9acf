"""One server process: listen at once, read the weights beside it, end within a second or two when told to."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cedar.config.serve import ServeConfig
from cedar.engine.load import ModelFiles
from cedar.errors import ConfigError
from cedar.server.app import MAX_HEADER_BYTES, create_app
from cedar.server.schema import error_body
from cedar.server.service import Service

log = logging.getLogger("cedar.server")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they end the process by the signal, with a traceback."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """HTTP/1.1 whose refusals, before there is a request to route, have the shape of all others."""

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or headers above 64 KiB."""
        told = f"this is not HTTP/1.1, or its headers have more than {MAX_HEADER_BYTES} bytes"
        body = msgspec.json.encode(error_body(told, status=400, code="invalid_value"))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        request_id = f"x-request-id: {uuid.uuid4().hex}\r\n"
        self.transport.write(f"{head}{request_id}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def uvicorn_config(service: Service) -> uvicorn.Config:
    """How the service is put on the network."""
    return uvicorn.Config(
        create_app(service),
        http=_Protocol,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(service.config.shutdown_s)),
    )


def listen(config: ServeConfig) -> socket.socket:
    """The listening socket.

    Raises:
        ConfigError: The address is taken, or not this machine's; or other machines could ask and nobody needs a key.
    """
    if not (config.api_key_file or config.open_to_all or _is_loopback(config.host)):
        raise ConfigError(
            f"on {config.host} other machines can connect, and there are no keys: give --api-key-file "
            "(`cedar key NAME` makes one), or --open if whoever connects may ask"
        )
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port} ({error.strerror or error}): "
            "try another --port or --host"
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        # a name: it may mean any of this machine's addresses
        return False


async def serve(
    files: ModelFiles,
    config: ServeConfig,
    listener: socket.socket,
    *,
    load: Callable[[], Any],
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        load: Reads the weights and starts the engine; runs in a thread of its own.
        on_ready: Called in the event loop once answers can begin.

    Raises:
        Exception: Whatever `load` raised; the server has ended then.
    """
    # its news of starting and stopping would repeat ours
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # a failed request is in our log, with its id
    logging.getLogger("uvicorn.error").addFilter(lambda record: not record.getMessage().startswith("Exception in ASGI"))
    service = Service(files, config)
    server = _Server(uvicorn_config(service))
    loop = asyncio.get_running_loop()
    failure: list[Exception] = []

    def stop() -> None:
        # a second signal waits for nothing
        server.force_exit = server.should_exit
        server.should_exit = True
        service.stop()

    def told_to_stop() -> None:
        if config.drain_s == 0 or service.draining or not service.open:
            stop()
            return
        log.info("draining: %d requests are open, at most %g s", len(service.open), config.drain_s)
        service.drain()
        end_s = loop.time() + config.drain_s

        def look() -> None:
            if not service.open or loop.time() >= end_s:
                if not server.should_exit:
                    stop()
            else:
                loop.call_later(0.05, look)

        look()

    def loaded(engine: Any) -> None:
        service.ready(engine)
        service.stop() if server.should_exit else on_ready()

    def failed(error: Exception) -> None:
        failure.append(error)
        stop()

    def work() -> None:
        # the loop is gone if the server was stopped meanwhile
        with contextlib.suppress(RuntimeError):
            try:
                engine = load()
            except Exception as error:  # whatever it is: the event loop ends the server and raises it again
                loop.call_soon_threadsafe(failed, error)
            else:
                loop.call_soon_threadsafe(loaded, engine)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told_to_stop)
    threading.Thread(target=work, name="cedar-load", daemon=True).start()
    try:
        await server.serve(sockets=[listener])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        service.stop()
    if failure:
        raise failure[0]
