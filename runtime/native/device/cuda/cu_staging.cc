#include "device/cuda/cu_staging.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace llmc {
namespace {

constexpr uint64_t kSlotBytes = 8 << 20;
constexpr uint32_t kMostReaders = 4;

// Staging memory of one thread: while one slot is being sent, the other is filled.
struct Lane {
  CuPinned slots[2];
  CuEvent sent[2];
  CuStream stream;  // last member, so destroyed first
};

class Upload {
 public:
  Upload(const CuMachine& machine, const MappedFile& file, uint64_t begin, uint64_t bytes, CuPointer to)
      : machine_(machine), file_(file), begin_(begin), bytes_(bytes), to_(to) {}

  // Sends parts until none is left or one fails, and waits for its own. Any thread may call it.
  void Run(const Lane& lane) {
    const CuScope scope(machine_);
    Status status = scope.status();
    for (uint64_t turn = 0; status.ok(); ++turn) {
      const uint64_t at = kSlotBytes * next_.fetch_add(1);
      if (at >= bytes_ || failed_.load()) break;
      status = Send(lane, turn % 2, turn >= 2, at, std::min(kSlotBytes, bytes_ - at));
    }
    if (lane.stream.get() != nullptr) {
      const Status arrived =
          machine_.Check("Copying weights to the GPU", machine_->StreamSynchronize(lane.stream.get()));
      if (status.ok()) status = arrived;
    }
    if (status.ok()) return;
    failed_.store(true);
    std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok()) status_ = std::move(status);
  }

  Status status() { return status_; }

 private:
  Status Send(const Lane& lane, uint64_t slot, bool used, uint64_t at, uint64_t bytes) {
    void* host = lane.slots[slot].get();
    if (used) {
      LLMC_RETURN_IF_ERROR(
          machine_.Check("Copying weights to the GPU", machine_->EventSynchronize(lane.sent[slot].get())));
    }
    LLMC_RETURN_IF_ERROR(file_.Read(begin_ + at, bytes, static_cast<unsigned char*>(host)));
    LLMC_RETURN_IF_ERROR(machine_.Check("Copying weights to the GPU",
                                        machine_->MemcpyToDevice(to_ + at, host, bytes, lane.stream.get())));
    return machine_.Check("Copying weights to the GPU",
                          machine_->EventRecord(lane.sent[slot].get(), lane.stream.get()));
  }

  const CuMachine& machine_;
  const MappedFile& file_;
  uint64_t begin_, bytes_;
  CuPointer to_;
  std::atomic<uint64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  Status status_;
};

}  // namespace

Status CopyFileToDevice(const CuMachinePtr& machine, const MappedFile& file, uint64_t begin, uint64_t bytes,
                        CuPointer to) {
  const uint64_t parts = (bytes + kSlotBytes - 1) / kSlotBytes;
  const uint64_t readers = std::clamp<uint64_t>(std::thread::hardware_concurrency(), 1, kMostReaders);
  std::vector<Lane> lanes(std::min(parts, readers));
  for (Lane& lane : lanes) {
    LLMC_RETURN_IF_ERROR(MakeStream(machine, &lane.stream));
    for (int slot = 0; slot < 2; ++slot) {
      LLMC_RETURN_IF_ERROR(TakePinned(machine, "weights on their way", std::min(bytes, kSlotBytes), &lane.slots[slot]));
      LLMC_RETURN_IF_ERROR(MakeEvent(machine, &lane.sent[slot]));
    }
  }
  Upload upload(*machine, file, begin, bytes, to);
  std::vector<std::thread> threads;
  threads.reserve(lanes.size());
  for (size_t i = 1; i < lanes.size(); ++i) {
    try {
      threads.emplace_back(&Upload::Run, &upload, std::cref(lanes[i]));
    } catch (const std::system_error&) {
      break;  // fewer threads do the work
    }
  }
  if (!lanes.empty()) upload.Run(lanes[0]);
  for (std::thread& thread : threads) thread.join();
  return upload.status();
}

}  // namespace llmc
