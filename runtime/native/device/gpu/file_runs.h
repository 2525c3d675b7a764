// FileRuns: weights that are neighbours in the file, each run of them copied at once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"

namespace llmc {

// Bytes [begin, end) of the file, which lie from `at` on in memory.
struct FileRun {
  uint64_t begin, end, at;
};

class FileRuns {
 public:
  FileRuns() = default;
  // weights: [count], in the order of the file.
  FileRuns(const WeightRecord* const* weights, size_t count);

  const std::vector<FileRun>& runs() const { return runs_; }
  uint64_t bytes() const { return runs_.empty() ? 0 : runs_.back().at + (runs_.back().end - runs_.back().begin); }
  bool Holds(const WeightRecord& weight) const { return Find(weight) != nullptr; }
  // Where a weight begins in memory; one of those given.
  uint64_t At(const WeightRecord& weight) const {
    const FileRun& run = *Find(weight);
    return run.at + (weight.file_offset - run.begin);
  }

 private:
  const FileRun* Find(const WeightRecord& weight) const;

  std::vector<FileRun> runs_;
};

}  // namespace llmc
