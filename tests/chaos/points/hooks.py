"""Wraps functions of a module when it has just been imported, before anybody else can have taken their names."""

import functools
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from chaos.board import Board, Head
from chaos.points.checks import CHECKED, checking
from chaos.points.marks import MARKS, Mark, When
from chaos.points.stores import Stores

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def install(board_path: str) -> None:
    """Wraps every marked function, and those after which a pool's invariants are checked."""
    board = Board(board_path)
    wraps: dict[str, list[tuple[str, Wrap]]] = {}
    for number, mark in enumerate(MARKS.values(), start=1):
        wraps.setdefault(mark.module, []).append((mark.function, functools.partial(_marking, board, number, mark)))
    for checked in CHECKED:
        wraps.setdefault(checked.module, []).append((checked.function, functools.partial(checking, board, checked)))
    sys.meta_path.insert(0, _Wrapper(wraps))


class _Wrapper(importlib.machinery.PathFinder):
    """Finds modules as usual and changes some of them after they were run."""

    def __init__(self, wraps: dict[str, list[tuple[str, Wrap]]]) -> None:
        self._wraps = wraps

    def find_spec(  # type: ignore[override] # an instance, where the base has a class method
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the usual spec, with a loader that wraps, for the modules that are to be changed."""
        if fullname not in self._wraps:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            raise ImportError(f"{fullname} has a marked function and is not there")
        run = spec.loader.exec_module

        def run_and_wrap(module: ModuleType) -> None:
            run(module)
            for function, wrap in self._wraps[fullname]:
                _replace(module, function, wrap)

        spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _replace(module: ModuleType, path: str, wrap: Wrap) -> None:
    """Puts the wrapped function where the function was: `f` or `Class.f`."""
    owner: Any = module
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    setattr(owner, name, wrap(getattr(owner, name)))


def _marking(board: Board, number: int, mark: Mark, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def marked(*args: Any, **options: Any) -> Any:
        if mark.when is When.BEFORE:
            _pass(board, number)
        result = function(*args, **options)
        if mark.when is When.AFTER:
            _pass(board, number)
        for column in mark.columns:
            memory = getattr(args[0], column)
            setattr(args[0], column, Stores(memory, functools.partial(_pass, board, number)))
        return result

    return marked


def _pass(board: Board, number: int) -> None:
    if board.head(Head.ARMED) != number:
        return
    if passes := board.head(Head.PASSES):
        board.set_head(Head.PASSES, passes - 1)
        return
    board.set_head(Head.ARMED, 0)
    board.set_head(Head.FIRED, board.head(Head.FIRED) + 1)
    os.kill(os.getpid(), signal.SIGKILL)
