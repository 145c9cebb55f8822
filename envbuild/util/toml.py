"""Reading a TOML file that people write, and saying what is wrong with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from envbuild.errors import DataError
from envbuild.util.bounded import read_text
from envbuild.util.names import FORMS, shown

if TYPE_CHECKING:
    from pydantic import ValidationError


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        DataError: it cannot be read, is no regular file, is larger than a data file may be, is not UTF-8 or is not TOML;
            the message names the line.

    """
    import tomli

    try:
        return tomli.loads(read_text(path))
    except (RecursionError, MemoryError):
        problem = "it is nested too deeply"
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:  # of UTF-8, of TOML, and of a number with thousands of digits
        problem = shown(str(error))
    raise DataError(f"the data file cannot be read: {problem}", where=str(path), hint="correct the file")


def explain_validation(
    error: ValueError,
    path: Path,
    hint: str = "`envbuild matrix schema` prints the schema that an editor can check against",
) -> DataError:
    """Turn the first findings of pydantic's ValidationError into one DataError that names the file and the keys."""
    error = cast("ValidationError", error)
    found = []
    # a misspelt key is two errors, of which this one names it
    errors = error.errors(include_url=False, include_input=False)
    for item in sorted(errors, key=lambda each: each["type"] != "extra_forbidden")[:3]:
        location = ".".join(shown(str(part), 60) for part in item["loc"]) or "(file)"
        if item["type"] == "json_invalid":
            found.append(f"the file is not JSON: {shown(str(item.get('ctx', {}).get('error', '')), 300)}")
            continue
        if item["type"] == "extra_forbidden":
            found.append(f"unknown key {location}")
            continue
        text = FORMS.get(item.get("ctx", {}).get("pattern", ""), item["msg"].removeprefix("Value error, "))
        quotes = "; write it in quotes" if item["type"] == "string_type" else ""
        found.append(f"{location}: {shown(text, 300)}{quotes}")
    more = error.error_count() - len(found)
    return DataError(
        "; ".join(found) + (f"; and {more} more" if more > 0 else ""),
        where=str(path),
        hint=hint,
    )
