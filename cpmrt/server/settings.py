"""What `cpmrt serve` is told on its command line, beyond the model's own options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """`port` 0 takes a free one. `max_body` in bytes, None: 16 for each token of the context, at least 1 MiB.

    `grace` in seconds: how long requests may go on after SIGTERM. `log_prompts` writes prompts into the log.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_queue: int = 64
    max_body: int | None = None
    grace: float = 30.0
    log_prompts: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can connect."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def body_limit(self, max_context: int) -> int:
        """Most bytes of a request's body."""
        return self.max_body if self.max_body is not None else max(2**20, 16 * max_context)
