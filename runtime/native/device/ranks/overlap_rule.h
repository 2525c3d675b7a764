// When a step of several ranks is run in two parts, so that sums of one are on their way while the other is computed.
// The rule stands here alone; what it needs is measured when the ranks have loaded.
#pragma once
#include <cstdint>

#include "artifact/artifact.h"
#include "collective/collective.h"

namespace llmc {

constexpr uint32_t kMeasuredOverlap = UINT32_MAX;  // in place of a number of rows: LeastOverlapRows decides

// row_ns: time of the sums of one row, without their latency. pass_ns: of a step of one row, which reads the weights and
// waits for each sum once.
struct OverlapCosts {
  double row_ns = 0, pass_ns = 0;
};

// Rows from which on a step runs in two parts; 0: never. The second part reads the weights once more and has its own
// sums, which takes about pass_ns. What it gains is at most the time of half the sums.
uint32_t LeastOverlapRows(const OverlapCosts& costs, uint32_t most_rows);

// Bytes of all sums for a row of a step.
uint64_t SummedBytesOfRow(const Artifact& artifact);
// Time of a byte of a sum beyond its latency. All ranks of a stage call it.
double TimeOfSummedByte(Collective* collective);

}  // namespace llmc
