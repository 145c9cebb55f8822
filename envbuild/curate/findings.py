"""What the checks of the matrix find."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class MatrixFinding:
    """One thing found: `error` is wrong, `warning` probably is, `note` is for whoever tends the data."""

    level: Level
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.text}"
