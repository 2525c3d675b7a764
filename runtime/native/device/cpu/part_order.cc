#include "device/cpu/part_order.h"

namespace llmc {
namespace {

using What = PartStep::What;

bool IsSum(const CpuProgram::Step& step) {
  return step.collective != nullptr && step.collective->op == static_cast<uint32_t>(CollectiveOp::kAllReduce);
}

// The commands of a part that are not listed yet, and the sum that it has begun.
struct Rest {
  const CpuProgram::StepRange& range;
  uint8_t part;
  const CpuProgram::Step* next = range.begin;
  const CpuProgram::Step* begun = nullptr;

  void Add(What what, const CpuProgram::Step* step, bool meets, std::vector<PartStep>* out) const {
    out->push_back({step, static_cast<std::size_t>(step - range.begin), part, what, meets});
  }
  // Up to the next sum. Threads meet before another part runs: both write keys of a sequence.
  void AddSegment(std::vector<PartStep>* out) {
    if (begun != nullptr) Add(What::kFinish, begun, true, out);
    begun = nullptr;
    for (; next != range.end && !IsSum(*next); ++next) {
      const bool last = next + 1 == range.end || IsSum(next[1]);
      Add(What::kRun, next, last || next->barrier != 0, out);
    }
    if (next == range.end) return;
    Add(What::kBegin, next, false, out);
    begun = next++;
  }
  bool done() const { return next == range.end && begun == nullptr; }
};

}  // namespace

void OrderParts(const CpuProgram::StepRange& first, const CpuProgram::StepRange& second, std::vector<PartStep>* out) {
  out->clear();
  Rest parts[] = {{first, 0}, {second, 1}};
  while (!parts[0].done() || !parts[1].done()) {
    for (Rest& part : parts) part.AddSegment(out);
  }
}

}  // namespace llmc
