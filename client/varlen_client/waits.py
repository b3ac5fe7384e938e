"""Waits for asyncio tasks: with a timeout, or until the first error.

No task is left running: unfinished tasks are cancelled and awaited.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from typing import TypeVar

_T = TypeVar("_T")


async def with_timeout(coroutine: Coroutine[object, object, _T], timeout: float | None) -> _T:
    """Return the coroutine's result; after `timeout` seconds, cancel it and raise TimeoutError.

    Not asyncio.wait_for: before Python 3.12 it can lose a cancellation that arrives as the inner
    task ends.
    """
    if sys.version_info >= (3, 11):
        # a task of its own would take as long as a small request to encode
        async with asyncio.timeout(timeout):
            return await coroutine
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if task.done():
            return task.result()
    finally:
        await cancel_all([task])
    raise TimeoutError


async def all_or_first_error(tasks: Sequence[asyncio.Future[_T]]) -> None:
    """Wait for all tasks; when one fails, cancel the others and raise its error."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_all(tasks)
    # all of them are read: asyncio logs an error that nothing reads
    errors = [task.exception() for task in tasks if not task.cancelled()]
    for error in errors:
        if error is not None:
            raise error


async def cancel_all(tasks: Sequence[asyncio.Future[_T]]) -> None:
    """Cancel the tasks that still run, and wait until they end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
