#include "device/cuda/cu_nccl.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace llmc {
namespace {

// What a rank tells the others of its stage, as words that the link carries unchanged.
struct NcclGreeting {
  CollectiveWay way;
  int32_t version;  // 0: it has no library
  CuUuid gpu;
  NcclId id;  // of the first rank
};
constexpr uint64_t kGreetingFloats = sizeof(NcclGreeting) / sizeof(float);
static_assert(sizeof(NcclGreeting) % sizeof(float) == 0);

std::vector<NcclGreeting> Greet(const NcclGreeting& own, Collective* ranks) {
  std::vector<NcclGreeting> all(ranks->ranks_of_stage());
  std::vector<float> said(kGreetingFloats), heard(kGreetingFloats * all.size());
  std::memcpy(said.data(), &own, sizeof(own));
  ranks->AllGather({said.data(), heard.data(), 1, heard.size()}, 0, 1);
  std::memcpy(all.data(), heard.data(), heard.size() * sizeof(float));
  return all;
}

// Why these ranks cannot use NCCL, in a sentence; kNone: they can.
NcclRefusal Refusal(const std::vector<NcclGreeting>& all, std::string* why) {
  const auto rank = [](size_t r) { return "rank " + std::to_string(r) + " of its stage"; };
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].way == CollectiveWay::kHost) {
      *why = "NCCL is demanded and " + rank(r) + " has collective=host; give all ranks the same option.";
      return NcclRefusal::kChosen;
    }
  }
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].version != 0) continue;
    *why = "NCCL is demanded and " + rank(r) +
           " cannot load it; install NCCL 2.14 or later, or name its library with LLMC_NCCL_LIBRARY.";
    return NcclRefusal::kNoLibrary;
  }
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r].version != all[0].version) {
      *why = "NCCL is " + NcclVersionText(all[0].version) + " on " + rank(0) + " and " +
             NcclVersionText(all[r].version) + " on " + rank(r) + "; install the same version everywhere.";
      return NcclRefusal::kVersions;
    }
    for (size_t other = 0; other < r; ++other) {
      if (std::memcmp(&all[r].gpu, &all[other].gpu, sizeof(CuUuid)) != 0) continue;
      *why = "NCCL needs a GPU for each rank, and " + rank(other) + " and " + rank(r) +
             " have the same; name others with --device-number, or choose collective=host.";
      return NcclRefusal::kSameGpu;
    }
  }
  return NcclRefusal::kNone;
}

}  // namespace

Status CuNccl::Join(const CuMachinePtr& machine, const NcclChoice& choice, std::shared_ptr<Collective> ranks,
                    std::shared_ptr<const CuNccl>* out, NcclRefusal* refusal) {
  std::shared_ptr<const NcclLibrary> library;
  NcclGreeting own{};
  own.way = choice.way;
  if (choice.way != CollectiveWay::kHost && NcclLibrary::Load(choice.library, &library).ok()) {
    if (library->GetVersion(&own.version) != kNcclSuccess) own.version = 0;
    const bool first = ranks->rank() % ranks->ranks_of_stage() == 0;
    if (first && library->GetUniqueId(&own.id) != kNcclSuccess) own.version = 0;
  }
  LLMC_RETURN_IF_ERROR(machine->Identify(&own.gpu));
  const std::vector<NcclGreeting> all = Greet(own, ranks.get());
  LLMC_RETURN_IF_ERROR(ranks->status());
  std::string why;
  *refusal = Refusal(all, &why);
  if (*refusal != NcclRefusal::kNone) {
    const bool demanded =
        std::any_of(all.begin(), all.end(), [](const NcclGreeting& one) { return one.way == CollectiveWay::kNccl; });
    return demanded ? Status::Error(LLMC_ERR_NOT_FOUND, why) : Status::Ok();
  }
  std::shared_ptr<CuNccl> made(new CuNccl(machine, std::move(library), std::move(ranks)));
  LLMC_RETURN_IF_ERROR(made->Open(all[0].id));
  *out = std::move(made);
  return Status::Ok();
}

Status CuNccl::Open(const NcclId& id) {
  NcclConfig config;
  const auto ranks = static_cast<int32_t>(ranks_->ranks_of_stage());
  const auto rank = static_cast<int32_t>(ranks_->rank() % ranks_->ranks_of_stage());
  return Settle("Joining the ranks by NCCL", library_->CommInitRank(&comm_, ranks, id, rank, &config));
}

CuNccl::~CuNccl() {
  const CuScope scope(*machine_);
  if (comm_ != nullptr && !aborted_) library_->CommAbort(comm_);
  if (aborting_.joinable()) aborting_.join();
}

Status CuNccl::Check() const {
  if (aborted_) return failed_;
  LLMC_RETURN_IF_ERROR(ranks_->status());
  NcclResult code = kNcclSuccess;
  const NcclResult asked = library_->CommGetAsyncError(comm_, &code);
  if (asked != kNcclSuccess) code = asked;
  return code == kNcclSuccess || code == kNcclInProgress ? Status::Ok() : NcclError("Exchanging results by NCCL", code);
}

Status CuNccl::OrAbort(Status status) const {
  if (!status.ok() && !aborted_) {
    aborted_ = true;
    failed_ = status;
    // NCCL may wait there for graphs that gather: they are destroyed before this object is.
    if (comm_ != nullptr) aborting_ = std::thread([library = library_, comm = comm_] { library->CommAbort(comm); });
  }
  return status;
}

Status CuNccl::Settle(const char* doing, NcclResult code) const {
  while (code == kNcclInProgress) {
    std::this_thread::yield();
    LLMC_RETURN_IF_ERROR(OrAbort(ranks_->status()));
    const NcclResult asked = library_->CommGetAsyncError(comm_, &code);
    if (asked != kNcclSuccess) code = asked;
  }
  return code == kNcclSuccess ? Status::Ok() : OrAbort(NcclError(doing, code));
}

Status CuNccl::AllGather(CuPointer from, CuPointer to, uint64_t count, CuStreamHandle stream) const {
  if (aborted_) return failed_;
  // Addresses on the device.
  const void* const out = reinterpret_cast<const void*>(from);  // NOLINT(performance-no-int-to-ptr)
  void* const in = reinterpret_cast<void*>(to);  // NOLINT(performance-no-int-to-ptr)
  return Settle("Exchanging results by NCCL", library_->AllGather(out, in, count, kNcclFloat32, comm_, stream));
}

Status AwaitStream(const CuMachine& machine, const CuNccl* nccl, CuStreamHandle stream, CuResult* code) {
  if (nccl != nullptr) {
    const Status status = nccl->Await([&] { return machine->StreamQuery(stream); }, code);
    if (!status.ok()) machine->StreamSynchronize(stream);  // nothing there waits for a rank any more
    return status;
  }
  *code = machine->StreamSynchronize(stream);
  return Status::Ok();
}

}  // namespace llmc
