// OpenRanks: a device of several ranks. Each process opens one of the same kind, with options for ranks beside the
// kind's.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/group.h"
#include "device/registry.h"

namespace llmc {

class OpenRanks final : public OpenDevice {
 public:
  // Whether `options` ask for several ranks.
  static bool Wants(const DeviceOptions& options);
  // Opens the device of this rank; `kind` gets the options that are not about ranks.
  static Status Open(const DeviceKind& kind, const DeviceOptions& options, std::unique_ptr<OpenDevice>* out);

  // Ends the other ranks if this is rank 0 and was never loaded.
  ~OpenRanks() override;

  // Call on rank 0, once.
  Status Load(std::shared_ptr<const Artifact> artifact, const LoadOptions& options,
              std::unique_ptr<Device>* out) const override;
  std::vector<std::pair<std::string, std::string>> Facts() const override;
  // An error once a rank has failed.
  Status status() const { return group_->status(); }
  // Call on another rank, once: carries out messages of rank 0 until that ends. Returns an error if any rank has
  // failed.
  Status Follow(const std::shared_ptr<const Artifact>& artifact) const;

 private:
  OpenRanks(std::shared_ptr<Group> group, std::unique_ptr<OpenDevice> own, uint32_t in_flight, uint32_t overlap)
      : group_(std::move(group)), own_(std::move(own)), in_flight_(in_flight), overlap_(overlap) {}
  std::shared_ptr<Collective> NewCollective(const Artifact& artifact, uint32_t in_flight) const;
  Status CheckRole(bool leads) const;
  void EndOthers() const;
  Status FollowSteps(const std::shared_ptr<const Artifact>& artifact) const;

  std::shared_ptr<Group> group_;
  std::unique_ptr<OpenDevice> own_;
  uint32_t in_flight_;  // steps in flight; 0: as many as stages
  uint32_t overlap_;  // as in LeaderDevice::Create
  mutable std::atomic<bool> used_{false};
};

}  // namespace llmc
