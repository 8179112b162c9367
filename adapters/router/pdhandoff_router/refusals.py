"""Why a request gets no answer, or no more of it: one type, said in OpenAI's or in Anthropic's words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, final

import msgspec

__all__ = ["Refusal", "bad_request", "from_answer"]

_RETRY_AFTER: Final = frozenset({429, 503})
_MOST_REASON: Final = 2048

_OPENAI: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_ANTHROPIC: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@final
class Refusal(Exception):
    """A request is refused, or ends without success.

    Attributes:
        status: HTTP status, 400 to 599.
        reason: one sentence that names the culprit and says what to do.
        code: a word for programs, such as EXPIRED or QUEUE_FULL.
        param: the field of the request that is to blame.
        retryable: whether the same request may succeed as a new handoff.
        unsupported: whether a native engine could do what was asked.
        retry_after_s: seconds after which to try again; 0: no advice.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        code: str,
        param: str | None = None,
        retryable: bool = False,
        unsupported: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason[:_MOST_REASON]
        self.code = code
        self.param = param
        self.retryable = retryable
        self.unsupported = unsupported
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that go with it."""
        seconds = self.retry_after_s or (1.0 if self.status in _RETRY_AFTER else 0.0)
        return {"retry-after": str(math.ceil(seconds))} if seconds > 0 else {}

    def openai(self) -> dict[str, Any]:
        """As OpenAI's API and vLLM say it, with the router's code beside."""
        return {
            "error": {
                "message": self.reason,
                "type": _OPENAI.get(self.status, "Error"),
                "param": self.param,
                "code": self.status,
                "pdhandoff": {"code": self.code, "retryable": self.retryable},
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """As Anthropic's API says it."""
        kind = _ANTHROPIC.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.reason}}


def bad_request(param: str | None, reason: str, *, unsupported: bool = False) -> Refusal:
    """The request itself is wrong, or asks for what two legs cannot do: 400."""
    return Refusal(400, reason, code="BAD_REQUEST", param=param, unsupported=unsupported)


def from_answer(status: int, body: bytes, *, who: str, retry_after: str | None = None) -> Refusal:
    """What another server refused, in this router's type.

    Args:
        status: HTTP status that it answered with.
        body: JSON of an error in OpenAI's shape, or anything.
        who: names the server, where its own words do not say enough.
        retry_after: its header.
    """
    error = _error_of(body)
    message, param = error.get("message"), error.get("param")
    own = error.get("pdhandoff")
    typed = own if isinstance(own, dict) else {}
    code = typed.get("code")
    wait = float(retry_after) if retry_after is not None and retry_after.isascii() and retry_after.isdigit() else 0.0
    return Refusal(
        status if 400 <= status < 600 else 502,
        message if isinstance(message, str) and message else f"{who} answered with status {status}",
        code=code if isinstance(code, str) else f"HTTP_{status}",
        param=param if isinstance(param, str) else None,
        retryable=typed.get("retryable") is True or status in _RETRY_AFTER,
        retry_after_s=min(wait, 3600.0),
    )


def _error_of(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    return error if isinstance(error, dict) else {}
