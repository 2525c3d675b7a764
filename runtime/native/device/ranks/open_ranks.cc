#include "device/ranks/open_ranks.h"

#include <algorithm>
#include <deque>

#include "collective/clocked.h"
#include "collective/mpi/mpi_group.h"
#include "collective/shm_group.h"
#include "device/ranks/leader_device.h"
#include "device/ranks/overlap_rule.h"
#include "device/ranks/rank_message.h"

namespace llmc {
namespace {

const char* const kNames[] = {"room", "rank", "ranks", "mpi", "in_flight", "overlap_sums"};
constexpr uint32_t kMostInFlight = 64, kMostOverlapRows = 1u << 20;

bool IsOfRanks(const std::pair<std::string, std::string>& option) {
  return std::any_of(std::begin(kNames), std::end(kNames), [&](const char* name) { return option.first == name; });
}

Status WrongRanks(const std::string& what) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, what); }

Status OpenRoom(const std::string& path, uint32_t rank, uint32_t ranks, std::shared_ptr<Group>* out) {
  std::shared_ptr<Room> room;
  LLMC_RETURN_IF_ERROR(Room::Open(path, rank, ranks, &room));
  *out = std::make_shared<ShmGroup>(std::move(room));
  return Status::Ok();
}

// The steps of another rank. It waits for one as late as it can, so that it begins each as soon as rank 0 does.
class FollowedSteps {
 public:
  explicit FollowedSteps(Device* device) : device_(device) {}

  Status Begin(const StepBatch& batch) {
    if (fences_.size() == device_->steps_in_flight()) LLMC_RETURN_IF_ERROR(End());
    LLMC_RETURN_IF_ERROR(device_->BeforeStep());
    fences_.emplace_back();
    return device_->Enqueue(batch, &fences_.back());
  }
  Status EndAll() {
    while (!fences_.empty()) LLMC_RETURN_IF_ERROR(End());
    return Status::Ok();
  }

 private:
  Status End() {
    const Fence oldest = fences_.front();
    fences_.pop_front();
    return device_->Await(oldest);
  }

  Device* device_;
  std::deque<Fence> fences_;
};

// Carries out one message of rank 0.
Status Obey(const RankMessage& said, Device* device, Collective* collective, FollowedSteps* steps) {
  switch (said.op) {
    case RankOp::kStep: return steps->Begin(said.batch);
    case RankOp::kCopyBlock: return device->CopyBlock(said.values[0], said.values[1]);
    case RankOp::kCopyState: return device->CopyState(said.values[0], said.values[1]);
    case RankOp::kReserve: device->Reserve(said.batch); return Status::Ok();
    case RankOp::kVisit: device->Visit(said.values[0]); return Status::Ok();
    case RankOp::kRelease: device->Release(said.values[0]); return Status::Ok();
    case RankOp::kRecall: device->Recall(); return Status::Ok();
    case RankOp::kCutSteps: return device->CutSteps(said.values[0]);
    case RankOp::kTimeSums: static_cast<void>(TimeOfSummedByte(collective)); return Status::Ok();
    case RankOp::kLoad:
    case RankOp::kEnd: break;
  }
  return Status::Error(LLMC_ERR_INTERNAL, "Rank 0 has said what no rank does here.");
}

}  // namespace

bool OpenRanks::Wants(const DeviceOptions& options) { return std::any_of(options.begin(), options.end(), IsOfRanks); }

Status OpenRanks::Open(const DeviceKind& kind, const DeviceOptions& options, std::unique_ptr<OpenDevice>* out) {
  DeviceOptions of_ranks, rest;
  for (const auto& option : options) (IsOfRanks(option) ? of_ranks : rest).push_back(option);
  std::string path, mpi;
  uint32_t rank = 0, ranks = 0, in_flight = 0, overlap = kMeasuredOverlap;
  OptionReader reader(kind.name, of_ranks);
  reader.Text("room", &path);
  reader.Text("mpi", &mpi);
  reader.Number("rank", kMostRanks - 1, &rank);
  reader.Number("ranks", kMostRanks, &ranks);
  reader.Number("in_flight", kMostInFlight, &in_flight);
  reader.Number("overlap_sums", kMostOverlapRows, &overlap);
  LLMC_RETURN_IF_ERROR(reader.Finish());
  if (overlap == 1) return WrongRanks("overlap_sums is 1, and a single row is not cut in two: give 0, or 2 and more.");
  if (path.empty() == mpi.empty()) {
    return WrongRanks(
        "A device of several ranks needs either the option room, the path of memory that the ranks share, or mpi, the "
        "library of the mpirun that has started them.");
  }
  std::unique_ptr<OpenDevice> own;
  LLMC_RETURN_IF_ERROR(kind.open(rest, &own));
  std::shared_ptr<Group> group;
  LLMC_RETURN_IF_ERROR(mpi.empty() ? OpenRoom(path, rank, ranks, &group) : MpiGroup::Open(mpi, ranks, &group));
  out->reset(new OpenRanks(std::move(group), std::move(own), in_flight, overlap));
  return Status::Ok();
}

