"""What a request can be answered instead of an answer, in OpenAI's shape and in Anthropic's.

Owns the statuses and their words. Never says what a prompt holds.
"""

from __future__ import annotations

import json
from typing import Any

MOST_CHARS = 1000  # of a message: it may quote what was asked
ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"  # whose streams name their events
KINDS = {  # Anthropic's, by status
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """Answered as {"error": {...}} under `status`. retry_after_s: where another try may be answered."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
        param: str | None = None, retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        # Half a surrogate pair, as a client's JSON may have it, has no bytes; and a message is for people.
        message = message.encode(errors="backslashreplace").decode()[:MOST_CHARS]
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }

    def body_at(self, path: str) -> dict[str, Any]:
        """As the API of this path has it."""
        if not path.startswith(ANTHROPIC):
            return self.body
        kind = KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.body["error"]["message"]}}

    def event_at(self, path: str) -> str:
        """As an event of a stream that has begun."""
        body = self.body_at(path)
        if path == RESPONSES:
            body = {"type": "error", **{name: body["error"][name] for name in ("code", "message", "param")}}
        named = "event: error\n" if path in (ANTHROPIC, RESPONSES) else ""
        return f"{named}data: {json.dumps(body)}\n\n"


def unsupported(name: str, detail: str = "", param: str = "") -> ApiError:
    """The error for a parameter that this server does not have, or not so; param: where name says more."""
    told = f"{name} is not supported{detail and ': ' + detail}"
    return ApiError(400, told, param=param or name, code="unsupported")


def unprocessable(message: str, param: str) -> ApiError:
    """The error for what is well formed, and would be answered by another model."""
    return ApiError(422, message, param=param, code="unprocessable")


def too_long(tokens: int, wanted: int, limit: int, param: str) -> ApiError:
    """The error for a prompt of so many tokens, with so many more wanted, beyond the limit."""
    longest = max(0, limit - wanted)
    return ApiError(
        400,
        f"the prompt has {tokens} tokens and {wanted} more are asked for; this server computes {limit} at "
        f"most: the longest prompt that fits has {longest}",
        code="context_length_exceeded", param=param,
    )  # fmt: skip


def too_large(tokens: int, wanted: int, limit: int, param: str) -> ApiError:
    """The model would take it; the memory that --memory-tokens gives to all requests would not."""
    longest = max(0, limit - wanted)
    return ApiError(
        413, f"the prompt has {tokens} tokens and {wanted} more are asked for; this server has memory for the"
        f" KV of {limit}: the longest prompt that fits has {longest}",
        code="context_length_exceeded", param=param,
    )  # fmt: skip
