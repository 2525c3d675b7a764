#include "collective/mpi/mpi_group.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "collective/mpi/mpi_collective.h"
#include "collective/mpi/rank_greeting.h"
#include "core/clock.h"
#include "core/pause.h"

namespace llmc {
namespace {

constexpr uint64_t kMpiYieldNs = 20'000;  // after spinning for so long, the CPU is yielded between polls
constexpr uint64_t kShortlyNs = 5'000'000;  // time of short sleeps, before long ones
constexpr timespec kShortSleep = {0, 50'000}, kLongSleep = {0, 500'000};
constexpr uint64_t kLeaveNs = 3'000'000'000;
constexpr uint64_t kSecondNs = 1'000'000'000,
                   kDivideNs = 60 * kSecondNs;  // from the first rank that divides the channel to the last one
constexpr uint64_t kMpiReportNs = 1'000'000'000;  // time for the links to report which rank broke an operation
constexpr uint64_t kMostMpiBytes = 1u << 30;  // of one operation, whose count is an int
constexpr uint64_t kSayNs = 50'000;  // rank 0 spins for so long before it sleeps
constexpr std::size_t kMostSaid = 256;  // messages that later stages have not heard

// Polls until done() or stop() is true: spins, then yields, then sleeps. spin_ns: time before it sleeps.
template <typename Done, typename Stop>
void PollMpi(uint64_t spin_ns, const Done& done, const Stop& stop) {
  const uint64_t start = MonotonicNs();
  while (!done() && !stop()) {
    const uint64_t spent = MonotonicNs() - start;
    if (spent < spin_ns) {
      spent < kMpiYieldNs ? Pause() : static_cast<void>(::sched_yield());
    } else {
      ::nanosleep(spent < spin_ns + kShortlyNs ? &kShortSleep : &kLongSleep, nullptr);
    }
  }
}

// Waits for an operation before the ranks are linked.
Status AwaitUnlinked(MpiLibrary* mpi, const Status& begun, MpiRequest* request) {
  Status status = begun;
  bool done = false;
  const auto test = [&] {
    if (status.ok()) status = mpi->Test(request, &done);
    return done;
  };
  PollMpi(0, test, [&] { return !status.ok(); });
  return status;
}

Status Greet(MpiLibrary* mpi, uint32_t num_ranks) {
  const RankGreeting own = GreetingOf(num_ranks);
  std::vector<RankGreeting> all(mpi->num_ranks());
  MpiRequest request;
  const Status begun = mpi->AllGather(MpiChannel::kSteps, &own, sizeof(own), all.data(), &request);
  LLMC_RETURN_IF_ERROR(AwaitUnlinked(mpi, begun, &request));
  return CheckGreetings(all);
}

}  // namespace

Status MpiGroup::Open(const std::string& library, uint32_t num_ranks, std::shared_ptr<Group>* out) {
  std::unique_ptr<MpiLibrary> mpi;
  LLMC_RETURN_IF_ERROR(MpiLibrary::Start(library, &mpi));
  if (const Status agreed = Greet(mpi.get(), num_ranks); !agreed.ok()) {
    mpi->Finish(kLeaveNs);
    return agreed;
  }
  RankInvitation invitation{};
  std::unique_ptr<RankLinks> links;
  if (mpi->rank() == 0) LLMC_RETURN_IF_ERROR(RankLinks::Listen(mpi->num_ranks(), &invitation, &links));
  MpiRequest request;
  const Status begun = mpi->Broadcast(MpiChannel::kSteps, &invitation, sizeof(invitation), &request);
  LLMC_RETURN_IF_ERROR(AwaitUnlinked(mpi.get(), begun, &request));
  if (mpi->rank() == 0) {
    LLMC_RETURN_IF_ERROR(links->AwaitOthers());
  } else {
    LLMC_RETURN_IF_ERROR(RankLinks::Join(invitation, mpi->rank(), mpi->num_ranks(), &links));
  }
  out->reset(new MpiGroup(std::move(mpi), std::move(links)));
  return Status::Ok();
}

Status MpiGroup::Await(const Status& begun, MpiRequest* request, uint64_t spin_ns, uint64_t most_ns) {
  const auto test = [&](bool* done) { return begun.ok() ? mpi_->Test(request, done) : begun; };
  return AwaitMoves(test, spin_ns, most_ns);
}

// A lost rank breaks operations of others: the links know which rank it was.
Status MpiGroup::AwaitMoves(const std::function<Status(bool* done)>& move, uint64_t spin_ns, uint64_t most_ns) {
  Status status;
  bool done = false;
  const uint64_t start = MonotonicNs();
  const auto moved = [&] {
    if (status.ok()) status = move(&done);
    return status.ok() && done;
  };
  PollMpi(spin_ns, moved, [&] { return !status.ok() || failed() || MonotonicNs() - start > most_ns; });
  if (!done && status.ok() && !failed()) {
    Fail(rank(), "it has waited " + std::to_string(most_ns / kSecondNs) + " s for a rank that lives but does not come");
  } else if (!status.ok()) {
    const uint64_t end = MonotonicNs() + kMpiReportNs;
    PollMpi(0, [&] { return failed(); }, [&] { return MonotonicNs() > end; });
    Fail(rank(), status.message);
  }
  return this->status();
}

Status MpiGroup::Broadcast(void* data, uint64_t bytes, uint64_t spin_ns) {
  if (failed()) return status();
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t now = std::min(bytes - done, kMostMpiBytes);
    MpiRequest request;
    const Status begun =
        mpi_->Broadcast(MpiChannel::kSteps, static_cast<char*>(data) + done, static_cast<int>(now), &request);
    LLMC_RETURN_IF_ERROR(Await(begun, &request, spin_ns));
    done += now;
  }
  return Status::Ok();
}

