// Owners of what a context makes: memory of the device, pinned memory of the host, streams, events.
#pragma once
#include <cstdint>
#include <memory>

#include "core/status.h"
#include "device/cuda/cu_machine.h"
#include "device/gpu/owned.h"

namespace llmc {

// Releases a handle in a scope of its machine.
template <class Free>
struct CuInScope {
  template <class Handle>
  void operator()(const CuMachine& cuda, Handle handle) const {
    const CuScope scope(cuda);
    Free()(cuda, handle);
  }
};
template <class Handle, class Free>
using CuOwned = Owned<CuMachine, Handle, CuInScope<Free>>;

struct CuFreeMemory {
  void operator()(const CuMachine& cuda, CuPointer memory) const { cuda->MemFree(memory); }
};
struct CuFreePinned {
  void operator()(const CuMachine& cuda, void* memory) const { cuda->MemFreeHost(memory); }
};
// Waits for the stream's work: memory is released only after it.
struct CuFreeStream {
  void operator()(const CuMachine& cuda, CuStreamHandle stream) const {
    cuda->StreamSynchronize(stream);
    cuda->StreamDestroy(stream);
  }
};
struct CuFreeEvent {
  void operator()(const CuMachine& cuda, CuEventHandle event) const { cuda->EventDestroy(event); }
};

using CuBuffer = CuOwned<CuPointer, CuFreeMemory>;
using CuPinned = CuOwned<void*, CuFreePinned>;
using CuStream = CuOwned<CuStreamHandle, CuFreeStream>;
using CuEvent = CuOwned<CuEventHandle, CuFreeEvent>;
using CuMachinePtr = std::shared_ptr<const CuMachine>;

// Waits for a stream at the end of a scope: its work uses memory that may be freed next.
class CuDrain {
 public:
  CuDrain(const CuMachine& machine, CuStreamHandle stream) : machine_(machine), stream_(stream) {}
  CuDrain(const CuDrain&) = delete;
  CuDrain& operator=(const CuDrain&) = delete;
  ~CuDrain() { machine_->StreamSynchronize(stream_); }

 private:
  const CuMachine& machine_;
  CuStreamHandle stream_;
};

// Call in a scope of the machine. what: name of the thing in errors.
Status TakeMemory(const CuMachinePtr& machine, const char* what, uint64_t bytes, CuBuffer* out);
Status TakePinned(const CuMachinePtr& machine, const char* what, uint64_t bytes, CuPinned* out);
Status MakeStream(const CuMachinePtr& machine, CuStream* out);
Status MakeEvent(const CuMachinePtr& machine, CuEvent* out);

}  // namespace llmc
