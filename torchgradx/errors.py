"""What torchgradx raises beyond the built-in exceptions."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CoverageError", "VerificationError"]


class CoverageError(RuntimeError):
    """Some parameters' gradients are not accounted for sample by sample.

    ``parameters`` holds their names, as in ``model.named_parameters()``; the text says what to do.
    """

    parameters: tuple[str, ...]

    def __init__(self, message: str, parameters: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.parameters = tuple(parameters)

    # BaseException pickles self.args alone, and a data-parallel worker's error has to arrive whole
    def __reduce__(self) -> tuple[type[CoverageError], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.parameters)


class VerificationError(AssertionError):
    """The norms differ from those of a loop over single samples, or were refused."""