Status MpiGroup::Say(const void* data, uint64_t bytes) {
  if (has_stages()) return SayToStages(static_cast<const char*>(data), bytes);
  return Broadcast(const_cast<void*>(data), bytes, kSayNs);  // MPI's root only reads it
}

Status MpiGroup::Hear(void* data, uint64_t bytes, uint64_t spin_ns) {
  if (!has_stages()) return Broadcast(data, bytes, spin_ns);
  if (failed()) return status();
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t now = std::min(bytes - done, kMostMpiBytes);
    MpiRequest request;
    const Status begun =
        mpi_->Receive(MpiTag::kSaid, static_cast<char*>(data) + done, static_cast<int>(now), 0, &request);
    LLMC_RETURN_IF_ERROR(Await(begun, &request, spin_ns));
    done += now;
  }
  return Status::Ok();
}

// Not a broadcast: a long one ends when all ranks have come, and those of later stages still compute the steps before.
// Ranks of this stage hear at once, as they have nothing else to do.
Status MpiGroup::SayToStages(const char* data, uint64_t bytes) {
  if (failed()) return status();
  said_.push_back({std::vector<char>(data, data + bytes), {}});
  const char* text = said_.back().text.data();
  for (uint32_t to = 1; to < num_ranks(); ++to) {
    for (uint64_t done = 0; done < bytes; done += kMostMpiBytes) {
      const uint64_t now = std::min(bytes - done, kMostMpiBytes);
      MpiRequest request;
      const Status begun = mpi_->Send(MpiTag::kSaid, text + done, static_cast<int>(now), to, &request);
      if (!begun.ok()) return Await(begun, &request, kSayNs);
      said_.back().sends.push_back(request);
    }
  }
  const uint64_t near = (ranks_of_stage_ - 1) * ((bytes + kMostMpiBytes - 1) / kMostMpiBytes);
  std::vector<MpiRequest>& sends = said_.back().sends;
  for (uint64_t i = 0; i < near; ++i) LLMC_RETURN_IF_ERROR(Await(Status::Ok(), &sends[i], kSayNs));
  sends.erase(sends.begin(), sends.begin() + static_cast<std::ptrdiff_t>(near));
  for (; said_.size() > kMostSaid; said_.pop_front()) {
    for (MpiRequest& send : said_.front().sends) LLMC_RETURN_IF_ERROR(Await(Status::Ok(), &send, kSayNs));
  }
  return ForgetHeard();
}

// Drops what all ranks have heard.
Status MpiGroup::ForgetHeard() {
  for (; !said_.empty(); said_.pop_front()) {
    std::vector<MpiRequest>& sends = said_.front().sends;
    while (!sends.empty()) {
      bool done = false;
      const Status tested = mpi_->Test(&sends.back(), &done);
      if (!tested.ok()) return Await(tested, &sends.back(), 0);
      if (!done) return Status::Ok();
      sends.pop_back();
    }
  }
  return Status::Ok();
}

Status MpiGroup::Meet(uint64_t most_ns) {
  if (failed()) return status();
  MpiRequest request;
  const Status begun = mpi_->Barrier(MpiChannel::kSteps, &request);
  return Await(begun, &request, 0, most_ns);
}

// A barrier first: all ranks know of the end before the first link ends. A rank that is lost here delays the others for
// kLeaveNs at most.
void MpiGroup::Leave() {
  if (failed()) return;
  MpiRequest request;
  Status status = mpi_->Barrier(MpiChannel::kSteps, &request);
  bool done = false;
  const uint64_t end = MonotonicNs() + kLeaveNs;
  const auto test = [&] {
    if (status.ok()) status = ForgetHeard();
    if (status.ok() && !done) status = mpi_->Test(&request, &done);
    return done && said_.empty();
  };
  PollMpi(0, test, [&] { return !status.ok() || failed() || MonotonicNs() > end; });
  if (!done || !said_.empty()) return;
  links_->Leave();
  mpi_->Finish(kLeaveNs);
}

// Divide waits for all ranks and cannot be given up: it begins when they are known to have come.
std::shared_ptr<Collective> MpiGroup::NewCollective(uint32_t ranks_of_stage, uint64_t outbox_bytes) {
  if (!Meet(kDivideNs).ok()) return nullptr;
  Pages outbox;
  if (const Status made = Pages::Allocate(outbox_bytes, "what is passed on", &outbox); !made.ok()) {
    Fail(rank(), made.message);
    return nullptr;
  }
  if (ranks_of_stage != num_ranks()) {
    if (const Status divided = mpi_->Divide(ranks_of_stage); !divided.ok()) {
      Fail(rank(), divided.message);
      return nullptr;
    }
  }
  ranks_of_stage_ = ranks_of_stage;
  return std::make_shared<MpiCollective>(shared_from_this(), ranks_of_stage, std::move(outbox));
}

}  // namespace llmc
