#include "collective/mpi/mpi_collective.h"

#include <algorithm>
#include <cstring>

namespace llmc {
namespace {

constexpr uint64_t kMpiSpinNs = 1'000'000;

}  // namespace

// Gathers the floats of all ranks of the stage into given_.
bool MpiCollective::GatherAll(const float* from, uint64_t count) {
  given_.resize(count * ranks_of_stage_);
  MpiRequest request;
  const Status begun = group_->mpi().AllGather(MpiChannel::kSums, from, MpiBytes(count), given_.data(), &request);
  return group_->Await(begun, &request, kMpiSpinNs).ok();
}

void MpiCollective::AllReduce(const Reduction& work, uint32_t thread, uint32_t /*num_threads*/) {
  if (thread != 0) return;
  BeginReduce(work, 0);
  FinishReduce(0);
}

// Errors come again from FinishReduce.
void MpiCollective::BeginReduce(const Reduction& work, uint32_t lane) {
  if (!group_->failed()) lanes_[lane].Begin(work);
}

// Sums of the other lane move on meanwhile.
void MpiCollective::FinishReduce(uint32_t lane) {
  if (group_->failed()) return;
  const auto move = [&](bool* done) {
    for (MpiSum& sum : lanes_) LLMC_RETURN_IF_ERROR(sum.Advance());
    *done = lanes_[lane].done();
    return Status::Ok();
  };
  static_cast<void>(group_->AwaitMoves(move, kMpiSpinNs));
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
    const Status begun = group_->mpi().Send(MpiTag::kPassedOn, copy, bytes, taker(), &sent_.back().request);
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
    const Status begun = group_->mpi().Receive(MpiTag::kPassedOn, work.data + first, bytes, giver(), &request);
    if (!group_->Await(begun, &request, kMpiSpinNs).ok()) return;
  }
}

// A test of one operation moves all of them on. Errors come again from the operation that this rank waits for next.
void MpiCollective::Tend() {
  for (MpiSum& sum : lanes_) {
    if (!sum.done()) static_cast<void>(sum.Advance());
  }
  for (bool done = true; done && !sent_.empty();) {
    if (!group_->mpi().Test(&sent_.front().request, &done).ok()) return;
    if (done) sent_.pop_front();
  }
}

}  // namespace llmc
