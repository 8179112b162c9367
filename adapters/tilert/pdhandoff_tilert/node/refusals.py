"""Why a request gets no tokens, or no more of them: one type, made into HTTP errors and error events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, final

from pdhandoff.errors import ErrorCode, PdHandoffError, is_retryable

__all__ = ["Refusal", "bad_request", "code_name", "from_error"]

_RETRY_AFTER_S: Final = 1.0

_STATUS: Final[Mapping[int, int]] = {
    ErrorCode.NOT_ANNOUNCED: 404,
    ErrorCode.UNKNOWN_HANDOFF: 404,
    ErrorCode.EXPIRED: 404,
    ErrorCode.DUPLICATE: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.CONFIG: 500,
    ErrorCode.MISUSE: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.BUSY: 503,
    ErrorCode.QUEUE_TIMEOUT: 503,
    ErrorCode.DRAINING: 503,
}
"code that a handoff ended with -> HTTP status; any other code is the producer's fault, or the way's: 502"

_KNOWN: Final = frozenset(map(int, ErrorCode))

_TYPES: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    410: "GoneError",
    413: "RequestTooLargeError",
    429: "TooManyRequestsError",
    500: "InternalServerError",
    502: "HandoffFailedError",
    503: "ServiceUnavailableError",
    504: "DeadlineExceededError",
}


@final
class Refusal(Exception):
    """A request is refused, or ends without success.

    Attributes:
        status: HTTP status, 400 to 599.
        reason: one sentence that names the culprit and says what to do.
        code: name of an `ErrorCode`, or another word of this node's.
        param: the field of the request that is to blame.
        retryable: whether the same request may succeed with a new handoff, here or on another node.
        retry_after_s: seconds after which to try again here; 0: no advice.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        code: str,
        param: str | None = None,
        retryable: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.code = code
        self.param = param
        self.retryable = retryable
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that go with it."""
        return {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s > 0 else {}

    def body(self) -> dict[str, object]:
        """As vLLM's ErrorResponse, with the typed code beside it."""
        return {
            "error": {
                "message": self.reason,
                "type": _TYPES.get(self.status, "Error"),
                "param": self.param,
                "code": self.status,
                "pdhandoff": {"code": self.code, "retryable": self.retryable},
            }
        }


def bad_request(param: str, reason: str) -> Refusal:
    """The request itself is wrong: 400."""
    return Refusal(400, reason, code="BAD_REQUEST", param=param)


def from_error(error: PdHandoffError) -> Refusal:
    """What a failed handoff, or an engine that broke, is answered with."""
    code = error.code
    return Refusal(
        _STATUS.get(code, 502),
        error.reason,
        code=code_name(code),
        retryable=is_retryable(code),
        retry_after_s=_RETRY_AFTER_S if code in {ErrorCode.BUSY, ErrorCode.QUEUE_TIMEOUT, ErrorCode.DRAINING} else 0.0,
    )


def code_name(code: int) -> str:
    """The name of an `ErrorCode`; a newer peer's code is shown as its number."""
    return ErrorCode(code).name if code in _KNOWN else f"CODE_{code}"
