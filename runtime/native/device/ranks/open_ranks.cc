#include "device/ranks/open_ranks.h"

#include <algorithm>

#include "collective/shm_collective.h"
#include "device/ranks/leader_device.h"
#include "device/ranks/rank_message.h"

namespace llmc {
namespace {

const char* const kNames[] = {"room", "rank", "ranks"};

bool IsOfRanks(const std::pair<std::string, std::string>& option) {
  return std::any_of(std::begin(kNames), std::end(kNames), [&](const char* name) { return option.first == name; });
}

Status WrongRanks(const std::string& what) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, what); }

// Does one thing that rank 0 has said.
Status Obey(const RankMessage& said, Device* device) {
  switch (said.op) {
    case RankOp::kStep: {
      Fence fence = 0;
      const float* logits = nullptr;
      LLMC_RETURN_IF_ERROR(device->BeforeStep());
      LLMC_RETURN_IF_ERROR(device->Enqueue(said.batch, &fence));
      return device->Wait(fence, &logits);
    }
    case RankOp::kCopyBlock: return device->CopyBlock(said.values[0], said.values[1]);
    case RankOp::kReserve: device->Reserve(said.batch); return Status::Ok();
    case RankOp::kVisit: device->Visit(said.values[0]); return Status::Ok();
    case RankOp::kRelease: device->Release(said.values[0]); return Status::Ok();
    case RankOp::kRecall: device->Recall(); return Status::Ok();
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
  std::string path;
  uint32_t rank = 0, ranks = 0;
  OptionReader reader(kind.name, of_ranks);
  reader.Text("room", &path);
  reader.Number("rank", kMostRanks - 1, &rank);
  reader.Number("ranks", kMostRanks, &ranks);
  LLMC_RETURN_IF_ERROR(reader.Finish());
  if (path.empty()) {
    return WrongRanks(
        "The options rank and ranks of a device need the option room, the path of memory that the ranks share.");
  }
  std::unique_ptr<OpenDevice> own;
  LLMC_RETURN_IF_ERROR(kind.open(rest, &own));
  std::shared_ptr<Room> room;
  LLMC_RETURN_IF_ERROR(Room::Open(path, rank, ranks, &room));
  out->reset(new OpenRanks(std::move(room), std::move(own)));
  return Status::Ok();
}

OpenRanks::~OpenRanks() {
  if (room_->rank() == 0 && !used_) static_cast<void>(RankSpeaker(room_).Say(RankOp::kEnd));
}

std::vector<std::pair<std::string, std::string>> OpenRanks::Facts() const {
  auto facts = own_->Facts();
  facts.emplace_back("rank", std::to_string(room_->rank()));
  facts.emplace_back("ranks", std::to_string(room_->num_ranks()));
  return facts;
}

Status OpenRanks::CheckRole(bool leads) const {
  if (leads != (room_->rank() == 0)) {
    return WrongRanks("Rank " + std::to_string(room_->rank()) +
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
    return WrongRanks("A draft model is for one rank and this device has " + std::to_string(room_->num_ranks()) +
                      "; leave the draft out.");
  }
  LLMC_RETURN_IF_ERROR(CheckRole(true));
  auto speaker = std::make_unique<RankSpeaker>(room_);
  LLMC_RETURN_IF_ERROR(speaker->Say(RankOp::kLoad, options.num_blocks, options.timed ? 1 : 0));
  LoadOptions own = options;
  own.collective = std::make_shared<ShmCollective>(room_);
  std::unique_ptr<Device> device;
  if (const Status loaded = own_->Load(std::move(artifact), own, &device); !loaded.ok()) {
    static_cast<void>(speaker->Say(RankOp::kEnd));
    return loaded;
  }
  return LeaderDevice::Create(room_, std::move(speaker), std::move(device), out);
}

Status OpenRanks::Follow(const std::shared_ptr<const Artifact>& artifact) const {
  LLMC_RETURN_IF_ERROR(CheckRole(false));
  const Status ended = FollowSteps(artifact);
  if (!ended.ok()) room_->Fail(room_->rank(), ended.message);
  room_->own().left.store(1, std::memory_order_release);
  return ended;
}

Status OpenRanks::FollowSteps(const std::shared_ptr<const Artifact>& artifact) const {
  RankListener listener(room_);
  RankMessage said;
  LLMC_RETURN_IF_ERROR(listener.Hear(&said));
  if (said.op == RankOp::kEnd) return Status::Ok();
  if (said.op != RankOp::kLoad) return Status::Error(LLMC_ERR_INTERNAL, "Rank 0 has said what no rank does here.");
  LoadOptions options;
  options.num_blocks = said.values[0];
  options.timed = said.values[1] != 0;
  options.collective = std::make_shared<ShmCollective>(room_);
  std::unique_ptr<Device> device;
  LLMC_RETURN_IF_ERROR(own_->Load(artifact, options, &device));
  room_->own().loaded.Set(1);
  for (;;) {
    LLMC_RETURN_IF_ERROR(listener.Hear(&said));
    if (said.op == RankOp::kEnd) return Status::Ok();
    LLMC_RETURN_IF_ERROR(Obey(said, device.get()));
  }
}

}  // namespace llmc
