"""A task queue: priorities, dependencies and retries. Lower priority numbers go first."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Task:
    name: str
    priority: int = 10
    needs: set[str] = field(default_factory=set)
    retries: int = 2
    tries: int = 0


class Queue:
    def __init__(self) -> None:
        self.heap: list[tuple[int, str]] = []
        self.tasks: dict[str, Task] = {}
        self.done: set[str] = set()
        self.failed: list[str] = []

    def add(self, name: str, priority: int = 10, needs: Iterable[str] = (), retries: int = 2) -> Task:
        task = Task(name, priority, set(needs), retries)
        self.tasks[name] = task
        heapq.heappush(self.heap, (priority, name))
        return task

    def take(self) -> Task | None:
        """The next task whose needs are done, or None."""
        waiting = []
        chosen = None
        while self.heap:
            entry = heapq.heappop(self.heap)
            task = self.tasks[entry[1]]
            if task.needs <= self.done:
                chosen = task
                break
            waiting.append(entry)
        for entry in waiting:
            heapq.heappush(self.heap, entry)
        if chosen is not None:
            chosen.tries += 1
        return chosen

    def finish(self, name: str) -> None:
        self.done.add(name)

    def fail(self, name: str) -> None:
        """Queue the task again, unless its retries are used up."""
        task = self.tasks[name]
        if task.tries < task.retries:
            heapq.heappush(self.heap, (task.priority, name))
        else:
            self.failed.append(name)

    def __len__(self) -> int:
        return len(self.heap)
