"""OpenCL: kernels are OpenCL C text, which a device's driver builds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.backend import GpuTarget
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.sampling import SAMPLING_LEVEL
from llmc.tvm_import import import_tvm

KIND = "opencl"
PRELUDE = """\
// Kernels of llmc in OpenCL C (runtime/FORMAT.md).
#pragma OPENCL FP_CONTRACT OFF

#define llmc_await_earlier()
// All items of the group arrive, and see each other's writes to memory of any kind.
#define llmc_sync_written() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
// Items that run in step, which pass each other numbers: as many as the device says (FORMAT.md).
#ifdef LLMC_LANES_REQUIRED
#define LLMC_IN_STEP __attribute__((intel_reqd_sub_group_size(LLMC_LANES)))
#else
#define LLMC_IN_STEP
#endif
#ifdef LLMC_LANES
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#define llmc_of_lane(own, lanes) sub_group_shuffle_xor(own, (uint)(lanes))
#else
#define LLMC_LANES 1
#define llmc_of_lane(own, lanes) (own)
#endif
#define llmc_lanes() LLMC_LANES

int llmc_num_groups(void) { return (int)get_num_groups(0); }
float llmc_max(float a, float b) { return a > b ? a : b; }
float llmc_min(float a, float b) { return a < b ? a : b; }
void llmc_load16(uint* to, const __global void* from) {
  const uint4 words = *(const __global uint4*)from;
  to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
}
void llmc_load8(uint* to, const __global void* from) {
  const uint2 words = *(const __global uint2*)from;
  to[0] = words.x, to[1] = words.y;
}
void llmc_store16(__global void* to, const uint* from) {
  *(__global uint4*)to = (uint4)(from[0], from[1], from[2], from[3]);
}
void llmc_store8(__global void* to, const uint* from) { *(__global uint2*)to = (uint2)(from[0], from[1]); }
void llmc_load4(uint* to, const __global void* from) { to[0] = *(const __global uint*)from; }
// The sum of four products of signed bytes: exact, whoever computes it.
int llmc_dot4(int a, int b) {
#ifdef __opencl_c_integer_dot_product_input_4x8bit_packed
  return dot_4x8packed_ss_int((uint)a, (uint)b);
#else
  const int4 products = convert_int4(as_char4(a)) * convert_int4(as_char4(b));
  return products.x + products.y + products.z + products.w;
#endif
}
"""
"""Functions that all kernels call, prefixed to each program."""
_DOUBLES = b"#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n"
"""By this line a device without double precision knows programs that are not for it."""
NEXT_PROGRAM = "\n//// program\n"
"""Separates the programs of a file. Each kernel is one: drivers keep what they built by program, and models share most
kernels. Those of sampling form one program, which every model of their vocabulary has."""
_SAMPLING = b" void sample_"


@dataclass(frozen=True)
class OpenClTarget(GpuTarget):
    """Any device with OpenCL 1.2."""

    kind: ClassVar[str] = KIND
    device: ClassVar[str] = KIND
    code_name: ClassVar[str] = "kernels.cl"

    @property
    def name(self) -> str:
        return KIND

    @property
    def level(self) -> int:
        return SAMPLING_LEVEL

    def runs_here(self) -> bool:
        from llmc.compiler.targets.gpu.devices import has_opencl

        return has_opencl()

    def compile(self, spec: KernelSpec, variant: str | None) -> bytes:
        self.check_no_variant(variant)
        return self.text(spec).encode()

    def text(self, spec: KernelSpec) -> str:
        """A kernel in OpenCL C. Raises KernelSpecError."""
        import_tvm()
        from llmc.compiler.targets.gpu.codegen import Language, kernel_text
        from llmc.compiler.targets.gpu.kernels.groups import UNROLLED

        head = "__kernel __attribute__((reqd_work_group_size({items}, 1, 1))) void"
        text = kernel_text(self.kernel(spec), Language({"kind": "opencl"}, head), launch_of(spec).items)
        if "llmc_of_lane(" in text:
            text = text.replace(" void ", " LLMC_IN_STEP void ", 1)
        # TVM writes this for CUDA alone. Compilers that do not know it skip it.
        return re.sub(rf"^( *)(?=for \(int {UNROLLED})", r"\1#pragma unroll\n\1", text, flags=re.MULTILINE)

    def listings(self, spec: KernelSpec, variant: str | None) -> dict[str, str]:
        return {**super().listings(spec, variant), "cl": self.text(spec)}

    def link(self, codes: Sequence[bytes], path: Path) -> None:
        of_sampling = [code for code in codes if _SAMPLING in code]
        programs = [[code] for code in codes if _SAMPLING not in code] + ([of_sampling] if of_sampling else [])
        path.write_bytes(NEXT_PROGRAM.encode().join(b"\n".join((*_heads(one), *one)) for one in programs))


def _heads(codes: Sequence[bytes]) -> list[bytes]:
    """What precedes the kernels of a program."""
    return [PRELUDE.encode(), *([_DOUBLES] if any(b"double" in code for code in codes) else [])]


def names() -> tuple[str, ...]:
    """Names of all targets of this kind, as users write them."""
    return (KIND,)


def named(name: str) -> OpenClTarget:
    """The target called `name`, one of `names()`."""
    return OpenClTarget()


def from_record(record: Mapping[str, Any]) -> OpenClTarget:
    """The target with this `record`."""
    return named(str(record["name"]))
