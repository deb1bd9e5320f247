"""Two small things about async generators: several as one, and one with a tick while it is silent.

Both close what they were given, whichever way they end: a generator that is left open is a request that goes
on in the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all streams as they come; the first exception closes the others and is raised."""
    sources = list(streams)
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    pending = {asyncio.ensure_future(anext(s)): s for s in sources}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        await _close(pending, sources)


async def with_ticks(stream: AsyncGenerator[T, None], every_s: float) -> AsyncGenerator[T | None, None]:
    """The items of `stream`, and None each time that nothing came for `every_s` seconds."""
    task: asyncio.Task[T] | None = None
    try:
        while True:
            if task is None:
                task = asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait((task,), timeout=every_s)
            if not done:
                yield None
                continue
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            task = None
            yield item
    finally:
        await _close([task] if task is not None else [], [stream])


async def _close(tasks: Iterable[asyncio.Task[T]], streams: list[AsyncGenerator[T, None]]) -> None:
    """A generator that is running can't be closed: its task is cancelled first, and has ended."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
