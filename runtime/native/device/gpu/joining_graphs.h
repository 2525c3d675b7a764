// JoiningGraphs: graphs that a device with launched kernels takes over while it runs, with all that runs them.
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "artifact/model_shape.h"
#include "device/device.h"

namespace llmc {

// Runner: programs, working memory and graphs, of a type that each kind of device has.
template <class Runner>
class JoiningGraphs final : public NewGraphs {
 public:
  // What a device runs: its members, which Adopt exchanges.
  struct Running {
    std::shared_ptr<const Artifact>* artifact;
    ModelShape* shape;
    Runner* runner;
  };
  // Makes the runner of an artifact beside steps: it touches nothing of a running step.
  using Make = std::function<Status(const Artifact& artifact, Runner* out)>;

  // Checks that the artifact has all graphs that run already.
  static Status Of(const Running& running, const std::shared_ptr<const Artifact>& artifact, Make make,
                   std::unique_ptr<NewGraphs>* out) {
    LLMC_RETURN_IF_ERROR(artifact->CheckExtends(**running.artifact));
    *out = std::unique_ptr<NewGraphs>(new JoiningGraphs(running, artifact, std::move(make)));
    return Status::Ok();
  }

  Status Prepare() override { return make_(*artifact_, &runner_); }
  // Call between two steps, after Prepare. This keeps what was running until it is destroyed.
  void Adopt() noexcept {
    std::swap(*running_.runner, runner_);
    std::swap(running_.shape->graphs, shapes_);
    std::swap(*running_.artifact, artifact_);
  }

 private:
  JoiningGraphs(const Running& running, std::shared_ptr<const Artifact> artifact, Make make)
      : running_(running), artifact_(std::move(artifact)), shapes_(artifact_->shape().graphs), make_(std::move(make)) {}

  Running running_;
  std::shared_ptr<const Artifact> artifact_;
  std::vector<GraphShape> shapes_;
  Make make_;
  Runner runner_;
};

}  // namespace llmc
