"""Which of OpenMP's variables is said to bind threads: what GNU's OpenMP itself makes of them."""

from __future__ import annotations

import pytest

from autosched.config import openmp_binding


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"OMP_PROC_BIND": "close"}, "OMP_PROC_BIND=close"),
        ({"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}, "OMP_PROC_BIND=true"),
        ({"OMP_PLACES": "cores"}, "OMP_PLACES=cores"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY=0-3"),
        ({"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"}, ""),
    ],
)
def test_the_variable_that_binds_is_named(variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert openmp_binding() == said
