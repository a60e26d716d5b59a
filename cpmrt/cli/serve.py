"""Serve a model over HTTP: an OpenAI-compatible API under /v1 and, at /, a chat page.

SIGTERM and Ctrl-C take no more requests and let those that run finish, for --grace seconds; a second Ctrl-C does not
wait. Needs the packages of the extra `server`; `cpmrt doctor` says whether they are here.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cpmrt import LLM, env
from cpmrt.cli import arguments as options
from cpmrt.cli import option_values
from cpmrt.cli.main import EXIT_INTERRUPTED
from cpmrt.cli.output import complain, note
from cpmrt.cli.parser import UsageError
from cpmrt.errors import ConfigError
from cpmrt.installation import check_extra

if TYPE_CHECKING:
    from cpmrt.server.service import ServerSettings

_PORT = option_values.integer(0, 2**16 - 1, "a port, 0 to 65535")
_ORIGIN = re.compile(
    r"\*|null|https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?|(?!https?:)[a-z][a-z0-9+.-]*://[^/?#@,\s]*"
)
_HOST = re.compile(r"[A-Za-z0-9._-]+|(?=.*:.*:)([0-9A-Fa-f:.]+|\[[0-9A-Fa-f:.]+\])")
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")
_COUNT = option_values.integer(0, 2**20 - 1, "a number of sequences")


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model_source(parser, positional=True)
    add = parser.add_argument_group("server").add_argument
    add("--host", type=_name, default="127.0.0.1", metavar="ADDR", help="where to listen (default: %(default)s)")
    add("--port", type=_PORT, default=8000, metavar="N", help="0: a free one (default: %(default)s)")
    add(
        "--api-key", action="append", default=[], metavar="KEY",
        help="what clients must send; may be repeated (default: $CPMRT_API_KEY, else none)",
    )  # fmt: skip
    add("--api-key-file", type=Path, metavar="FILE", help="more keys, one on each line")
    add(
        "--allowed-host", action="append", type=_host, default=[], metavar="NAME",
        help="a name in the Host header of requests, as proxies send it; may be repeated (default: only loopback ones "
        "where nobody else can connect and there is no key, else any)",
    )  # fmt: skip
    add(
        "--cors-origin", action="append", type=_origin, default=[], metavar="ORIGIN",
        help="an origin such as https://example.org whose pages may use the API from a browser, or *; may be repeated "
        "(default: none)",
    )  # fmt: skip
    add("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate and its chain (PEM)")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, if that is in a file of its own")
    add(
        "--served-model-name", action="append", type=_name, default=[], metavar="NAME",
        help="what clients call the model; more names may follow with the option repeated (default: its own)",
    )  # fmt: skip
    add("--max-queue", type=_COUNT, default=64, metavar="N", help="sequences that may wait (default: %(default)s)")
    add(
        "--max-body", type=option_values.memory_size, metavar="SIZE",
        help="of a request (default: by the context, at least 1MiB)",
    )  # fmt: skip
    add("--grace", type=_seconds, default=30.0, metavar="S", help="for running requests at the end (default: 30)")
    add("--log-prompts", action="store_true", help="write the prompts into the log, 16 KiB of each")
    model = parser.add_argument_group("model")
    options.add_engine_options(model, *options.MODEL_FIELDS, "prefill_chunk", "max_sequences", "prefix_dir")
    options.add_options(model, "--hf-overrides", "--sparse", "--prefix-cache", "--no-prefix-cache")
    options.add_draft_options(parser)
    parser.set_defaults(max_sequences=8)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it: 0 after SIGTERM, 130 after Ctrl-C. Raises DeviceError if the device is lost."""
    check_extra("server", "cpmrt serve needs")
    from cpmrt.server.run import address_of, bind, serve

    if args.quiet and args.log_prompts:
        raise UsageError("--log-prompts writes lines of the log that --quiet leaves out: give one of them")
    settings = _settings(args)
    if not settings.is_loopback and not settings.api_keys:
        complain(f"cpmrt: warning: {settings.host} can be reached from other machines and there is no --api-key")
    listener = bind(settings)
    note(f"cpmrt: listening on {address_of(listener, settings)}; loading {settings.model_name}")
    with _log_to_stderr(is_quiet=args.quiet):
        ending = serve(settings, lambda: _open(args), listener)
    code = EXIT_INTERRUPTED if ending.signal_number == signal.SIGINT else 0
    if not ending.is_complete:
        os._exit(code)  # a thread still loads a model, or waits for a dead device: only this ends it
    return code


def _open(args: argparse.Namespace) -> LLM:
    """Open the model. A template that cannot be compiled ends the command now, and not the first chat."""
    llm = LLM(**options.llm_arguments(args))
    try:
        if llm.chat_template is not None:
            llm.chat_template.check()
    except BaseException:
        llm.close()
        raise
    return llm


def _settings(args: argparse.Namespace) -> ServerSettings:
    from cpmrt.server.access import tls_context
    from cpmrt.server.service import ServerSettings

    if args.ssl_certfile:
        tls_context(args.ssl_certfile, args.ssl_keyfile)
    elif args.ssl_keyfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")
    model_name, *aliases = args.served_model_name or [_name_of(args.model)]
    return ServerSettings(
        model_name=model_name,
        aliases=tuple(aliases),
        host=args.host,
        port=args.port,
        api_keys=_api_keys(args),
        cors_origins=tuple(args.cors_origin),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        max_queue=args.max_queue,
        max_body=args.max_body,
        grace=args.grace,
        log_prompts=args.log_prompts,
        allowed_hosts=tuple(args.allowed_host),
    )


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of --api-key and --api-key-file, else that of CPMRT_API_KEY. Raises ConfigError."""
    from cpmrt.server.access import check_key, read_keys

    for key in args.api_key:
        check_key(key, "--api-key")
    keys = (*args.api_key, *(read_keys(args.api_key_file) if args.api_key_file else ()))
    if not keys and (own := env.api_key()):
        check_key(own, "CPMRT_API_KEY")
        keys = (own,)
    return keys


def _name_of(model: str | None) -> str:
    """Return the name to serve a model under: a hub id as it is, the last part of the path of a folder or a file."""
    if model is None:
        return "cpmrt-demo"
    path = Path(model)
    return path.resolve().name if path.exists() else model


@contextlib.contextmanager
def _log_to_stderr(*, is_quiet: bool) -> Iterator[None]:
    """Write the server's log to standard error; with --quiet only warnings and errors."""
    from cpmrt.server.log import LogWriter

    handler = LogWriter(sys.stderr.fileno())
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    own = logging.WARNING if is_quiet else logging.INFO
    levels = {"cpmrt": logging.WARNING, "cpmrt.server": own, "uvicorn.error": logging.ERROR}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    try:
        yield
    finally:
        handler.close()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}")
    return seconds


def _name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a name, got {text!r}")
    return text


def _host(text: str) -> str:
    """Parse a host name or address to compare with the Host header of requests, whose port is ignored."""
    if not _HOST.fullmatch(_name(text)):
        raise argparse.ArgumentTypeError(f"expected a name or an address alone, got {text[:100]!r}")
    return text


def _origin(text: str) -> str:
    """Parse an origin exactly as browsers send it in the Origin header, with which it is compared letter by letter."""
    if not _ORIGIN.fullmatch(text) or _DEFAULT_PORT.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected an origin as browsers send it, such as https://example.org (lower case, no path, no default "
            f"port), or *, got {text[:100]!r}"
        )
    return text
