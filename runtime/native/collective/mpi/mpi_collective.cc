#include "collective/mpi/mpi_collective.h"

#include <algorithm>
#include <cstring>

#include "collective/sum.h"

namespace llmc {
namespace {

constexpr uint64_t kMpiPiece = uint64_t{1} << 20;  // most floats per MPI operation
// From this size on, each rank adds up one part: that takes one more wait for all ranks, but sends less.
constexpr uint64_t kMpiSharedFloats = (32u << 10) / sizeof(float);
constexpr uint32_t kMpiFewRanks = 2;  // up to this many ranks send as much either way
constexpr uint64_t kMpiSpinNs = 1'000'000;

int MpiBytes(uint64_t floats) { return static_cast<int>(floats * sizeof(float)); }

}  // namespace

// Gathers the floats of all ranks of the stage into given_.
bool MpiCollective::GatherAll(const float* from, uint64_t count) {
  given_.resize(count * ranks_of_stage_);
  MpiRequest request;
  const Status begun = group_->mpi().AllGather(MpiChannel::kSums, from, MpiBytes(count), given_.data(), &request);
  return group_->Await(begun, &request, kMpiSpinNs).ok();
}

// Adds up the floats of all ranks of the stage into sums_; each rank adds up one part.
bool MpiCollective::SumByParts(const float* from, uint64_t count) {
  const uint32_t ranks = ranks_of_stage_;
  const auto begin = [&](uint32_t r) { return count * r / ranks; };
  const uint32_t place = rank() - first_of_stage();
  const uint64_t own = begin(place + 1) - begin(place);
  bytes_.resize(ranks), offsets_.resize(ranks), own_bytes_.resize(ranks), own_offsets_.resize(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    offsets_[r] = MpiBytes(begin(r));
    bytes_[r] = MpiBytes(begin(r + 1) - begin(r));
    own_offsets_[r] = MpiBytes(own * r);
    own_bytes_[r] = MpiBytes(own);
  }
  given_.resize(own * ranks);
  sums_.resize(count);
  MpiRequest request;
  Status begun = group_->mpi().AllToAll(MpiChannel::kSums, from, bytes_.data(), offsets_.data(), given_.data(),
                                        own_bytes_.data(), own_offsets_.data(), &request);
  if (!group_->Await(begun, &request, kMpiSpinNs).ok()) return false;
  for (uint32_t r = 1; r < ranks; ++r) AddTo(given_.data(), given_.data() + own * r, own);
  begun = group_->mpi().AllGatherParts(MpiChannel::kSums, given_.data(), sums_.data(), bytes_.data(), offsets_.data(),
                                       &request);
  return group_->Await(begun, &request, kMpiSpinNs).ok();
}

void MpiCollective::AllReduce(const Reduction& work, uint32_t thread, uint32_t /*num_threads*/) {
  if (thread != 0 || group_->failed()) return;
  const uint64_t total = work.rows * work.width;
  for (uint64_t first = 0; first < total; first += kMpiPiece) {
    const uint64_t count = std::min(kMpiPiece, total - first);
    float* sum = nullptr;
    float* out = work.out + first;
    if (ranks_of_stage_ <= kMpiFewRanks || count < kMpiSharedFloats) {
      if (!GatherAll(work.in + first, count)) return;
      for (uint32_t r = 1; r < ranks_of_stage_; ++r) AddTo(given_.data(), given_.data() + count * r, count);
      sum = given_.data();
    } else {
      if (!SumByParts(work.in + first, count)) return;
      sum = sums_.data();
    }
    AddBehindSum(work, sum, first, first + count);
    std::memcpy(out, sum, count * sizeof(float));
  }
}

void MpiCollective::AllGather(const Gathering& work, uint32_t thread, uint32_t /*num_threads*/) {
  if (thread != 0 || group_->failed()) return;
  const uint64_t width = work.width / ranks_of_stage_, total = work.rows * width;
  for (uint64_t first = 0; first < total; first += kMpiPiece) {
    const uint64_t count = std::min(kMpiPiece, total - first);
    if (!GatherAll(work.in + first, count)) return;
    for (uint32_t r = 0; r < ranks_of_stage_; ++r) {
      const float* from = given_.data() + count * r;
      for (uint64_t i = 0; i < count;) {
        const uint64_t row = (first + i) / width, column = (first + i) % width;
        const uint64_t size = std::min(width - column, count - i);
        std::memcpy(work.out + row * work.width + r * width + column, from + i, size * sizeof(float));
        i += size;
      }
    }
  }
}

MpiCollective::~MpiCollective() {
  for (Sent& one : sent_) {
    if (!group_->Await(Status::Ok(), &one.request, kMpiSpinNs).ok()) return;
  }
}

void MpiCollective::PassOn(const Passing& work, uint32_t thread, uint32_t /*num_threads*/) {
  if (thread != 0 || group_->failed()) return;
  if (gives(work)) return Give(work);
  if (takes(work)) Take(work);
}

// Messages are taken in order: what lies at this place goes after all that was given before it.
void MpiCollective::Give(const Passing& work) {
  for (uint64_t first = 0; first < work.count; first += kMpiPiece) {
    const int bytes = MpiBytes(std::min(kMpiPiece, work.count - first));
    const uint64_t begin = work.place + first * sizeof(float), end = begin + static_cast<uint64_t>(bytes);
    while (
        std::any_of(sent_.begin(), sent_.end(), [=](const Sent& one) { return one.begin < end && begin < one.end; })) {
      if (!group_->Await(Status::Ok(), &sent_.front().request, kMpiSpinNs).ok()) return;
      sent_.pop_front();
    }
    char* copy = outbox_.data() + begin;
    std::memcpy(copy, work.data + first, static_cast<uint64_t>(bytes));
    sent_.push_back({begin, end, {}});
    const Status begun = group_->mpi().Send(copy, bytes, taker(), &sent_.back().request);
    if (!begun.ok()) {
      sent_.pop_back();
      group_->Fail(rank(), begun.message);
      return;
    }
  }
  Tend();
}

void MpiCollective::Take(const Passing& work) {
  for (uint64_t first = 0; first < work.count; first += kMpiPiece) {
    const int bytes = MpiBytes(std::min(kMpiPiece, work.count - first));
    MpiRequest request;
    const Status begun = group_->mpi().Receive(work.data + first, bytes, giver(), &request);
    if (!group_->Await(begun, &request, kMpiSpinNs).ok()) return;
  }
}

// A test of one operation moves all of them on. Errors come again from the operation that this rank waits for next.
void MpiCollective::Tend() {
  for (bool done = true; done && !sent_.empty();) {
    if (!group_->mpi().Test(&sent_.front().request, &done).ok()) return;
    if (done) sent_.pop_front();
  }
}

}  // namespace llmc
