// From how many rows on sums go on beside kernels.
#include "device/ranks/overlap_rule.h"

#include "support/check.h"

int main() {
  // A step of one row takes 10 ms, the sums of a row 0.1 ms: half of 400 rows hide 20 ms, twice what a pass costs.
  CHECK_EQ(llmc::LeastOverlapRows({0.1e6, 10e6}, 2048), 400u);
  CHECK_EQ(llmc::LeastOverlapRows({0.1e6, 10e6}, 400), 400u);
  CHECK_EQ(llmc::LeastOverlapRows({0.1e6, 10e6}, 399), 0u);  // no graph has as many rows
  CHECK_EQ(llmc::LeastOverlapRows({10e6, 10e6}, 2048), 64u);
  CHECK_EQ(llmc::LeastOverlapRows({10e6, 10e6}, 32), 0u);
  CHECK_EQ(llmc::LeastOverlapRows({0, 10e6}, 2048), 0u);
  CHECK_EQ(llmc::LeastOverlapRows({0, 0}, 2048), 0u);
  CHECK_EQ(llmc::LeastOverlapRows({1e-300, 1e300}, 2048), 0u);
  return llmc_test::Finish("overlap_rule_test");
}
