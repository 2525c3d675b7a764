#include "device/cuda/cu_handles.h"

#include <string>

#include "device/gpu/device_memory.h"

namespace llmc {

Status TakeMemory(const CuMachinePtr& machine, const char* what, uint64_t bytes, CuBuffer* out) {
  CuPointer memory = 0;
  const CuResult code = (*machine)->MemAlloc(&memory, bytes);
  if (code != kCuSuccess) {
    const std::string doing = "Taking " + MemorySize(bytes) + " for " + what + " from '" + machine->name() + "'";
    return machine->Check(doing.c_str(), code);
  }
  *out = CuBuffer(machine, memory);
  return Status::Ok();
}

Status TakePinned(const CuMachinePtr& machine, const char* what, uint64_t bytes, CuPinned* out) {
  void* memory = nullptr;
  const CuResult code = (*machine)->MemHostAlloc(&memory, bytes, 0);
  if (code == kCuOutOfMemory) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, "The host has no " + MemorySize(bytes) + " that can be pinned for " +
                                                     what + "; free memory, or raise the limit of locked memory.");
  }
  LLMC_RETURN_IF_ERROR(machine->Check("Pinning memory of the host", code));
  *out = CuPinned(machine, memory);
  return Status::Ok();
}

Status MakeStream(const CuMachinePtr& machine, CuStream* out) {
  CuStreamHandle stream = nullptr;
  LLMC_RETURN_IF_ERROR(machine->Check("Opening a stream", (*machine)->StreamCreate(&stream, kCuStreamNonBlocking)));
  *out = CuStream(machine, stream);
  return Status::Ok();
}

Status MakeEvent(const CuMachinePtr& machine, CuEvent* out) {
  CuEventHandle event = nullptr;
  LLMC_RETURN_IF_ERROR(machine->Check("Making an event", (*machine)->EventCreate(&event, kCuEventDisableTiming)));
  *out = CuEvent(machine, event);
  return Status::Ok();
}

}  // namespace llmc
