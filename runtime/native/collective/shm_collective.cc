#include "collective/shm_collective.h"

#include <algorithm>
#include <cstring>

#include "collective/sum.h"

namespace llmc {
namespace {

constexpr uint64_t kPiece = kSlotBytes / sizeof(float);
constexpr uint64_t kFloatsOfLine = kLineBytes / sizeof(float);
// From this size on, each rank adds up one part: that takes one more wait for all ranks, but reads less.
constexpr uint64_t kSharedFloats = (32u << 10) / sizeof(float);
constexpr uint32_t kFewRanks = 2;  // up to this many ranks read as much either way
// Threads of other ranks may have lost their CPU: after so long this one yields its own.
constexpr uint64_t kSpinNs = 1'000'000;

struct Part {
  uint64_t begin, end;
};

// Share `index` of `count` of [begin, end), in whole cache lines from the begin.
Part ShareOf(Part of, uint64_t index, uint64_t count) {
  const uint64_t lines = (of.end - of.begin + kFloatsOfLine - 1) / kFloatsOfLine;
  const auto at = [&](uint64_t i) { return std::min(of.end, of.begin + lines * i / count * kFloatsOfLine); };
  return {at(index), at(index + 1)};
}

void Copy(float* to, const float* from, Part part) {
  if (part.end > part.begin) std::memcpy(to + part.begin, from + part.begin, (part.end - part.begin) * sizeof(float));
}

}  // namespace

void ShmCollective::Arrive(SharedFlag* flag, std::atomic<uint32_t>* arrived, uint32_t num_threads, uint32_t value) {
  if (arrived->fetch_add(1, std::memory_order_acq_rel) + 1 != num_threads) return;
  arrived->store(0, std::memory_order_relaxed);  // no thread arrives again before the flag is set
  flag->Set(value);
}

bool ShmCollective::AwaitAll(SharedFlag RoomMember::* flag, uint32_t value) const {
  for (uint32_t r = first_of_stage(), end = r + ranks_of_stage_; r < end; ++r) {
    if (!room_->Await(&(room_->member(r).*flag), value, kSpinNs)) return false;
  }
  return true;
}

const float* ShmCollective::Given(uint32_t rank, uint32_t turn, const float* own) const {
  return rank == room_->rank() ? own : reinterpret_cast<const float*>(room_->slot(rank, turn));
}

// A slot is reused two pieces later. By then every rank has given the piece in between, and so has read this one: a
// flag speaks for all threads of its rank. Piece numbers come from the flags, which move only once this thread has
// arrived.
void ShmCollective::AllReduce(const Reduction& work, uint32_t thread, uint32_t num_threads) {
  // On the thread's stack: sums of a few lines stay in L1 until the last term has been added.
  constexpr uint64_t kBlock = 64 * kFloatsOfLine;
  alignas(kLineBytes) float block[kBlock];
  const uint64_t total = work.rows * work.width;
  const uint32_t first_rank = first_of_stage(), end_rank = first_rank + ranks_of_stage_;
  uint32_t given = room_->own().given.value(), reduced = room_->own().reduced.value();
  if (room_->failed()) return;
  for (uint64_t first = 0; first < total; first += kPiece) {
    const uint64_t count = std::min(kPiece, total - first);
    const uint32_t turn = ++given & 1;
    const float* own = work.in + first;
    const Part mine = ShareOf({0, count}, thread, num_threads);
    const auto sum = [&](Part part, auto&& take) {
      for (uint64_t begin = part.begin; begin < part.end; begin += kBlock) {
        const uint64_t size = std::min(kBlock, part.end - begin);
        std::memcpy(block, Given(first_rank, turn, own) + begin, size * sizeof(float));
        for (uint32_t r = first_rank + 1; r < end_rank; ++r) AddTo(block, Given(r, turn, own) + begin, size);
        take(begin, size);
      }
    };
    Copy(reinterpret_cast<float*>(room_->slot(rank(), turn)), own, mine);
    Arrive(&room_->own().given, &given_, num_threads, given);
    if (!AwaitAll(&RoomMember::given, given)) return;
    const auto finish = [&](const float* from, uint64_t begin, uint64_t size) {
      if (from != block) std::memcpy(block, from, size * sizeof(float));
      AddBehindSum(work, block, first + begin, first + begin + size);
      std::memcpy(work.out + first + begin, block, size * sizeof(float));
    };
    if (ranks_of_stage_ <= kFewRanks || count < kSharedFloats) {
      sum(mine, [&](uint64_t begin, uint64_t size) { finish(block, begin, size); });
      continue;
    }
    float* sums = reinterpret_cast<float*>(room_->sums(first_rank, turn));
    const Part of_rank = ShareOf({0, count}, rank() - first_rank, ranks_of_stage_);
    sum(ShareOf(of_rank, thread, num_threads),
        [&](uint64_t begin, uint64_t size) { std::memcpy(sums + begin, block, size * sizeof(float)); });
    Arrive(&room_->own().reduced, &reduced_, num_threads, ++reduced);
    if (!AwaitAll(&RoomMember::reduced, reduced)) return;
    for (uint64_t begin = mine.begin; begin < mine.end; begin += kBlock) {
      finish(sums + begin, begin, std::min(kBlock, mine.end - begin));
    }
  }
}

void ShmCollective::AllGather(const Gathering& work, uint32_t thread, uint32_t num_threads) {
  const uint64_t width = work.width / ranks_of_stage_, total = work.rows * width;
  uint32_t given = room_->own().given.value();
  if (room_->failed()) return;
  for (uint64_t first = 0; first < total; first += kPiece) {
    const uint64_t count = std::min(kPiece, total - first);
    const uint32_t turn = ++given & 1;
    const Part mine = ShareOf({0, count}, thread, num_threads);
    Copy(reinterpret_cast<float*>(room_->slot(rank(), turn)), work.in + first, mine);
    Arrive(&room_->own().given, &given_, num_threads, given);
    if (!AwaitAll(&RoomMember::given, given)) return;
    for (uint32_t r = 0; r < ranks_of_stage_; ++r) {
      const float* from = Given(first_of_stage() + r, turn, work.in + first);
      for (uint64_t i = mine.begin; i < mine.end;) {
        const uint64_t row = (first + i) / width, column = (first + i) % width;
        const uint64_t size = std::min(width - column, mine.end - i);
        std::memcpy(work.out + row * work.width + r * width + column, from + i, size * sizeof(float));
        i += size;
      }
    }
  }
}

bool ShmCollective::AwaitPlace(uint64_t begin, uint64_t end) const {
  return std::all_of(lying_.begin(), lying_.end(), [=](const Lying& one) {
    const bool apart = one.end <= begin || end <= one.begin;
    return apart || room_->Await(&room_->member(taker()).taken, one.number, kSpinNs);
  });
}

void ShmCollective::Lay(uint64_t begin, uint64_t end, uint32_t number) {
  const SharedFlag& taken = room_->member(taker()).taken;
  const auto gone = [&](const Lying& one) { return taken.Reached(one.number); };
  lying_.erase(std::remove_if(lying_.begin(), lying_.end(), gone), lying_.end());
  lying_.push_back({begin, end, number});
}

// A rank gives to one other rank and takes from one, which may be the same. The rank that takes waits for each piece.
// Threads wait for their own rank's flag, too: it speaks for all of them, and so no thread runs ahead.
void ShmCollective::PassOn(const Passing& work, uint32_t thread, uint32_t num_threads) {
  const bool gives = this->gives(work);
  if (room_->failed() || (!gives && !takes(work))) return;
  const uint32_t from = gives ? rank() : giver();
  SharedFlag* passed = &room_->member(from).passed;
  SharedFlag* own = gives ? passed : &room_->own().taken;
  auto* copy = reinterpret_cast<float*>(room_->outbox(from) + work.place);
  const uint64_t end = work.place + work.count * sizeof(float);
  if (gives && !AwaitPlace(work.place, end)) return;
  uint32_t number = own->value();
  for (uint64_t first = 0; first < work.count; first += kPiece) {
    const uint64_t last = std::min(first + kPiece, work.count);
    const Part mine = ShareOf({first, last}, thread, num_threads);
    ++number;
    if (!gives && !room_->Await(passed, number, kSpinNs)) return;
    gives ? Copy(copy, work.data, mine) : Copy(work.data, copy, mine);
    if (passed_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      passed_.store(0, std::memory_order_relaxed);  // no thread arrives again before the flag is set
      if (gives && last == work.count) Lay(work.place, end, number);
      own->Set(number);
    }
    if (!room_->Await(own, number, kSpinNs)) return;
  }
}

}  // namespace llmc
