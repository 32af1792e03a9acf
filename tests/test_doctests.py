"""The examples in docstrings, run module by module."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import cedar

# importing these needs what is not everywhere: a GPU's compiler, or a module that runs when imported
ELSEWHERE = ("cedar.kernels.triton",)
MODULES = [
    info.name
    for info in pkgutil.walk_packages(cedar.__path__, "cedar.", onerror=lambda name: None)
    if not info.name.startswith(ELSEWHERE)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 10
