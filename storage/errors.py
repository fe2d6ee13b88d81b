"""The error family: a failure a user can meet has a stable `code`, a message, and says whether trying again can help.

A message names the thing, the value, the bound and the way out.
"""


class PromptmillError(Exception):
    """A failure with a stable code.

    code: snake_case, stored with the attempt and shown to the user; never reworded.
    retryable: the same request may succeed later, or on another worker.
    """

    def __init__(self, message: str, *, code: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retryable = retryable

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.retryable))


def _rebuild(kind: type[PromptmillError], message: str, code: str, retryable: bool) -> PromptmillError:
    """Undo pickling without running a subclass's own constructor."""
    error = kind.__new__(kind)
    PromptmillError.__init__(error, message, code=code, retryable=retryable)
    return error


class InvalidRequest(PromptmillError):
    """One line or request is not acceptable; it fails alone, its neighbours run.

    param: the field at fault, as a path such as `body.max_tokens`, or None.
    """

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class StorageError(PromptmillError):
    """The database refused or could not be reached."""


class SettingsError(PromptmillError):
    """A setting is unknown or has a wrong value."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_setting")
