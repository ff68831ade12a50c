"""Order in a child of `os.fork`, where only the thread that forked runs on, whatever the others were doing.

State that all threads of the process share is changed under `LOCK`, which the thread that forks holds meanwhile: the
child then finds it whole, and the lock free. What holds for the parent's threads alone is put right by `in_child`.
Dictionaries of what was compiled or checked need neither: each change of theirs is one step.
"""

import os
from _thread import RLock  # threading, which has the same, is slow to import
from collections.abc import Callable

# A signal handler may fork while its own thread holds it.
LOCK = RLock()
_actions: list[Callable[[], None]] = []


def in_child(action: Callable[[], None]) -> None:
    """Let every child that is forked from now on begin with `action`."""
    _actions.append(action)


def _begin_child() -> None:
    try:
        for action in _actions:
            action()
    finally:
        LOCK.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_begin_child)
