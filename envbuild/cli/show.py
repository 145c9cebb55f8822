"""Tables in words."""


def table(rows: list[tuple[str, ...]], indent: str = "  ") -> str:
    """Return `rows` as aligned columns."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
