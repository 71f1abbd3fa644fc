"""Exit codes: every error has one, by whose fault it was."""

import pytest

from wcache_async import errors
from wcache_async.cli.outcome import EXIT_CODES, ExitCode, exit_code
from wcache_async.errors import WeightCacheError, known_codes


def test_every_exit_code_is_explained() -> None:
    assert list(EXIT_CODES) == list(ExitCode)


@pytest.mark.parametrize("cls", known_codes().values(), ids=lambda cls: cls.__name__)
def test_an_error_s_exit_code_follows_from_its_class(cls: type[WeightCacheError]) -> None:
    cannot_load = (errors.StateFailed, errors.SourceError, errors.InsufficientMemory, errors.ExportError)
    if issubclass(cls, errors.ConfigMismatch):
        expected = ExitCode.DIFFERENT
    elif issubclass(cls, cannot_load):
        expected = ExitCode.CANNOT_LOAD
    elif issubclass(cls, errors.StaleState):
        expected = ExitCode.DIFFERENT
    elif issubclass(cls, errors.RequestRefused):
        expected = ExitCode.REFUSED
    elif issubclass(cls, errors.DaemonUnavailable):
        expected = ExitCode.NO_DAEMON
    else:
        expected = ExitCode.FAILED
    assert exit_code(cls.__new__(cls)) is expected
