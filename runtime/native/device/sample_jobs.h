// SampleJobs: writes a step's sampling tasks as records for kernels, and turns their results into outcomes (FORMAT.md,
// sampling). For all devices that sample with the kernels of GPU targets. Allocates when it is made, and later only for
// very long histories.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "artifact/artifact.h"
#include "sampling/sampler.h"

namespace llmc {

// Each stage is one kernel. Stages are launched in this order if they have work. The last one belongs to the next step:
// it gives it the tokens as inputs.
enum class SampleStage : uint32_t { kMask, kEdit, kScan, kSum, kBest, kDraw, kTop, kRank, kFeed };
constexpr uint32_t kNumSampleStages = 9;

// Operands of the stages' kernels, each a part of one of the three memories of SampleSizes, or of a step.
enum class SampleOperand : uint32_t {
  kJobs,
  kNumbers,
  kEdits,
  kChanges,
  kMasks,  // upload
  kLogits,  // of the step
  kCopies,
  kPartials,
  kMaxima,
  kSums,  // scratch
  kResults,
  kTotals,
  kCounts,  // result
  kInputIds  // of the next step
};
constexpr uint32_t kNumSampleOperands = 14;
// Operands of a stage's kernel, in the order of its arguments.
const std::vector<SampleOperand>& OperandsOf(SampleStage stage);

// Sizes of a round's memories and offsets of their parts, in bytes. Offsets are multiples of kAlignment.
struct SampleSizes {
  // block_size, most_candidates: launch facts of the kernels.
  SampleSizes(uint32_t vocab_size, uint32_t max_model_len, uint32_t block_size, uint32_t most_candidates);

  uint32_t vocab, block, candidates, pieces, spans, blocks;
  uint32_t max_jobs, max_copies, max_edits, max_changes;
  uint64_t offsets[kNumSampleOperands] = {};
  uint64_t upload_bytes = 0, scratch_bytes = 0, result_bytes = 0;

  uint64_t offset(SampleOperand operand) const { return offsets[static_cast<uint32_t>(operand)]; }
};

class SampleJobs {
 public:
  SampleJobs(const SampleSizes& sizes, std::vector<int32_t> eos_token_ids);

  // Lists a round of tasks from `first` on, as many as there is room for. Returns the index behind the last.
  size_t List(const std::vector<SampleTask>& tasks, size_t first);
  // Whether a task of the round is left to the host before anything is drawn.
  bool leaves_any() const { return !host_.empty(); }
  // The record among the results that has the token of a task of the round.
  uint32_t ResultOf(size_t task) const;
  // Bytes to copy to the beginning of the device's upload memory, scalars first. A stage has work only if groups(stage)
  // > 0.
  const unsigned char* upload() const { return upload_.data(); }
  uint64_t upload_bytes() const { return used_upload_; }
  uint32_t groups(SampleStage stage) const;
  // Bytes of the result that Finish reads: the first drawn_bytes, and with logprobs those from told_begin on.
  uint64_t drawn_bytes() const;
  uint64_t told_begin() const { return sizes_.offset(SampleOperand::kTotals); }
  uint64_t told_bytes() const;
  // Writes the kernels' results to the outcomes of the round's tasks. Appends tasks that are left to the host to *host.
  void Finish(const std::vector<SampleTask>& tasks, const unsigned char* result, std::vector<SampleOutcome>* outcomes,
              std::vector<size_t>* host) const;

 private:
  struct Change {
    uint32_t edit, kind;
    float value;
  };
  enum class Kind : uint32_t { kBest, kDraw, kTop, kTell };
  struct Job {
    size_t task;
    Kind kind;
    int32_t words[16];
    double uniform, top_p;
    size_t from;  // index of the job whose token a kTell reports on
  };
  // Whether kernels can do the task at all.
  bool Takes(const SampleTask& task) const;
  bool Room(const SampleTask& task) const;
  void ListDraw(const SampleTask& task, size_t index);
  void ListTell(const SampleTask& task, size_t index, size_t from);
  // Lists the sampler's changes of logits, by logit.
  void Modify(const SampleTask& task, Job* job);
  void AddChange(int32_t token, uint32_t kind, float value);
  void StopsEarly(const SampleTask& task);
  void WriteUpload();
  int32_t* Words(SampleOperand operand) { return reinterpret_cast<int32_t*>(upload_.data() + sizes_.offset(operand)); }

  SampleSizes sizes_;
  std::vector<int32_t> eos_token_ids_;
  std::vector<unsigned char> upload_;
  uint64_t used_upload_ = 0;
  std::vector<Job> jobs_;
  std::vector<size_t> place_;  // [job]: index in the upload
  std::vector<size_t> host_;  // tasks of the round that are left to the host
  uint32_t num_copies_ = 0, num_edits_ = 0, num_changes_ = 0, num_mask_words_ = 0;
  uint32_t first_of_[5] = {};  // first job of each kind, and the number of jobs
  std::vector<int32_t> edit_of_;  // [token]: its edit in the row being listed; -1: none
  std::vector<int32_t> edited_, counts_;
  std::vector<Change> changes_;
};

}  // namespace llmc
