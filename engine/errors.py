"""The engine's errors, and how each reaches a client.

    TrunklineError                     what, with which value, and what to do
    ├── StartError                     the server can't start (exit code 2, no traceback)
    │   ├── ConfigError                an option's value
    │   ├── ModelError                 a model that is not there, cut short, or of an unknown architecture
    │   └── ResourceError              no room for the pool, a port in use
    ├── RequestError            400    a client's mistake; `code` and `param` as OpenAI names them
    │   ├── ContextLengthError  400    context_length_exceeded, both numbers in the message
    │   ├── AuthError           401
    │   ├── UnknownModelError   404
    │   ├── BodyTimeoutError    408
    │   ├── BodyTooLargeError   413
    │   └── UnprocessableError  422    a template that raises, or loops
    └── EngineError             500    ours
        ├── LoadingError        503    the core is starting, or starting again
        └── OverloadedError     429    with Retry-After

Rooms below (`radix`, `tiers`) raise their own few; what escapes them is an EngineError to a client.
"""

from __future__ import annotations


class TrunklineError(Exception):
    """Root of all errors that are meant to be read by a person."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class StartError(TrunklineError):
    """The server can't start; the CLI prints the message and exits with 2."""


class ConfigError(StartError):
    """An option's value can't be used."""


class ModelError(StartError):
    """A model is missing, broken or unknown."""


class ResourceError(StartError):
    """The machine has not got what was asked for."""


class RequestError(TrunklineError):
    """A client's mistake: the request is refused and the server lives."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(RequestError):
    """Prompt, or prompt + max_tokens, is longer than the context or the pool."""

    code = "context_length_exceeded"


class AuthError(RequestError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class UnknownModelError(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class BodyTimeoutError(RequestError):
    """The body does not come."""

    status = 408
    code = "request_timeout"


class BodyTooLargeError(RequestError):
    """The body is over the limit."""

    status = 413
    code = "request_too_large"


class UnprocessableError(RequestError):
    """The request is well-formed, and its template or content can't be rendered."""

    status = 422


class EngineError(TrunklineError):
    """Our fault."""


class LoadingError(EngineError):
    """The core is starting."""

    status = 503
    type = "service_unavailable"
    code = "loading"


class OverloadedError(EngineError):
    """The queue is full; try again later."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after_s = 1
