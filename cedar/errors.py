"""The errors a user of cedar can cause, and nothing else.

Each message says what came, what was expected and what to do. What only cedar itself can get
wrong is an `assert`, not one of these.
"""


class CedarError(Exception):
    """Anything cedar refuses to do for a reason it can name."""


class ConfigError(CedarError):
    """A config key is unknown, missing, or its value breaks a rule of the architecture."""


class ShapeError(CedarError):
    """A tensor has another shape, dtype or layout than the operation needs."""


class FormatError(CedarError):
    """A file is not what its name or index says: truncated, wrong type, missing or extra tensor."""


class CapacityError(CedarError):
    """Something does not fit: memory, cache pages, disk, context length."""


class RequestError(CedarError):
    """A request asks for something impossible.

    Attributes:
        param: The field of the request that is wrong, or None.
        code: OpenAI's machine-readable code, for example `context_length_exceeded`.
        status: The HTTP status that tells it, 400 unless said otherwise.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class KernelUnavailable(CedarError):
    """A forced kernel backend cannot run here; the message says why."""
