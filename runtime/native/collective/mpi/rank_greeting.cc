#include "collective/mpi/rank_greeting.h"

#include <cstring>
#include <string>

#include "core/error.h"
#include "llmc/llmc.h"

namespace llmc {
namespace {

constexpr uint32_t kRankProtocol = 2;  // raise it with a change of any message between ranks: links, steps, results

std::string VersionIn(const RankGreeting& greeting) {
  return std::string(greeting.version, ::strnlen(greeting.version, sizeof(greeting.version)));
}

std::string NameOf(const RankGreeting& greeting) {
  return "llmc " + VersionIn(greeting) + " (protocol " + std::to_string(greeting.protocol) + ")";
}

Status CannotMeet(const std::string& why) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, why); }

}  // namespace

RankGreeting GreetingOf(uint32_t num_ranks) {
  RankGreeting greeting{};
  greeting.protocol = kRankProtocol;
  greeting.num_ranks = num_ranks;
  const char* version = llmc_version();
  CopyText(version, std::strlen(version), sizeof(greeting.version), greeting.version);
  return greeting;
}

Status CheckGreetings(const std::vector<RankGreeting>& all) {
  for (uint32_t r = 1; r < all.size(); ++r) {
    if (all[r].protocol == all[0].protocol && VersionIn(all[r]) == VersionIn(all[0])) continue;
    return CannotMeet("Rank " + std::to_string(r) + " is " + NameOf(all[r]) + " and rank 0 " + NameOf(all[0]) +
                      "; install the same llmc on every host.");
  }
  uint32_t first = 0;  // rank that wants a number
  while (first < all.size() && all[first].num_ranks == 0) ++first;
  if (first == all.size()) return Status::Ok();
  const uint32_t wanted = all[first].num_ranks;
  for (uint32_t r = first + 1; r < all.size(); ++r) {
    if (all[r].num_ranks == 0 || all[r].num_ranks == wanted) continue;
    return CannotMeet("Rank " + std::to_string(r) + " has an artifact of " + std::to_string(all[r].num_ranks) +
                      " ranks and rank " + std::to_string(first) + " one of " + std::to_string(wanted) +
                      "; copy rank 0's artifact to the same path of every host.");
  }
  if (wanted == all.size()) return Status::Ok();
  return CannotMeet("mpirun has started " + std::to_string(all.size()) + " processes for an artifact of " +
                    std::to_string(wanted) + " ranks; start it with -n " + std::to_string(wanted) + ".");
}

}  // namespace llmc
