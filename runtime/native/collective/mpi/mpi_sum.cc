#include "collective/mpi/mpi_sum.h"

#include <algorithm>
#include <cstring>

#include "collective/sum.h"

namespace llmc {
namespace {

// From this size on, each rank adds up one share: that takes one more wait for all ranks, but sends less.
constexpr uint64_t kMpiSharedFloats = (32u << 10) / sizeof(float);
constexpr uint32_t kMpiFewRanks = 2;  // up to this many ranks send as much either way

}  // namespace

void MpiSum::Begin(const Reduction& work) {
  work_ = work;
  first_ = 0;
  if (error_.ok()) error_ = BeginPiece();
}

Status MpiSum::BeginPiece() {
  const uint64_t total = work_.rows * work_.width;
  if (first_ == total) {
    phase_ = Phase::kDone;
    return Status::Ok();
  }
  count_ = std::min(kMpiPiece, total - first_);
  const float* from = work_.in + first_;
  return ranks_ <= kMpiFewRanks || count_ < kMpiSharedFloats ? GatherParts(from) : ExchangeShares(from);
}

Status MpiSum::GatherParts(const float* from) {
  phase_ = Phase::kParts;
  given_.resize(count_ * ranks_);
  return mpi_->AllGather(channel_, from, MpiBytes(count_), given_.data(), &request_);
}

Status MpiSum::ExchangeShares(const float* from) {
  phase_ = Phase::kShares;
  const auto begin = [&](uint32_t r) { return count_ * r / ranks_; };
  const uint64_t own = begin(place_ + 1) - begin(place_);
  bytes_.resize(ranks_), offsets_.resize(ranks_), own_bytes_.resize(ranks_), own_offsets_.resize(ranks_);
  for (uint32_t r = 0; r < ranks_; ++r) {
    offsets_[r] = MpiBytes(begin(r));
    bytes_[r] = MpiBytes(begin(r + 1) - begin(r));
    own_offsets_[r] = MpiBytes(own * r);
    own_bytes_[r] = MpiBytes(own);
  }
  given_.resize(own * ranks_);
  return mpi_->AllToAll(channel_, from, bytes_.data(), offsets_.data(), given_.data(), own_bytes_.data(),
                        own_offsets_.data(), &request_);
}

Status MpiSum::AddShares() {
  phase_ = Phase::kSums;
  const uint64_t own = given_.size() / ranks_;
  for (uint32_t r = 1; r < ranks_; ++r) AddTo(given_.data(), given_.data() + own * r, own);
  sums_.resize(count_);
  return mpi_->AllGatherParts(channel_, given_.data(), sums_.data(), bytes_.data(), offsets_.data(), &request_);
}

Status MpiSum::EndPiece(float* sum) {
  AddBehindSum(work_, sum, first_, first_ + count_);
  std::memcpy(work_.out + first_, sum, count_ * sizeof(float));
  first_ += count_;
  return BeginPiece();
}

Status MpiSum::Arrived() {
  switch (phase_) {
    case Phase::kParts:
      for (uint32_t r = 1; r < ranks_; ++r) AddTo(given_.data(), given_.data() + count_ * r, count_);
      return EndPiece(given_.data());
    case Phase::kShares: return AddShares();
    case Phase::kSums: return EndPiece(sums_.data());
    case Phase::kDone: break;
  }
  return Status::Ok();
}

Status MpiSum::Advance() {
  for (bool arrived = true; arrived && error_.ok() && !done();) {
    error_ = mpi_->Test(&request_, &arrived);
    if (error_.ok() && arrived) error_ = Arrived();
  }
  return error_;
}

}  // namespace llmc
