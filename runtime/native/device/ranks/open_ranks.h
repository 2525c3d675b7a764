// A device of several ranks: each process opens one of the same kind with the options of ranks beside its own.
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
  // Whether `options` ask for one.
  static bool Wants(const DeviceOptions& options);
  // Opens the device of this rank with the options that are left.
  static Status Open(const DeviceKind& kind, const DeviceOptions& options, std::unique_ptr<OpenDevice>* out);

  // Rank 0 that was never loaded ends the others.
  ~OpenRanks() override;

  // Of rank 0, once.
  Status Load(std::shared_ptr<const Artifact> artifact, const LoadOptions& options,
              std::unique_ptr<Device>* out) const override;
  std::vector<std::pair<std::string, std::string>> Facts() const override;
  // An error once a rank has failed.
  Status status() const { return group_->status(); }
  // Of another rank, once: does what rank 0 says until that ends. An error: this rank or another one has failed.
  Status Follow(const std::shared_ptr<const Artifact>& artifact) const;

 private:
  OpenRanks(std::shared_ptr<Group> group, std::unique_ptr<OpenDevice> own)
      : group_(std::move(group)), own_(std::move(own)) {}
  Status CheckRole(bool leads) const;
  void EndOthers() const;
  Status FollowSteps(const std::shared_ptr<const Artifact>& artifact) const;

  std::shared_ptr<Group> group_;
  std::unique_ptr<OpenDevice> own_;
  mutable std::atomic<bool> used_{false};
};

}  // namespace llmc
