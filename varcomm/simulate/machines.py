"""Machines that are known, by figures of data sheets and published measurements.

Rates of computing, memory and links are peaks, in fp32 without tensor cores, and links are those of
one direction. Times by them are therefore lower bounds. Latencies are those that NCCL predicts with:
its makers measured them. Marked as assumed is what no source was found for.
"""

from __future__ import annotations

from varcomm.simulate.machine import Machine

__all__ = ["MACHINES"]

_NCCL = (
    "latencies of messages and calls: hwLat and baseLat of the ring with protocol Simple in "
    "NVIDIA/nccl, src/graph/tuning.cc at 01afd20 (2022), measured by its authors; gap 1 us and "
    "launch 5 us: assumed"
)

_GPUS = {"launch": 5e-6, "gap": 1e-6, "call": 8.4e-6}

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            name="h100-ndr",
            ranks_per_node=8,
            flops=66.9e12,
            memory_bandwidth=3.35e12,
            memory=80e9,
            latency_within=3.4e-6,
            latency_between=9.6e-6,
            bandwidth_within=450e9,
            bandwidth_between=50e9,
            **_GPUS,
            source="HGX H100: NVIDIA H100 data sheet (2023): 66.9 TFLOP/s in fp32, 3.35 TB/s, NVLink "
            "of 900 GB/s in both directions; a ConnectX-7 of 400 Gb/s a GPU (DGX H100 data sheet, "
            f"2023). All peak; {_NCCL}.",
        ),
        Machine(
            name="a100-hdr",
            ranks_per_node=8,
            flops=19.5e12,
            memory_bandwidth=2.039e12,
            memory=80e9,
            latency_within=3.4e-6,
            latency_between=9.6e-6,
            bandwidth_within=300e9,
            bandwidth_between=25e9,
            **_GPUS,
            source="HGX A100 80 GB: NVIDIA A100 data sheet (2021): 19.5 TFLOP/s in fp32, 2.039 TB/s, "
            "NVLink of 600 GB/s in both directions; a ConnectX-6 of 200 Gb/s a GPU (DGX A100 data "
            f"sheet, 2020). All peak; {_NCCL}.",
        ),
        Machine(
            name="mi250x-slingshot",
            ranks_per_node=8,
            flops=23.95e12,
            memory_bandwidth=1.6e12,
            memory=64e9,
            latency_within=3.4e-6,
            latency_between=9.6e-6,
            bandwidth_within=50e9,
            bandwidth_between=12.5e9,
            **_GPUS,
            source="A GCD, half of an MI250X, as on Frontier and LUMI: AMD MI250X data sheet (2021), "
            "47.9 TFLOP/s in fp32 and 3.2 TB/s for two; Frontier User Guide (docs.olcf.ornl.gov, "
            "read 2026): 64 GB, the slowest links between GCDs 50 GB/s, four Slingshot-11 NICs of 25 "
            f"GB/s for eight GCDs. All peak; RCCL, taken to be like NCCL: {_NCCL}.",
        ),
        Machine(
            name="a100-100gbe",
            ranks_per_node=8,
            flops=19.5e12,
            memory_bandwidth=2.039e12,
            memory=80e9,
            latency_within=3.4e-6,
            latency_between=50e-6,
            bandwidth_within=300e9,
            bandwidth_between=12.5e9 / 8,
            **_GPUS,
            source="The A100 of a100-hdr with one port of Ethernet of 100 Gb/s for eight GPUs: peak "
            "by its name; the latency of TCP, 50 us, is assumed; the rest as there.",
        ),
    )
}
