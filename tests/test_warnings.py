"""Which warnings fail a test: all but those of a dependency about something in it that is out of date."""

from __future__ import annotations

import warnings

import pytest

_OUT_OF_DATE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
_OTHER = (UserWarning, RuntimeWarning, ResourceWarning, pytest.PytestUnraisableExceptionWarning)


def warn(category: type[Warning], module: str, message: str = "in a later release this will be gone") -> None:
    warnings.warn_explicit(message, category, module.replace(".", "/") + ".py", 1, module=module)


@pytest.mark.parametrize("category", _OUT_OF_DATE)
@pytest.mark.parametrize("module", ["autosched", "autosched.search.problem", "tests.core.test_graph", "experiments.suite"])
def test_what_points_at_a_line_of_ours_fails(module: str, category: type[Warning]) -> None:
    with pytest.raises(category):
        warn(category, module)


@pytest.mark.parametrize("category", [*_OUT_OF_DATE, SyntaxWarning])
@pytest.mark.parametrize("module", ["pandas.core.frame", "autoscheduler.parts", "multiprocessing.context"])
def test_what_a_dependency_says_of_itself_is_shown_and_fails_nothing(module: str, category: type[Warning]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warn(category, module)
    assert [item.category for item in said] == [category]


@pytest.mark.parametrize("category", _OTHER)
def test_any_other_warning_of_a_dependency_fails(category: type[Warning]) -> None:
    with pytest.raises(category):
        warn(category, "pandas.core.frame")


def test_a_fork_beside_threads_fails() -> None:
    message = "This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the child."
    with pytest.raises(DeprecationWarning):
        warn(DeprecationWarning, "multiprocessing.popen_fork", message)
