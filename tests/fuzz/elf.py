"""A small ELF library, written field by field: a real input for the reader of binaries, and hostile ones."""

import struct

MAGIC = 0xBA55ED50
_ALIGN = 16


def fatbin(*entries: tuple[int, int, int], magic: int = MAGIC, length: int | None = None) -> bytes:
    """Return a container of GPU code; an entry is its kind (1: PTX, 2: cubin), its SM number, its flags."""
    body = b"".join(
        struct.pack("<HHIQ12xI8xQ16x", kind, 0x101, 64, 8, sm, flags) + b"contents" for kind, sm, flags in entries
    )
    return struct.pack("<IHHQ", magic, 1, 16, len(body) if length is None else length) + body


class Strings:
    """A table of strings."""

    def __init__(self) -> None:
        self.body = b"\0"

    def add(self, text: str) -> int:
        """Return where `text` lies; it is added at the end."""
        place = len(self.body)
        self.body += text.encode() + b"\0"
        return place


def library(
    *,
    needed: tuple[str, ...] = ("libc.so.6",),
    soname: str = "libone.so.1",
    runpath: str = "$ORIGIN/lib",
    wanted: tuple[str, ...] = ("puts",),
    offered: tuple[str, ...] = ("PyInit_one",),
    gpu: bytes = b"",
    rodata: bytes = b"\0libcudnn_ops.so.9\0",
    changes: dict[str, int] | None = None,
) -> bytes:
    """Return a library of x86-64.

    Args:
        needed: what it needs; the first gets a version, GLIBC_2.34.
        soname: its own name.
        runpath: where it searches.
        wanted: symbols that it does not define; each has that version.
        offered: symbols that it defines, with the version ONE_1.
        gpu: the content of `.nv_fatbin`.
        rodata: the content of `.rodata`.
        changes: fields that get another value: e_phnum, e_shnum, e_shoff, e_shstrndx, dynsym_size, dynsym_offset,
            dynsym_link, strtab_size, verneed_count, verneed_next, aux_next, verdef_next, strsz, gpu_size, dynamic_size.

    """
    changes = changes or {}
    text = Strings()
    symbols = b"\0" * 24
    versions = b"\0\0"
    for name in wanted:
        symbols += struct.pack("<IBBHQQ", text.add(name), 0x12, 0, 0, 0, 0)
        versions += struct.pack("<H", 2)
    for name in offered:
        symbols += struct.pack("<IBBHQQ", text.add(name), 0x12, 0, 5, 0x1000, 4)
        versions += struct.pack("<H", 3)
    libraries = [text.add(name) for name in needed]
    need = b""
    if needed:
        count, step = changes.get("verneed_count", 1), changes.get("verneed_next", 0)
        need = struct.pack("<HHIII", 1, count, libraries[0], 16, step)
        need += struct.pack("<IHHII", 0, 0, 2, text.add("GLIBC_2.34"), changes.get("aux_next", 0))
    step = changes.get("verdef_next", 28)
    define = struct.pack("<HHHHIII", 1, 1, 1, 1, 0, 20, step) + struct.pack("<II", text.add(soname), 0)
    define += struct.pack("<HHHHIII", 1, 0, 3, 1, 0, 20, 0) + struct.pack("<II", text.add("ONE_1"), 0)
    tags = [(1, place) for place in libraries] + [(14, text.add(soname)), (29, text.add(runpath))]
    names = Strings()
    parts: list[tuple[str, int, bytes, int, int]] = [  # name, type, content, link, size of an entry
        (".dynstr", 3, text.body, 0, 0),
        (".dynsym", 11, symbols, 1, 24),
        (".gnu.version", 0x6FFFFFFF, versions, 2, 2),
        (".gnu.version_r", 0x6FFFFFFE if need else 1, need, 1, 0),
        (".gnu.version_d", 0x6FFFFFFD, define, 1, 0),
        (".rodata", 1, rodata, 0, 0),
        (".nv_fatbin", 1, gpu, 0, 0),
        (".dynamic", 6, b"\0" * 16 * (len(tags) + 3), 1, 16),
    ]
    offsets, place = {}, 64 + 2 * 56
    for name, _, body, _, _ in parts:
        place += -place % _ALIGN
        offsets[name] = place
        place += len(body)
    tags += [(5, offsets[".dynstr"]), (10, changes.get("strsz", len(text.body))), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    out = bytearray(64 + 2 * 56)
    headers = b"\0" * 64
    for name, kind, body, table, entry in parts:
        out += b"\0" * (offsets[name] - len(out))
        out += dynamic if name == ".dynamic" else body
        offset, size, link = offsets[name], len(body), table
        if name == ".dynsym":
            size, offset = changes.get("dynsym_size", size), changes.get("dynsym_offset", offset)
            link = changes.get("dynsym_link", table)
        if name == ".dynstr":
            size = changes.get("strtab_size", size)
        if name == ".nv_fatbin":
            size = changes.get("gpu_size", size)
        headers += struct.pack("<IIQQQQIIQQ", names.add(name), kind, 2, offset, offset, size, link, 0, 1, entry)
    own = names.add(".shstrtab")
    headers += struct.pack("<IIQQQQIIQQ", own, 3, 0, 0, len(out), len(names.body), 0, 0, 1, 0)
    out += names.body
    section = changes.get("e_shoff", len(out))
    out += headers
    size = changes.get("dynamic_size", len(dynamic))
    out[64:120] = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, len(out), len(out), 4096)
    out[120:176] = struct.pack("<IIQQQQQQ", 2, 6, offsets[".dynamic"], offsets[".dynamic"], 0, size, size, 8)
    count = len(parts) + 2
    out[:64] = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, section, 0, 64, 56, changes.get("e_phnum", 2), 64,
        changes.get("e_shnum", count), changes.get("e_shstrndx", count - 1),
    )  # fmt: skip
    return bytes(out)
