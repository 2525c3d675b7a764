// CuMachine: one GPU of this machine with its primary context and its properties.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "device/cuda/cu_library.h"

namespace llmc {

// Highest level of FORMAT.md, devices of kind cuda.
constexpr uint32_t kMaxCuLevel = 1;

struct CuChoice {
  std::string library = kCuLibrary;
  // Number among the devices that this process may use, as in the driver. UINT32_MAX: ranks share them out.
  uint32_t device = UINT32_MAX;
  uint32_t local_rank = 0;  // among the ranks of this machine
};

class CuMachine : public std::enable_shared_from_this<CuMachine> {
 public:
  static Status Open(const CuChoice& choice, std::shared_ptr<const CuMachine>* out);
  ~CuMachine();
  CuMachine(const CuMachine&) = delete;
  CuMachine& operator=(const CuMachine&) = delete;

  const CuFunctions* operator->() const { return &**api_; }
  CuContext context() const { return context_; }
  const std::string& name() const { return name_; }
  uint32_t capability() const { return capability_; }  // 90 for 9.0
  uint64_t memory_bytes() const { return memory_bytes_; }
  // Whether a kernel may begin while the one before it ends, in graphs, too.
  bool launches_early() const;
  uint64_t group_items() const { return group_items_; }
  // What tells this GPU from all others, of other hosts, too.
  Status Identify(CuUuid* out) const;
  // Free memory of the device. Call in a scope of this machine.
  Status FreeBytes(uint64_t* out) const;
  // Ok, or an error that names `doing`. Remembers errors that lose the device. Any thread may call it.
  Status Check(const char* doing, CuResult code) const;
  // The error that lost the device, if any.
  Status CheckAlive() const;
  // Asks for a sign of life while nothing runs: an event that the GPU has to pass. Any thread may call it.
  Status AskAlive(std::chrono::nanoseconds most) const;
  // To be called with the error of a call. Check has judged it.
  static const Status& Judge(const Status& failed) { return failed; }
  std::vector<std::pair<std::string, std::string>> Facts() const;

 private:
  explicit CuMachine(CuApi api) : api_(std::move(api)) {}
  Status Choose(const CuChoice& choice);
  Status Describe();
  // Makes what AskAlive asks with.
  Status MakeProbe();
  // The code with which the GPU passes an event, or kCuNotReady after that time. A driver may never return from it.
  CuResult Answer(std::chrono::nanoseconds most) const;

  CuApi api_;
  CuDeviceId device_ = 0;
  CuContext context_ = nullptr;
  std::string name_;
  uint32_t number_ = 0, capability_ = 0;
  int32_t driver_ = 0;
  uint64_t memory_bytes_ = 0, group_items_ = 0, shared_bytes_ = 0, multiprocessors_ = 0;
  mutable std::atomic<CuResult> lost_{kCuSuccess};
  mutable std::atomic<bool> silent_{false};  // it did not answer
  // Of its own: a stream of steps has work that may never end well.
  CuStreamHandle probe_stream_ = nullptr;
  CuEventHandle probe_ = nullptr;
};

// Makes a machine's context current on this thread, and restores the previous one at its end.
class CuScope {
 public:
  explicit CuScope(const CuMachine& machine) : machine_(machine), code_(machine->CtxPushCurrent(machine.context())) {}
  CuScope(const CuScope&) = delete;
  CuScope& operator=(const CuScope&) = delete;
  ~CuScope() {
    CuContext popped = nullptr;
    if (code_ == kCuSuccess) machine_->CtxPopCurrent(&popped);
  }

  Status status() const { return machine_.Check("Using the GPU", code_); }

 private:
  const CuMachine& machine_;
  CuResult code_;
};

}  // namespace llmc
