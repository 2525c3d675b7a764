// CutBatch: a step as two steps of fewer rows, with the same results. Rows of one sequence may be in both: then the
// first part is a chunk of its prompt.
#pragma once
#include <cstdint>
#include <vector>

#include "device/batch.h"

namespace llmc {

// The parts of a step, in their order. Views point into the step's batch, and into the vectors where numbers differ.
struct BatchParts {
  BatchView first, second;
  std::vector<int32_t> first_contexts, first_starts, second_starts, second_samples;  // reused
};

// Cuts a checked batch in front of row `cut`, which is neither the first nor behind the last. Layer by layer, the first
// part must run first: the second one reads its keys. Samples of the first part come first. Returns false for a batch
// in which order of rows and order of positions or samples differ: it runs in one piece.
bool CutBatch(const BatchView& batch, uint32_t cut, BatchParts* out);

}  // namespace llmc
