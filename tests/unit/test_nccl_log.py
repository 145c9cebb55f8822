"""What NCCL's log says of networks, plugins and links, and why it takes sockets; lines as NCCL 2.14 to 2.29 print them."""

import time

import pytest

from envbuild.verify.nccl_log import read_log, why_sockets

HEAD = "node7:4021:4021 [0] NCCL INFO "


def log_of(*texts: str) -> str:
    return "".join(f"{HEAD}{text}\n" for text in texts)


def why(*texts: str, efa: bool = False, verbs: tuple[str, ...] = ("uverbs0",), path: str = "", **variables: str) -> str:
    return why_sockets(read_log(log_of(*texts)), efa=efa, verbs=verbs, variables=variables, library_path=path)


def test_version_network_and_links() -> None:
    found = read_log(
        "NCCL version 2.27.5+cuda12.9\n"
        + log_of(
            "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.4<0>",
            "Initialized NET plugin IB",
            "Using network IB",
            "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
            "Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
            "Channel 00/0 : 3[3] -> 0[0] [receive] via NET/IB/0/GDRDMA",
            "Channel 01/0 : 3[3] -> 0[0] [send] via NET/IB/1(2)/GDRDMA(PCI)",
        )
    )
    assert found.version == "2.27.5+cuda12.9"
    assert found.networks == ("IB",)
    assert found.links == {"P2P/CUMEM/read": 2, "NET/IB/GDRDMA": 1, "NET/IB/GDRDMA(PCI)": 1}


def test_a_name_with_a_space_and_links_of_old_releases() -> None:
    found = read_log(
        log_of(
            "Ring 00 : 15 -> 0 [receive] via NET/AWS Libfabric/0",
            "Ring 00 : 0[0] -> 1[1] via P2P/IPC",
            "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct",
            "Channel 00/01 : 1[1] -> 0[0] via P2P/indirect/3[3]",
            "Channel 00/01 : 1[1] -> 0[0] via P2P/direct pointer",
        )
    )
    assert set(found.links) == {
        "NET/AWS Libfabric", "P2P/IPC", "SHM/direct/direct", "P2P/indirect", "P2P/direct pointer",
    }  # fmt: skip


def test_a_plugin_by_its_path_and_version() -> None:
    found = read_log(
        log_of(
            "NET/OFI Initializing aws-ofi-nccl 1.13.2-aws",
            "NET/OFI Selected Provider is efa (found 16 nics)",
            "NET/Plugin: Loaded net plugin AWS Libfabric (v8)",
            "Successfully loaded external network plugin /opt/amazon/ofi-nccl/lib/libnccl-net.so",
            "Using network AWS Libfabric",
        )
    )
    assert (found.plugin, found.plugin_version) == ("AWS Libfabric (v8)", "aws-ofi-nccl 1.13.2-aws")
    assert found.plugin_path == "/opt/amazon/ofi-nccl/lib/libnccl-net.so"
    older = read_log(log_of("Plugin Path : /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so", "P2P plugin IBext"))
    assert (older.plugin, older.plugin_path) == ("IBext", "/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so")


@pytest.mark.parametrize(
    "line",
    [
        "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",  # 2.14
        (
            "NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file: "
            "No such file or directory"
        ),  # 2.18
        (
            "NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory "
            "No plugin found (libnccl-net.so), using internal implementation"
        ),  # 2.20
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",  # 2.22
        "NET/Plugin: Could not find: libnccl-net.so",  # 2.28
    ],
)
def test_a_plugin_that_is_not_there(line: str) -> None:
    assert why(line, efa=True, path="/opt/lib") == "plugin not found: libnccl-net.so (LD_LIBRARY_PATH=/opt/lib)"
    assert why(line, efa=True).endswith("(LD_LIBRARY_PATH is not set)")


def test_two_names_of_a_plugin_that_is_not_there() -> None:
    line = "NET/Plugin: Could not find: ofi libnccl-net-ofi.so. Using internal network plugin."
    assert why(line, efa=True).startswith("plugin not found: ofi libnccl-net-ofi.so (")


@pytest.mark.parametrize(
    "line",
    [
        "NET/Plugin: libnccl-net.so: libfabric.so.1: cannot open shared object file: No such file or directory",
        (
            "NET/Plugin : Plugin load (libnccl-net.so) returned 11 : libfabric.so.1: cannot open shared object file: "
            "No such file or directory"
        ),
        "NET/Plugin: libfabric.so.1: cannot open shared object file: No such file or directory",  # 2.22
    ],
)
def test_a_plugin_whose_library_is_missing(line: str) -> None:
    answer = why(line, efa=True)
    assert answer.startswith("plugin libnccl-net.so does not load: libfabric.so.1: cannot open")


