"""Errors in the shape of the OpenAI API: `{"error": {message, type, param, code}}` with a status."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cpmrt.errors import (
    BusyError,
    CheckpointError,
    ClosedError,
    ContextLengthError,
    CpmrtError,
    DeviceError,
    FormError,
    MaskError,
    NoDeviceError,
    RequestError,
)
from cpmrt.server.client_words import API_NAMES, message_for_clients

_TYPES = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}
_FIELD = re.compile(r"[a-z_]+(\[\d+\])?(\.[a-z_]+(\[\d+\])?)*")


class ApiError(Exception):
    """An error for the client. `param` names the field of the request, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error with the client's name of the field: `names` maps patterns of our names to the client's."""
        for ours, theirs in names.items():
            found = re.match(rf"{ours}(?!\w)", self.param or "")
            if found is not None:
                name, message = found.expand(theirs), self.message
                if message.startswith(found[0]):
                    message = name + message[found.end() :]
                param = name + found.string[found.end() :]
                return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)
        return self


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Raise errors from inside the `with` block with the client's names of fields; see `ApiError.renamed`."""
    try:
        yield
    except (ApiError, RequestError) as error:
        raise as_api_error(error).renamed(names) from None


def invalid(param: str, problem: str) -> ApiError:
    """Return a 400 that names the field."""
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


def unsupported(param: str, problem: str) -> ApiError:
    """Return a 400 for a field that is known and not supported."""
    return ApiError(400, f"{param} is not supported: {problem}", param=param, code="unsupported_parameter")


def overloaded(num_open: int, what: str = "sequences") -> ApiError:
    """Return a 429: the queue is full; `what` runs or waits."""
    message = f"the queue is full ({num_open} {what} run or wait); try again later"
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})


def unavailable(reason: str) -> ApiError:
    """Return a 503: no request can be taken now."""
    return ApiError(503, reason, code="unavailable", headers={"Retry-After": "5"})


def shutting_down() -> ApiError:
    """Return a 503: the server ends."""
    return unavailable("the server is shutting down")


def as_api_error(error: BaseException) -> ApiError:
    """Return any error with the status that says where the fault lies: request (400), device (503), program (500)."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, message_for_clients(error), param=_field_of(error.what), code="context_length_exceeded")
    if isinstance(error, BusyError):
        return ApiError(429, message_for_clients(error), code="forms_busy", headers={"Retry-After": "5"})
    if isinstance(error, RequestError):
        return ApiError(400, message_for_clients(error), param=_field_of(error.what), code="invalid_value")
    if isinstance(error, MaskError):
        return ApiError(500, str(error), code="mask_failed")
    if isinstance(error, FormError):
        return ApiError(400, str(error), code="form_failed")
    if isinstance(error, CheckpointError):
        message = "the chat template does with these messages what no template may; see the server's log"
        return ApiError(400, message, code="template_refused")
    if isinstance(error, (DeviceError, NoDeviceError)):
        return ApiError(503, str(error), code="device_failed")
    if isinstance(error, ClosedError):
        return shutting_down()
    if isinstance(error, CpmrtError):
        return ApiError(500, str(error), code="internal_error")
    return ApiError(500, f"internal error ({type(error).__name__}); see the server's log", code="internal_error")


def _field_of(what: str) -> str | None:
    """Find the field in a RequestError's "SamplingParams.top_p ...", "prompt: token 3" or "messages[0].role"."""
    first, is_more = what.split(" ", 1)[0], " " in what
    name = first.removeprefix("SamplingParams.").removesuffix(":")
    if not _FIELD.fullmatch(name) or (is_more and name == first):
        return None
    return API_NAMES.get(name, name)
