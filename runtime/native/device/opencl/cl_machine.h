// ClMachine: one OpenCL device of this machine with its context and its properties.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "device/opencl/cl_lanes.h"
#include "device/opencl/cl_library.h"

namespace llmc {

// Highest level of FORMAT.md, devices of kind opencl.
constexpr uint32_t kMaxClLevel = 1;

struct ClChoice {
  std::string library = kClLibrary;
  // Number among all devices, in the order of their platforms. UINT32_MAX: a GPU, else another device.
  uint32_t device = UINT32_MAX;
  uint32_t local_rank = 0;  // which of these, if several ranks of this machine share them out
};

class ClMachine {
 public:
  static Status Open(const ClChoice& choice, std::shared_ptr<const ClMachine>* out);
  ~ClMachine();
  ClMachine(const ClMachine&) = delete;
  ClMachine& operator=(const ClMachine&) = delete;

  const ClFunctions* operator->() const { return &**api_; }
  cl_device_id device() const { return device_; }
  cl_context context() const { return context_; }
  // nullptr if the device has no command buffers.
  const ClCommandBufferFunctions* command_buffers() const { return has_command_buffers_ ? &recording_ : nullptr; }

  // Whether a command buffer may be enqueued again while it runs. Else a graph needs two of them.
  bool replays_overlap() const { return replays_overlap_; }

  // The error that lost the device, if any. Any thread may call it, and Judge.
  Status CheckAlive() const;
  // To be called with the error of a call. OpenCL does not say which errors lose a device, so a few bytes are copied to
  // it and back. Returns the error, or LLMC_ERR_DEVICE_LOST if these do not arrive within a minute.
  Status Judge(const Status& failed) const;
  // As Judge, where no call has failed: of a device that idles.
  Status AskAlive(std::chrono::nanoseconds most) const;
  const std::string& name() const { return name_; }
  const std::string& driver() const { return driver_; }
  uint64_t memory_bytes() const { return memory_bytes_; }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  uint64_t group_items() const { return group_items_; }
  // Waits for what the queue holds now. clFinish may wait for later work of other threads, too, and steps follow each
  // other without a gap.
  Status AwaitQueued(cl_command_queue queue, const char* doing) const;
  // Whether the driver keeps what it built, so that nothing needs to be stored.
  bool keeps_programs() const;
  // Whether it computes in double precision, which kernels that draw tokens do.
  bool has_doubles() const { return has_doubles_; }
  const ClLanes& lanes() const { return lanes_; }
  // Whether a kernel that was built for `lanes` has them in groups of `items`.
  bool HasLanes(cl_kernel kernel, size_t items) const;
  // Build options under which results do not depend on the compiler's choices.
  std::string build_options(const ClLanes& lanes) const;
  std::vector<std::pair<std::string, std::string>> Facts() const;

 private:
  explicit ClMachine(ClApi api) : api_(std::move(api)) {}
  Status Choose(const ClChoice& choice);
  Status Describe();
  // Makes what Judge copies with.
  Status MakeProbe();
  bool Answers(std::chrono::nanoseconds most) const;

  ClApi api_;
  cl_platform_id platform_ = nullptr;
  cl_device_id device_ = nullptr;
  cl_context context_ = nullptr;
  ClCommandBufferFunctions recording_;
  std::string name_, driver_, platform_name_, version_;
  uint64_t memory_bytes_ = 0, buffer_bytes_ = 0, group_items_ = 0, local_bytes_ = 0;
  uint32_t compute_units_ = 0, number_ = 0;
  bool shares_host_memory_ = false, has_opencl3_ = false, has_doubles_ = false;
  bool has_dot_products_ = false, has_command_buffers_ = false, replays_overlap_ = false, divides_exactly_ = false;
  ClLanes lanes_;
  // A queue of its own: those of steps have work that may never end well.
  mutable cl_command_queue probe_queue_ = nullptr;
  mutable cl_mem probe_ = nullptr;
  mutable std::mutex lost_mutex_;
  mutable Status lost_;
  mutable uint64_t num_probes_ = 0;
};

}  // namespace llmc