OpenRanks::~OpenRanks() {
  if (group_->rank() == 0 && !used_) EndOthers();
}

void OpenRanks::EndOthers() const {
  static_cast<void>(RankSpeaker(group_).Say(RankOp::kEnd));
  group_->Leave();
}

std::vector<std::pair<std::string, std::string>> OpenRanks::Facts() const {
  auto facts = own_->Facts();
  facts.emplace_back("rank", std::to_string(group_->rank()));
  facts.emplace_back("ranks", std::to_string(group_->num_ranks()));
  facts.emplace_back("transport", group_->transport());
  return facts;
}

// Each step in flight has its part of an outbox.
std::shared_ptr<Collective> OpenRanks::NewCollective(const Artifact& artifact, uint32_t in_flight) const {
  return group_->NewCollective(artifact.ranks_of_stage(), in_flight * artifact.passed_bytes());
}

Status OpenRanks::CheckRole(bool leads) const {
  if (leads != (group_->rank() == 0)) {
    return WrongRanks("Rank " + std::to_string(group_->rank()) +
                      (leads ? " follows rank 0, which has the engine; call "
                               "llmc_device_follow."
                             : " has the engine, which the others follow."));
  }
  if (used_.exchange(true)) return WrongRanks("A device of several ranks runs one engine; open another one.");
  return Status::Ok();
}

Status OpenRanks::Load(std::shared_ptr<const Artifact> artifact, const LoadOptions& options,
                       std::unique_ptr<Device>* out) const {
  if (options.beside != nullptr) {
    return WrongRanks("A draft model is for one rank and this device has " + std::to_string(group_->num_ranks()) +
                      "; leave the draft out.");
  }
  LLMC_RETURN_IF_ERROR(CheckRole(true));
  auto speaker = std::make_unique<RankSpeaker>(group_);
  LoadOptions own = options;
  own.steps_in_flight = artifact->num_stages() == 1 ? 1 : in_flight_ == 0 ? artifact->num_stages() : in_flight_;
  LLMC_RETURN_IF_ERROR(
      speaker->Say({own.num_blocks, own.num_states, own.timed ? 1u : 0u, own.steps_in_flight, artifact->Identity()}));
  std::shared_ptr<Collective> collective = NewCollective(*artifact, own.steps_in_flight);
  if (collective == nullptr) return group_->status();
  const auto clocked = std::make_shared<ClockedCollective>(std::move(collective));
  own.collective = clocked;
  const uint64_t summed_bytes = SummedBytesOfRow(*artifact);
  std::unique_ptr<Device> device;
  if (const Status loaded = own_->Load(std::move(artifact), own, &device); !loaded.ok()) {
    group_->Fail(group_->rank(), loaded.message);  // the others may wait for a result of this one
    EndOthers();
    return loaded;
  }
  return LeaderDevice::Create(group_, std::move(speaker), std::move(device), clocked, overlap_, summed_bytes, out);
}

Status OpenRanks::Follow(const std::shared_ptr<const Artifact>& artifact) const {
  LLMC_RETURN_IF_ERROR(CheckRole(false));
  const Status ended = FollowSteps(artifact);
  if (!ended.ok()) group_->Fail(group_->rank(), ended.message);
  group_->Leave();
  return ended;
}

Status OpenRanks::FollowSteps(const std::shared_ptr<const Artifact>& artifact) const {
  RankListener listener(group_);
  RankMessage said;
  LLMC_RETURN_IF_ERROR(listener.Hear(&said));
  if (said.op == RankOp::kEnd) return Status::Ok();
  if (said.op != RankOp::kLoad) return Status::Error(LLMC_ERR_INTERNAL, "Rank 0 has said what no rank does here.");
  // Before the collective: ranks of other stages would wait for each other forever.
  if (said.load.artifact != artifact->Identity()) {
    return WrongRanks(
        "it has another artifact, or another llmc, than rank 0: install rank 0's llmc and copy its "
        "artifact to " +
        artifact->directory());
  }
  LoadOptions options;
  options.num_blocks = said.load.num_blocks;
  options.num_states = said.load.num_states;
  options.timed = said.load.timed != 0;
  options.steps_in_flight = said.load.steps_in_flight;
  options.collective = NewCollective(*artifact, options.steps_in_flight);
  if (options.collective == nullptr) return group_->status();
  std::unique_ptr<Device> device;
  LLMC_RETURN_IF_ERROR(own_->Load(artifact, options, &device));
  LLMC_RETURN_IF_ERROR(group_->TellLoaded());
  FollowedSteps steps(device.get());
  for (;;) {
    LLMC_RETURN_IF_ERROR(listener.Hear(&said));
    if (said.op == RankOp::kEnd) return steps.EndAll();
    LLMC_RETURN_IF_ERROR(Obey(said, device.get(), options.collective.get(), &steps));
  }
}

}  // namespace llmc
