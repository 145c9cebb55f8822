"""JSON of another host: values of the stated types out, ValueError for everything else."""

import json
from typing import Any


def read_json(body: bytes) -> Any:
    """Return the value that `body` states.

    Raises:
        ValueError: it is no JSON, or JSON that no honest host sends: nested without end, a number of 5000 digits.

    """
    try:
        return json.loads(body)
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except ValueError:
        raise ValueError("it holds a number that is too long") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`.

    Raises:
        ValueError: as `read_json`, or it is another value.

    """
    value = read_json(body)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - the value is wrong, not its use
    return value


def table(value: Any) -> dict[str, Any]:
    """Return `value` when it is an object, else an empty one: for a part that may be absent."""
    return value if isinstance(value, dict) else {}
