"""ELF files and GPU code written by hand: a sound one is read, a hostile one raises and takes no time."""

import io
import struct
import time

import pytest

from envbuild.verify.binaries.elf import ElfError, read_elf
from envbuild.verify.binaries.gpu_code import Code
from envbuild.verify.binaries.symbols import is_torchs, shown_symbol, string_abi
from tests.fuzz.elf import MAGIC, fatbin, library

SPECIFIC, FAMILY = 1 << 20, 1 << 21


def read(body: bytes, name: str = "libcudnn.so.9"):
    return read_elf(io.BytesIO(body), name, len(body))


def test_what_the_loader_asks_of_a_file():
    binary = read(library(gpu=fatbin((2, 80, 0), (1, 90, SPECIFIC))))
    assert (binary.kind, binary.machine, binary.soname) == ("library", "x86-64", "libone.so.1")
    assert binary.needed == ("libc.so.6",)
    assert binary.runpath == ("$ORIGIN/lib",)
    assert binary.wanted == ((b"puts", "GLIBC_2.34"),)
    assert binary.wanted_versions == {"libc.so.6": {"GLIBC_2.34"}}
    assert binary.offered == {b"PyInit_one", b"PyInit_one@ONE_1"}
    assert binary.versions == {"ONE_1"}
    assert binary.opened == {"libcudnn_ops.so.9"}
    assert [str(code) for code in binary.gpu.codes] == ["sm_80", "compute_90a"]
    assert binary.defines(b"PyInit_one", "")
    assert binary.defines(b"PyInit_one", "ONE_1")
    assert not binary.defines(b"PyInit_one", "ONE_2")
    assert read(library(), "one.so").opened == frozenset()  # the constants of NVIDIA's libraries alone are searched


