"""A summary of ages in constant memory: a histogram in powers of two from a millisecond up."""

from __future__ import annotations

from typing import TypedDict

_UNIT_S = 0.001
_BUCKETS = 40  # 2**39 ms are 17 years


class AgeSummary(TypedDict):
    """Seconds. Percentiles are the upper edge of their bucket, so right within a factor of two."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    max_s: float


class Ages:
    """Ages in seconds, added one by one."""

    __slots__ = ("_buckets", "_count", "_max", "_sum")

    def __init__(self) -> None:
        self._buckets = [0] * _BUCKETS
        self._count = 0
        self._sum = 0.0
        self._max = 0.0

    def add(self, age: float) -> None:
        age = max(age, 0.0)
        self._buckets[min(int(age / _UNIT_S).bit_length(), _BUCKETS - 1)] += 1
        self._count += 1
        self._sum += age
        self._max = max(self._max, age)

    def summary(self) -> AgeSummary:
        mean = self._sum / self._count if self._count else 0.0
        return {
            "count": self._count,
            "mean_s": mean,
            "p50_s": self._percentile(0.5),
            "p90_s": self._percentile(0.9),
            "max_s": self._max,
        }

    def _percentile(self, share: float) -> float:
        seen = 0
        for power, n in enumerate(self._buckets):
            seen += n
            if n and seen >= share * self._count:
                return min(float(_UNIT_S * 2**power), self._max)
        return 0.0
