"""Machines that are known, by figures of data sheets and published measurements.

Rates of computing, memory and links are peaks, in fp32 without tensor cores, and links are those
of one direction. Times by them are therefore lower bounds. Latencies are those by which NCCL
chooses its algorithms: its authors measured them. Where no source was found, it says so.
"""

from __future__ import annotations

from varcomm.simulate.machine import Machine

__all__ = ["MACHINES"]

_NCCL = (
    "Latencies of messages and calls: hwLat and baseLat of rings with protocol Simple, NVIDIA/nccl "
    "src/graph/tuning.cc at commit 01afd20, measured by its authors. Gap of 1 us and launch of 5 "
    "us: assumed, of no source."
)
_A100 = (
    "NVIDIA A100 80 GB data sheet (2021): 19.5 TFLOP/s in fp32, 2.039 TB/s, NVLink of 600 GB/s in "
    "both directions together; peak. "
)

_H100_NDR = Machine(
    name="h100-ndr",
    ranks_per_node=8,
    flops=66.9e12,
    memory_bandwidth=3.35e12,
    launch=5e-6,
    memory=80e9,
    latency_within=3.4e-6,
    latency_between=9.6e-6,
    bandwidth_within=450e9,
    bandwidth_between=50e9,
    gap=1e-6,
    call=8.4e-6,
    source="HGX H100. NVIDIA H100 SXM data sheet (2023): 66.9 TFLOP/s in fp32, 3.35 TB/s, NVLink "
    "of 900 GB/s in both directions together; a ConnectX-7 of 400 Gb/s a GPU, as in the DGX H100 "
    f"data sheet (2023); peak. {_NCCL}",
)

_A100_HDR = Machine(
    name="a100-hdr",
    ranks_per_node=8,
    flops=19.5e12,
    memory_bandwidth=2.039e12,
    launch=5e-6,
    memory=80e9,
    latency_within=3.4e-6,
    latency_between=9.6e-6,
    bandwidth_within=300e9,
    bandwidth_between=25e9,
    gap=1e-6,
    call=8.4e-6,
    source=f"HGX A100. {_A100}A ConnectX-6 of 200 Gb/s a GPU, as in the DGX A100 data sheet "
    f"(2020); peak. {_NCCL}",
)

_MI250X = Machine(
    name="mi250x-slingshot",
    ranks_per_node=8,
    flops=23.95e12,
    memory_bandwidth=1.6e12,
    launch=5e-6,
    memory=64e9,
    latency_within=3.4e-6,
    latency_between=9.6e-6,
    bandwidth_within=50e9,
    bandwidth_between=12.5e9,
    gap=1e-6,
    call=8.4e-6,
    source="A rank is a GCD, half of an MI250X, as on Frontier and LUMI. AMD MI250X data sheet "
    "(2021): 47.9 TFLOP/s in fp32 and 3.2 TB/s for two GCDs. Frontier User Guide, "
    "docs.olcf.ornl.gov: 64 GB a GCD, links between GCDs of 50 GB/s at least, four Slingshot-11 "
    f"NICs of 25 GB/s for eight GCDs; peak. RCCL is taken to be like NCCL. {_NCCL}",
)

_ETHERNET = Machine(
    name="a100-ethernet",
    ranks_per_node=8,
    flops=19.5e12,
    memory_bandwidth=2.039e12,
    launch=5e-6,
    memory=80e9,
    latency_within=3.4e-6,
    latency_between=50e-6,
    bandwidth_within=300e9,
    bandwidth_between=12.5e9 / 8,
    gap=1e-6,
    call=8.4e-6,
    source=f"{_A100}One port of 100 Gb/s, 100GBASE of IEEE 802.3, for eight GPUs; peak. Latency of "
    f"50 us between nodes over TCP: assumed, of no source. {_NCCL}",
)

MACHINES: dict[str, Machine] = {
    machine.name: machine for machine in (_H100_NDR, _A100_HDR, _MI250X, _ETHERNET)
}