def test_a_plugin_of_another_version_has_its_path_and_version() -> None:
    answer = why(
        "Plugin Path : /opt/amazon/lib/libnccl-net.so",
        "NET/OFI Initializing aws-ofi-nccl 1.4.0",
        "NET/Plugin: Failed to find ncclNetPlugin symbol (>= v5). ncclNetPlugin symbols v4 and lower are not supported.",
        efa=True,
    )
    assert answer.startswith("plugin of another version: Failed to find ncclNetPlugin symbol (>= v5)")
    assert answer.endswith(", path /opt/amazon/lib/libnccl-net.so, version aws-ofi-nccl 1.4.0")
    newer = why("External network plugin /opt/x/libnccl-net.so is unsupported", efa=True)
    assert newer == "plugin of another version: External network plugin /opt/x/libnccl-net.so is unsupported"


def test_a_plugin_that_does_not_start() -> None:
    answer = why(
        "NET/OFI Initializing aws-ofi-nccl 1.16.0",
        "NET/OFI Couldn't open a fabric provider. RC: -61, ERROR: No data available",
        "Failed to initialize NET plugin Libfabric",
        efa=True,
    )
    assert answer.startswith("Failed to initialize NET plugin Libfabric: Couldn't open a fabric provider. RC: -61")
    assert answer.endswith("version aws-ofi-nccl 1.16.0")


def test_infiniband_without_libibverbs_without_a_device_or_hidden() -> None:
    no_plugin = "NET/Plugin: Could not find: libnccl-net.so"  # what every machine without a plugin says
    assert why(no_plugin, "Failed to open libibverbs.so[.1]") == "libibverbs.so is not found in the image"
    assert "no /dev/infiniband/uverbs*" in why(no_plugin, "NET/IB : No device found.", verbs=("rdma_cm",))
    assert why("NET/IB : No device found.") == "NET/IB finds no device"
    assert why("NET/IB : No device found.", NCCL_IB_HCA="mlx5_9") == "NET/IB finds no device: NCCL_IB_HCA=mlx5_9 is set"
    assert why("NET/IB : Unable to open device mlx5_0") == "NET/IB: Unable to open device mlx5_0"


def test_what_the_environment_switched_off() -> None:
    assert why("NCCL_IB_DISABLE set by environment to 1.", "NET/IB : No device found.") == "NCCL_IB_DISABLE=1 is set"
    assert why("NCCL_NET set by environment to Socket", efa=True) == "NCCL_NET=Socket is set"
    assert why(NCCL_NET_PLUGIN="none", efa=True) == "NCCL_NET_PLUGIN=none is set"
    # EFA takes no notice of that one
    assert why(NCCL_IB_DISABLE="1", efa=True) == "NCCL says nothing of its network plugin"


def test_a_hostile_log_stays_small_and_printable() -> None:
    text = log_of(
        *(f"NCCL_{number} set by environment to x" for number in range(5000)),
        *(f"Channel 0 : 0 -> 1 via NET/{number:x}z{number}/0" for number in range(5000)),
        *(f"Using network {number}" for number in range(5000)),
        "Using network \x1b[2J\x1b]0;title\x07",
        "NET/Plugin: \x1b[31mlibx.so: \x1b[2Jgone",
        "NET/Plugin: libx.so: \x1b[2Jgone",
    )
    found = read_log(text + "A" * 1_000_000)
    assert len(found.links) <= 64
    assert len(found.networks) <= 8
    assert len(found.set_by_environment) <= 64
    answer = why_sockets(found, efa=True, verbs=(), variables={}, library_path="/x\x1b[31m")
    assert (*found.networks, *found.links, answer) == tuple(
        each for each in (*found.networks, *found.links, answer) if each.isprintable()
    )


def test_a_long_line_takes_no_time() -> None:
    """A pattern took the square of a line's length: a container's log of one line held the report for a day."""
    began = time.monotonic()
    found = read_log("x NCCL INFO " + "Loaded net plugin " * 500_000 + "\n" + "NCCL version " * 500_000)
    assert time.monotonic() - began < 2.0
    assert found.plugin == ""
