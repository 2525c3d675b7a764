// Probe: measures this machine's limits, as a reference for the figures of kernels.
#pragma once
#include <cstdint>
#include <memory>

#include "core/mapped_file.h"
#include "core/status.h"
#include "device/cpu/team.h"

namespace llmc {

enum class Limit : uint32_t { kRead = 0, kF32 = 1, kBf16 = 2, kInt8 = 3 };

class Probe {
 public:
  // read_bytes: memory to read, far larger than the caches. num_threads 0: every CPU this process may use.
  static Status Create(uint32_t num_threads, uint64_t read_bytes, bool pin, std::unique_ptr<Probe>* out);

  // Runs for about `seconds`. *rate: bytes per second for kRead, else operations per second (a multiply-add is two).
  // LLMC_ERR_UNSUPPORTED_TARGET if the CPU lacks the instruction.
  Status Measure(Limit limit, double seconds, double* rate);
  uint32_t num_threads() const { return team_->num_threads(); }

  // One block of work on `data`; returns bytes or operations. Public for the kernels.
  using Work = double (*)(const char* data);

 private:
  Probe() = default;
  void Run(uint32_t thread, uint32_t num_threads);

  std::unique_ptr<Team> team_;
  Pages memory_, done_;

  // The running measurement.
  Work work_ = nullptr;
  uint64_t deadline_ns_ = 0, stride_ = 0;
};

}  // namespace llmc
