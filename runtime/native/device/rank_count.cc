#include "device/rank_count.h"

#include <string>

namespace llmc {

Status CheckRankCount(const Artifact& artifact, const Collective* collective) {
  const uint32_t there = collective == nullptr ? 1 : collective->num_ranks(), wanted = artifact.num_ranks();
  if (there == wanted) return Status::Ok();
  return Status::Error(LLMC_ERR_UNSUPPORTED_TARGET,
                       "the artifact " + artifact.directory() + " is for " + std::to_string(wanted) +
                           (wanted == 1 ? " rank" : " ranks") + " and the device is opened for " +
                           std::to_string(there) + "; open it with the options room, rank and ranks, as llmc run does");
}

}  // namespace llmc
