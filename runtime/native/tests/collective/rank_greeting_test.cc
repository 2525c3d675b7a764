// Ranks that do not belong together: which difference is told, and that all tell the same one.
#include "collective/mpi/rank_greeting.h"

#include <cstring>
#include <string>
#include <vector>

#include "support/check.h"

namespace {

using llmc::RankGreeting;

std::string Told(const std::vector<RankGreeting>& all) { return llmc::CheckGreetings(all).message; }

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

int main() {
  const RankGreeting two = llmc::GreetingOf(2), any = llmc::GreetingOf(0), four = llmc::GreetingOf(4);
  CHECK_OK(llmc::CheckGreetings({two, two}));
  CHECK_OK(llmc::CheckGreetings({any, any, any}));
  CHECK_OK(llmc::CheckGreetings({any, two}));
  CHECK(Has(Told({any, two, four}), "Rank 2 has an artifact of 4 ranks and rank 1 one of 2; copy"));
  CHECK(Has(Told({two, two, two}), "started 3 processes for an artifact of 2 ranks; start it with -n 2."));

  RankGreeting later = two, newer = two;
  ++later.protocol;
  CHECK(Has(Told({two, later}), "Rank 1 is llmc ") && Has(Told({two, later}), "install the same llmc on every host."));
  std::memset(newer.version, '9', sizeof(newer.version));  // without an end
  CHECK(
      Has(Told({two, newer}), "Rank 1 is llmc " + std::string(sizeof(newer.version), '9') + " (protocol 2) and rank"));
  newer.num_ranks = 4;  // what it means in another version is unknown
  CHECK(Has(Told({newer, two}), "Rank 1 is llmc "));
  return llmc_test::Finish("rank_greeting_test");
}
