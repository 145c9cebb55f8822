"""What one request may send and take, and what a host answers to it before the body."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much an answer may be and how long it may take."""

    size: int
    """Bytes of a body."""
    connect_s: float = 20.0
    stall_s: float = 60.0
    """Seconds without a byte, and seconds for the whole head of an answer."""
    total_s: float = 300.0
    """Seconds for everything, attempts and pauses included."""
    attempts: int = 5
    pause_s: float = 0.5
    """Seconds before the second attempt; twice as long before each further one."""
    longest_pause_s: float = 30.0
    """What a host may ask for by Retry-After."""


PAGE = Bounds(size=64 << 20)
"""An index page, a METADATA file."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """The body of a request."""

    size: int
    """Bytes."""
    chunks: Callable[[], Iterator[bytes]]
    """Returns the body from its start; called once for each attempt."""
    media_type: str = "application/octet-stream"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a host sent before the body."""

    status: int
    reason: str
    """Fit for a terminal."""
    headers: Mapping[str, str]
    """Names in lower case; a header that came several times is one, with commas. The values are foreign text."""

    @property
    def good(self) -> bool:
        """Whether the body is what was asked for."""
        return 200 <= self.status < 300

    @property
    def content_type(self) -> str:
        """The type without its parameters, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()
