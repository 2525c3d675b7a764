#include "device/cpu/weight_memory.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "core/cgroup.h"
#include "core/memory_limit.h"

namespace llmc {
namespace {

constexpr uint64_t kHugePage = 2u << 20;
constexpr uint64_t kNumParts = 16;
constexpr uint64_t kSpareBytes = 256ull << 20;  // memory that a copy leaves to other programs

bool HasHugePages() {
  const std::string text = ReadText("/sys/kernel/mm/transparent_hugepage/enabled");
  return !text.empty() && text.find("[never]") == std::string::npos;
}

struct Slice {
  const MappedFile* file;
  char* to;  // address of the file's first byte in the copy
  uint64_t end;
  std::atomic<uint64_t> next;
  std::atomic<bool> failed{false};

  Status Read(uint64_t begin, uint64_t bytes) const {
    return file->Read(begin, bytes, reinterpret_cast<unsigned char*>(to) + begin);
  }
};

// Copies a huge page at a time. The copying thread touches it first, so it lies on that thread's node unless pages are
// spread.
void ReadPieces(void* context, uint32_t, uint32_t) {
  Slice& slice = *static_cast<Slice*>(context);
  for (;;) {
    const uint64_t begin = slice.next.fetch_add(kHugePage, std::memory_order_relaxed);
    if (begin >= slice.end) return;
    try {
      if (slice.Read(begin, std::min(kHugePage, slice.end - begin)).ok()) continue;
    } catch (const std::exception&) {  // out of memory: Move reads again for the message
    }
    slice.failed.store(true, std::memory_order_relaxed);
  }
}

}  // namespace

WeightMemory::WeightMemory(std::shared_ptr<const Artifact> artifact, const WeightOptions& options, uint64_t reserve,
                           uint32_t rank)
    : artifact_(std::move(artifact)), rank_(rank), reserve_(reserve), part_bytes_(options.part_bytes) {
  end_ = artifact_->weight_file().size();
  const uint32_t shared = artifact_->num_shared_weights(), own = artifact_->num_named_weights() - shared;
  const auto begin_of = [&](uint32_t of_rank) { return artifact_->weights()[shared + of_rank * own].file_offset; };
  if (artifact_->num_ranks() > 1 && own > 0) {
    gap_ = begin_of(0);
    gap_end_ = begin_of(rank);
    if (rank + 1 < artifact_->num_ranks()) end_ = begin_of(rank + 1);
  }
  const uint64_t bytes = this->bytes();
  if (part_bytes_ == 0) part_bytes_ = RoundUp(bytes / kNumParts + 1, kHugePage);
  settled_ = options.mode == WeightMode::kMapped ||
             (options.mode == WeightMode::kAuto && (bytes < options.min_bytes || !HasHugePages()));
}

char* WeightMemory::address(uint32_t index) const {
  const WeightRecord& weight = artifact_->weights()[artifact_->weight_of(index, rank_)];
  if (weight.file_offset + weight.bytes <= moved_) return pages_.data() + weight.file_offset;
  return reinterpret_cast<char*>(const_cast<unsigned char*>(artifact_->weight_file().data())) + weight.file_offset;
}

Status WeightMemory::Move(Team* team, NodeSpread* spread) {
  if (settled_) return Status::Ok();
  const MappedFile& file = artifact_->weight_file();
  const uint64_t left = bytes() - moved_bytes(), available = AvailableMemory();
  uint64_t needed = 0;
  const bool first = pages_.data() == nullptr;
  if (__builtin_add_overflow(reserve_, left + kSpareBytes, &needed) || needed > available ||
      (first && !Pages::Allocate(file.size(), "weights", &pages_).ok())) {
    settled_ = true;
    return Status::Ok();
  }
  if (first) spread_ = spread->Place(pages_);
  if (moved_ == gap_) moved_ = gap_end_;
  const uint64_t end = moved_ < gap_ ? gap_ : end_;
  Slice slice{&file, pages_.data(), moved_ + std::min(end - moved_, part_bytes_), {moved_}};
  team->Run(ReadPieces, &slice);
  // Read again for the error message.
  if (slice.failed.load(std::memory_order_relaxed)) LLMC_RETURN_IF_ERROR(slice.Read(moved_, slice.end - moved_));
  moved_ = slice.end;
  settled_ = moved_ == end_;
  // A weight that is copied in part is still read from the mapping.
  uint64_t unread = moved_;
  for (uint32_t i = 0; i < artifact_->num_named_weights(); ++i) {
    const WeightRecord& weight = artifact_->weights()[artifact_->weight_of(i, rank_)];
    if (weight.file_offset + weight.bytes > moved_) unread = std::min(unread, weight.file_offset);
  }
  file.Drop(dropped_, unread);
  dropped_ = unread;
  return Status::Ok();
}

}  // namespace llmc
