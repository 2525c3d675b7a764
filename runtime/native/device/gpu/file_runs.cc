#include "device/gpu/file_runs.h"

namespace llmc {

FileRuns::FileRuns(const WeightRecord* const* weights, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t begin = weights[i]->file_offset, end = begin + weights[i]->bytes;
    if (!runs_.empty() && begin <= RoundUp(runs_.back().end, kAlignment)) {
      runs_.back().end = end;
    } else {
      runs_.push_back({begin, end, RoundUp(bytes(), kAlignment)});
    }
  }
}

const FileRun* FileRuns::Find(const WeightRecord& weight) const {
  for (const FileRun& run : runs_) {
    if (weight.file_offset >= run.begin && weight.file_offset < run.end) return &run;
  }
  return nullptr;
}

}  // namespace llmc
