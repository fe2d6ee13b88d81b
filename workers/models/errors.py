"""What can go wrong with a model on disk: the source cannot be read, is not supported, or an artifact is damaged."""

from storage.errors import PromptmillError


class UnsupportedModel(PromptmillError):
    """The source is whole, but holds what this program does not run; the message names it and what is supported."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unsupported_model")


class UnreadableCheckpoint(PromptmillError):
    """The source is missing, cut short or not what its name says."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unreadable_checkpoint")


class ArtifactError(PromptmillError):
    """The artifact is missing, half-written, changed since it was made, or from a newer version."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="artifact_damaged")


class ConversionError(PromptmillError):
    """The artifact could not be written: no space, no permission, something already there, no demo to download."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="conversion_failed")


class VerificationError(PromptmillError):
    """The artifact loads, but its graph does not compute what its weights say."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="verification_failed")