HUGE = 2**63
HOSTILE = {
    "many segments": {"e_phnum": 65534},
    "many sections": {"e_shnum": 65535},
    "sections counted in the first one": {"e_shnum": 0},
    "sections beyond the end": {"e_shoff": HUGE},
    "names in no section": {"e_shstrndx": 40_000},
    "a huge table of symbols": {"dynsym_size": HUGE},
    "a table of symbols beyond the end": {"dynsym_offset": HUGE},
    "symbols with names of no section": {"dynsym_link": 4_000_000_000},
    "a huge table of names": {"strtab_size": 2**40},
    "a version that is its own next one": {"verneed_next": 0xFFFFFFFF},
    "versions without an end": {"verneed_count": 65535, "aux_next": 0xFFFFFFF0},
    "definitions that go on beyond their table": {"verdef_next": 0xFFFFFFFF},
    "names of the loader's table beyond the end": {"strsz": HUGE},
    "a dynamic section beyond the end": {"dynamic_size": 2**40},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_raises_or_is_read_and_takes_no_time(changes):
    begun = time.process_time()
    try:
        read(library(changes=changes))
    except ElfError as error:
        assert len(str(error)) < 300  # noqa: PT017 - reading it is right, too
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("changes", [c for name, c in HOSTILE.items() if "sections counted" not in name])
def test_no_hostile_count_is_taken_for_true(changes):
    with pytest.raises(ElfError):
        read(library(changes=changes))


def test_a_file_that_ends_early_raises():
    whole = library(gpu=fatbin((2, 80, 0)))
    for end in range(4, len(whole) - 1, 3):
        with pytest.raises(ElfError):
            read(whole[:end])


def test_no_elf_file():
    for body in (b"", b"\x7fELF", b"\x7fELF" + b"\xff" * 60, b"#!/bin/sh\n"):
        with pytest.raises(ElfError):
            read(body)


@pytest.mark.parametrize(
    "gpu",
    [
        fatbin((2, 80, 0), length=2**63),
        fatbin((2, 80, 0), length=100_000),
        struct.pack("<IHHQ", MAGIC, 1, 0, 0) * 100,
        fatbin((2, 80, 0))[:16] + struct.pack("<HHIQ", 2, 1, 0, 0) + b"\0" * 56,
        fatbin((2, 80, 0))[:16] + struct.pack("<HHIQ", 2, 1, 64, 2**62) + b"\0" * 56,
    ],
)
def test_damaged_gpu_code_is_named_and_the_rest_is_read(gpu):
    binary = read(library(gpu=gpu))
    assert binary.gpu is None
    assert "GPU code" in binary.fault
    assert binary.needed == ("libc.so.6",)


def test_an_empty_section_of_gpu_code_takes_no_time():
    begun = time.process_time()
    assert read(library(gpu=b"\0" * 2_000_000)).gpu is None
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        (Code(80, "", ptx=False), {80, 86, 89}),
        (Code(86, "", ptx=False), {86, 89}),
        (Code(87, "", ptx=False), {87}),
        (Code(90, "", ptx=False), {90}),
        (Code(90, "a", ptx=False), {90}),
        (Code(100, "", ptx=False), {100, 103}),
        (Code(100, "a", ptx=False), {100}),
        (Code(100, "f", ptx=False), {100, 103}),
        (Code(103, "f", ptx=False), {103}),
        (Code(120, "", ptx=False), {120, 121}),
        (Code(80, "", ptx=True), {80, 86, 87, 89, 90, 100, 103, 120, 121}),
        (Code(90, "a", ptx=True), {90}),
        (Code(100, "f", ptx=True), {100, 103}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_which_gpu_runs_what(code, runs):
    assert {sm for sm in (75, 80, 86, 87, 89, 90, 100, 103, 120, 121) if code.runs_on(sm)} == runs


def test_containers_are_counted():
    gpu = read(library(gpu=fatbin((2, 80, 0)) + fatbin((2, 80, 0)) + fatbin((2, 90, 0)))).gpu
    assert gpu.without(90) == 2
    assert gpu.support(90) == "native"
    assert gpu.support(120) == "none"
    assert read(library(gpu=fatbin((2, 80, 0), (1, 80, 0)))).gpu.support(120) == "jit"


@pytest.mark.parametrize(
    ("name", "abi", "shown", "torchs"),
    [
        (b"_ZN3c105ErrorC2ENS_14SourceLocationESs", "old", "c10::Error::Error", True),
        (
            b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
            "new", "c10::Error::Error", True,
        ),
        (b"_ZN2at4_ops10empty_like4callERKNS_6TensorE", "", "at::_ops::empty_like::call", True),
        (b"_ZN3c107SsClassEv", "", "c10::SsClass", True),
        (b"_ZTVN3c104TypeE", "", "vtable of c10::Type", True),
        (b"_ZNK5torch8autograd4Node4nameEv", "", "torch::autograd::Node::name", True),
        (b"_ZN8cudnn_fe4makeEv", "", "cudnn_fe::make", False),
        (b"nvte_cast", "", "nvte_cast", False),
        (b"_ZN99999999999999999999x", "", "", True),
    ],
)  # fmt: skip
def test_names_of_symbols(name, abi, shown, torchs):
    assert string_abi(name) == abi
    assert not shown or shown_symbol(name) == shown
    shown_symbol(name)
    assert not shown or is_torchs(name) is torchs


def of_names(count, place):
    """Return a library of `count` undefined symbols, whose names begin where `place` says, in one of 16 KiB."""
    text = b"\0" + b"A" * 16_383 + b"\0"
    symbols = b"".join(struct.pack("<IBBHQQ", place(number), 0x10, 0, 0, 0, 0) for number in range(count))
    heads = b"\0.dynsym\0.dynstr\0.shstrtab\0"
    body, offsets = bytearray(64), []
    for part in (text, symbols, heads):
        body += bytes(-len(body) % 8)
        offsets.append(len(body))
        body += part
    body += bytes(-len(body) % 8)
    start = len(body)
    sections = [
        (0, 0, 0, 0, 0, 0), (1, 11, offsets[1], len(symbols), 2, 24), (9, 3, offsets[0], len(text), 0, 0),
        (17, 3, offsets[2], len(heads), 0, 0),
    ]  # fmt: skip
    for name, kind, offset, size, link, entry in sections:
        body += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 1, entry)
    body[:64] = (
        b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, start, 0, 64, 56, 0, 64, 4, 3)
    )
    return bytes(body)


def test_one_name_of_very_many_symbols_is_kept_once():
    assert read(of_names(100_000, lambda _: 1)).wanted == ((b"A" * 16_383, ""),)


def test_names_that_overlap_without_a_bound_are_refused():
    with pytest.raises(ElfError, match="names that overlap"):
        read(of_names(16_000, lambda number: 1 + number))
