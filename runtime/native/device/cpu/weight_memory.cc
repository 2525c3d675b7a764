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
  const std::vector<bool> read = artifact_->WeightsOf(artifact_->stage_of(rank));
  if (artifact_->num_ranks() == 1) ranges_ = {{0, artifact_->weight_file().size()}};
  // Records are in the order of the file.
  for (uint32_t i = 0; i < read.size() && artifact_->num_ranks() > 1; ++i) {
    if (!read[i]) continue;
    const WeightRecord& weight = artifact_->weights()[artifact_->weight_of(i, rank)];
    const Range range = {weight.file_offset, weight.file_offset + weight.bytes};
    const bool joins = !ranges_.empty() && range.begin < ranges_.back().end + kAlignment;
    joins ? static_cast<void>(ranges_.back().end = range.end) : ranges_.push_back(range);
  }
  const uint64_t bytes = this->bytes();
  if (part_bytes_ == 0) part_bytes_ = RoundUp(bytes / kNumParts + 1, kHugePage);
  settled_ = ranges_.empty() || options.mode == WeightMode::kMapped ||
             (options.mode == WeightMode::kAuto && (bytes < options.min_bytes || !HasHugePages()));
}

uint64_t WeightMemory::BytesBelow(uint64_t end) const {
  uint64_t bytes = 0;
  for (const Range& range : ranges_) bytes += std::clamp(end, range.begin, range.end) - range.begin;
  return bytes;
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
  const auto range =
      std::find_if(ranges_.begin(), ranges_.end(), [this](const Range& one) { return moved_ < one.end; });
  moved_ = std::max(moved_, range->begin);
  const uint64_t end = range->end;
  Slice slice{&file, pages_.data(), moved_ + std::min(end - moved_, part_bytes_), {moved_}};
  team->Run(ReadPieces, &slice);
  // Read again for the error message.
  if (slice.failed.load(std::memory_order_relaxed)) LLMC_RETURN_IF_ERROR(slice.Read(moved_, slice.end - moved_));
  moved_ = slice.end;
  settled_ = moved_ == ranges_.back().end;
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
