"""Speed and memory of GPU models, by the names that nvidia-smi reports or a user writes.

Operations, bandwidths and links are from the vendors' data sheets, as of 2026. Operations are dense
16-bit matrix operations with sums in fp32, in bfloat16 where the GPU has that (T4, V100 and RTX 2080
Ti have fp16 only); data sheets that give a figure "with sparsity" are halved.

- NVIDIA: data sheets "B200 (HGX)", "GH200", "H200", "H100", "A100", "A40", "A30", "A10", "RTX A6000",
  "RTX A5000", "RTX A4000", "RTX 6000 Ada Generation", "L40S", "L40", "L4", "T4", "V100"; H20 by its
  product brief, A10G by AWS EC2 G5; GeForce by the architecture white papers "Blackwell RTX"
  (50), "Ada" (40), "Ampere GA102" (30) and "Turing" (20).
- AMD: data sheets "Instinct MI325X", "MI300X", "MI250X", "MI250", "MI210".

Memory is the total that nvidia-smi or rocm-smi reports with ECC as the card is sold, which differs from
the size in the card's name: an H100 of "80 GB" has 81,559 MiB, 85.5 GB. Software sees each of the two
dies of an MI250X and of an MI250 as a GPU, and so does the table.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

# Bytes a second of a lane, by generation of PCIe, one way. Source: PCI-SIG, encoding included.
LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
# The share of it that copies to and from registered host memory reach: 55 GB/s of 16 lanes of
# generation 5.
LINK_SHARE = 0.87


class GpuModel(NamedTuple):
    """flops: dense 16-bit matrix operations a second. bytes_per_second: of the GPU's own memory. sizes:
    MiB of memory as reported, by the GB in the name of the card. generation, lanes: of its PCI Express
    link; generation is 0 for another kind of link.
    """

    flops: float
    bytes_per_second: float
    sizes: dict[int, int]
    generation: int
    lanes: int = 16
    bfloat16: bool = True

    @property
    def link_bytes_per_second(self) -> float:
        """Bytes a second that copies from or to registered host memory reach, one way."""
        if not self.generation:  # NVLink-C2C: 450 GB/s one way
            return 450e9 * LINK_SHARE
        return LANE_BYTES_PER_SECOND[self.generation] * self.lanes * LINK_SHARE

    def memory_bytes(self, name: str = "") -> int | None:
        """Bytes of memory; None where several sizes are sold and *name* does not say which, or names another."""
        named = {int(number) for number in re.findall(r"(\d+)\s*G", name, re.IGNORECASE)}
        fitting = [size for size in self.sizes if size in named or not named]
        return self.sizes[fitting[0]] << 20 if len(fitting) == 1 else None


MODELS = {
    "B200": GpuModel(2250e12, 8.0e12, {180: 183_359}, 5),
    "GH200": GpuModel(989e12, 4.0e12, {96: 97_871, 144: 146_831}, 0),
    "H200": GpuModel(989e12, 4.8e12, {141: 143_771}, 5),
    "H200 NVL": GpuModel(835e12, 4.8e12, {141: 143_771}, 5),
    "H100": GpuModel(989e12, 3.35e12, {80: 81_559}, 5),
    "H100 NVL": GpuModel(835e12, 3.9e12, {94: 95_830}, 5),
    "H100 PCIe": GpuModel(756e12, 2.0e12, {80: 81_559}, 5),
    "H20": GpuModel(148e12, 4.0e12, {96: 97_871}, 5),
    "A100": GpuModel(312e12, 1.9e12, {40: 40_960, 80: 81_920}, 4),
    "A40": GpuModel(150e12, 0.70e12, {48: 46_068}, 4),
    "A30": GpuModel(165e12, 0.93e12, {24: 24_576}, 4),
    "A10": GpuModel(125e12, 0.6e12, {24: 23_028}, 4),
    "A10G": GpuModel(70e12, 0.6e12, {24: 23_028}, 4),
    "A6000": GpuModel(155e12, 0.77e12, {48: 49_140}, 4),
    "A5000": GpuModel(111e12, 0.77e12, {24: 24_564}, 4),
    "A4000": GpuModel(77e12, 0.45e12, {16: 16_376}, 4),
    "RTX 6000 Ada": GpuModel(364e12, 0.96e12, {48: 49_140}, 4),
    "L40S": GpuModel(362e12, 0.86e12, {48: 46_068}, 4),
    "L40": GpuModel(181e12, 0.86e12, {48: 46_068}, 4),
    "L4": GpuModel(121e12, 0.3e12, {24: 23_034}, 4),
    "T4": GpuModel(65e12, 0.32e12, {16: 15_360}, 3, bfloat16=False),
    "V100": GpuModel(125e12, 0.9e12, {16: 16_384, 32: 32_768}, 3, bfloat16=False),
    "5090": GpuModel(210e12, 1.79e12, {32: 32_607}, 5),
    "5080": GpuModel(113e12, 0.96e12, {16: 16_303}, 5),
    "4090": GpuModel(165e12, 1.0e12, {24: 24_564}, 4),
    "4080": GpuModel(97e12, 0.72e12, {16: 16_376}, 4),
    "3090": GpuModel(71e12, 0.94e12, {24: 24_576}, 4),
    "3090 Ti": GpuModel(80e12, 1.0e12, {24: 24_564}, 4),
    "2080 Ti": GpuModel(54e12, 0.62e12, {11: 11_264}, 3, bfloat16=False),
    "MI325X": GpuModel(1307e12, 6.0e12, {256: 262_128}, 5),
    "MI300X": GpuModel(1307e12, 5.3e12, {192: 196_592}, 5),
    "MI250X": GpuModel(191e12, 1.6e12, {64: 65_520}, 4),
    "MI250": GpuModel(181e12, 1.6e12, {64: 65_520}, 4),
    "MI210": GpuModel(181e12, 1.6e12, {64: 65_520}, 4),
}


@functools.cache
def find(name: str) -> GpuModel | None:
    """The model that *name* contains, such as "H100", "NVIDIA A100-SXM4-80GB" or "RTX4090"; None for a
    model that the table lacks, and for GPUs of laptops, which are slower than their namesakes.
    """
    if re.search(r"laptop|mobile|max-q", name, re.IGNORECASE):
        return None
    words = re.sub(r"[\s_-]+|(?<=\d)(?=Ti\b)|(?<=RTX)(?=\d)", " ", name, flags=re.IGNORECASE)
    for known in sorted(MODELS, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){known}(?![a-z0-9])", words, re.IGNORECASE):
            return MODELS[known]
    return None
