"""The life of a server: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from types import FrameType
from typing import NamedTuple

import uvicorn

from cpmrt import LLM
from cpmrt.errors import ConfigError
from cpmrt.server.access import tls_context
from cpmrt.server.app import make_app
from cpmrt.server.connections import BACKLOG, Connections, connection_limit, raise_file_limit
from cpmrt.server.http_protocol import LimitedHttpProtocol
from cpmrt.server.log import LoopErrors
from cpmrt.server.service import ServerSettings, Service
from cpmrt.server.systemd import notify
from cpmrt.server.tls import TlsProtocol

_log = logging.getLogger("cpmrt.server")
_KEEP_ALIVE_S = 30
_TICK_S = 1.0
"""The interval at which the Date header is renewed."""
_LAST_WORDS_S = 2
"""The time after the grace for sending the errors that end what still runs."""
_STOP_S = 10.0
"""How long the engine may take to end and to free its model."""
_WAITING_CONNECTIONS = 1024
# A thread that computes gives the interpreter away this often, so that the event loop answers in time.
SWITCH_INTERVAL_S = 0.0005
_OLD_GENERATION = 100
"""Garbage collections of the middle generation before one of the old generation."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def bind(settings: ServerSettings) -> socket.socket:
    """Open a listening socket. Raises ConfigError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_WAITING_CONNECTIONS)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error}", fix="choose another --host or --port"
        ) from error
    return listener


def address_of(listener: socket.socket, settings: ServerSettings) -> str:
    scheme = "https" if settings.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Ending(NamedTuple):
    """How a server ended: the signal that ended it, or 0, and whether its engine ended too before the time was up."""

    signal_number: int
    is_complete: bool


def serve(settings: ServerSettings, load: Callable[[], LLM], listener: socket.socket) -> Ending:
    """Serve until a signal. Raises what `load` raises, and DeviceError if the device was lost."""
    prepare_process()
    return asyncio.run(Running(settings, load, listener).run())


def prepare_process() -> None:
    """Set what serving needs: the interpreter's switch interval, the limit of open files, the C library's allocator."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_file_limit()
    # A fixed threshold for mmap: else glibc raises it after large requests and keeps ever larger blocks in its heaps,
    # where small blocks that stay fragment them. A high threshold for trimming: heaps keep the memory that the NumPy
    # executor allocates again with each step.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, 512 * 1024)
        set_option(_M_TRIM_THRESHOLD, 32 * 2**20)


class Running:
    """One server. `stop` may be called from any thread once `run` has begun."""

    def __init__(self, settings: ServerSettings, load: Callable[[], LLM], listener: socket.socket):
        self._settings, self._load, self._listener = settings, load, listener
        self._address = address_of(listener, settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self.service: Service | None = None

    def stop(self) -> None:
        """Drain and end, as SIGTERM does. May be called again."""
        if self._server is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._server.begin_exit)

    async def run(self) -> Ending:
        """Serve until the end. Raises what `load` raises, and DeviceError if the device was lost."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(LoopErrors().handle)
        self.service = service = Service(self._settings, self._load)
        server = self._server = _Server(self._config(service), service)
        watching = asyncio.ensure_future(self._watch(service, server))
        try:
            await server.serve([self._listener])
        finally:
            is_complete = await service.engine.stop(_STOP_S)
            service.close()
            watching.cancel()
        if service.engine.failure is not None:
            raise service.engine.failure
        return Ending(server.signal_number, is_complete)

    async def _watch(self, service: Service, server: _Server) -> None:
        """Log when the model is there, and end the server if it cannot be loaded or its device is lost.

        Whoever started the process can start another one; this one would only refuse requests.
        """
        await asyncio.wait([service.engine.loaded])
        if service.engine.loaded.exception() is None:
            self._announce(service.engine.llm)
            await service.engine.failed.wait()
        server.begin_exit()
        service.end_all()

    def _announce(self, llm: LLM) -> None:
        # The model's objects stay: if not frozen, they make full collections hold up requests for a tenth of a second.
        gc.collect()
        gc.freeze()
        # Large objects are those of running requests and are freed with them: full collections would find nothing.
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _OLD_GENERATION)
        _log.info("ready: %s at %s", self._settings.model_name, self._address)
        own = llm.sampling_defaults
        _log.info("sampling where a request does not say: %s (%s)", own, own.source)
        notify("READY=1", f"STATUS=serving {self._settings.model_name} at {self._address}")

    def _config(self, service: Service) -> uvicorn.Config:
        return uvicorn.Config(
            make_app(service),
            http=self._protocol(Connections(connection_limit())),  # type: ignore[arg-type]
            backlog=BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=ceil(self._settings.grace) + _LAST_WORDS_S,
        )

    def _protocol(self, connections: Connections) -> Callable[..., asyncio.BaseProtocol]:
        """Return the function that makes the protocol of a new connection."""
        http, settings = partial(LimitedHttpProtocol, all_connections=connections), self._settings
        if settings.ssl_certfile is None:
            return http
        return partial(TlsProtocol, http, tls_context(settings.ssl_certfile, settings.ssl_keyfile), connections)


class _Server(uvicorn.Server):
    """A uvicorn server that does not re-raise the signal that ended it: the process has an exit code of its own."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service
        self._exit = asyncio.Event()
        self.signal_number = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_WAITING_CONNECTIONS)  # the event loop has set it to BACKLOG, its accepts in one turn

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit and self.server_state.tasks:  # uvicorn does not wait for the errors that end these
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S)

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn's own loop wakes up ten times a second to look."""
        while not await self.on_tick(0):
            notify("WATCHDOG=1")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exit.wait(), _TICK_S)

    def begin_exit(self) -> None:
        """Take no more requests, and let those there go on for `grace` seconds."""
        if not self.should_exit:
            asyncio.get_running_loop().call_later(self._service.settings.grace, self._service.end_all)
        notify("STOPPING=1", "STATUS=waiting for the requests that run")
        self._service.engine.drain()
        self.should_exit = True
        self._exit.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM; the second SIGINT ends at once."""
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
        except (ValueError, RuntimeError):  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            self._service.end_all()
        self.signal_number = sig
        self.begin_exit()
