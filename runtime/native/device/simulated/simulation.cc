#include "device/simulated/simulation.h"

#include <algorithm>
#include <string>
#include <vector>

namespace llmc {
namespace {

constexpr uint64_t kEvents = 256;
constexpr uint64_t kStepsBetweenProgress = 4096;

// Appends the first `count` tokens of the text that `seed` stands for.
void MakeUp(uint64_t seed, size_t count, uint32_t vocab, std::vector<int32_t>* prompt) {
  for (size_t i = 0; i < count; ++i) prompt->push_back(static_cast<int32_t>(MixBits(seed + i) % vocab));
}

class Run {
 public:
  Run(const llmc_sim_trace& trace, Engine* engine, SimulatedDevice* device, uint64_t* first, uint64_t* last)
      : trace_(trace), engine_(engine), device_(device), first_(first), last_(last), events_(kEvents) {
    std::fill_n(first_, trace_.num_requests, 0);
    std::fill_n(last_, trace_.num_requests, 0);
  }

  Status All() {
    while (ended_ < trace_.num_requests) {
      while (next_ < trace_.num_requests && static_cast<double>(trace_.arrival_ns[next_]) <= device_->now_ns()) {
        LLMC_RETURN_IF_ERROR(Submit(next_++));
      }
      bool progressed = false;
      LLMC_RETURN_IF_ERROR(engine_->Step(&progressed));
      TakeEvents();
      if (++steps_ % kStepsBetweenProgress == 0 && trace_.progress != nullptr &&
          trace_.progress(trace_.context, ended_) != 0) {
        return Status::Ok();
      }
      if (progressed) continue;
      if (next_ == trace_.num_requests) break;
      device_->AdvanceTo(static_cast<double>(trace_.arrival_ns[next_]));
    }
    if (ended_ == trace_.num_requests) return Status::Ok();
    return Status::Error(LLMC_ERR_INTERNAL, std::to_string(trace_.num_requests - ended_) +
                                                " requests of the trace neither ran nor failed.");
  }

 private:
  Status Submit(uint64_t index) {
    prompt_.clear();
    const size_t length = trace_.prompt_tokens[index];
    if (trace_.prefix_start != nullptr) {
      for (uint64_t p = trace_.prefix_start[index]; p < trace_.prefix_start[index + 1]; ++p) {
        const uint64_t seed = MixBits(static_cast<uint64_t>(trace_.prefix_ids[p]));
        MakeUp(seed, std::min<size_t>(trace_.prefix_block, length - prompt_.size()), vocab(), &prompt_);
      }
    }
    MakeUp(MixBits(~index), length - prompt_.size(), vocab(), &prompt_);
    llmc_sampling_params sampling;
    llmc_sampling_params_init(&sampling, sizeof(sampling));
    sampling.max_tokens = trace_.output_tokens[index];
    sampling.temperature = 0;
    sampling.ignore_eos = 1;
    llmc_request request;
    llmc_request_init(&request, sizeof(request));
    request.prompt_token_ids = prompt_.data();
    request.num_prompt_tokens = length;
    request.sampling = &sampling;
    uint64_t id = 0;
    const Status status = engine_->Submit(request, &id);
    if (status.code == LLMC_ERR_QUEUE_FULL) {
      ++ended_;
      return Status::Ok();
    }
    LLMC_RETURN_IF_ERROR(status);
    if (first_id_ == 0) first_id_ = id;
    index_of_.resize(id - first_id_ + 1);
    index_of_[id - first_id_] = index;
    return Status::Ok();
  }

  void TakeEvents() {
    const uint64_t now = static_cast<uint64_t>(device_->now_ns());
    uint64_t count = kEvents;
    while (count == kEvents) {
      events_[0].struct_size = sizeof(llmc_event);
      count = engine_->Poll(events_.data(), kEvents);
      for (uint64_t i = 0; i < count; ++i) {
        const llmc_event& event = events_[i];
        const uint64_t index = index_of_[event.request_id - first_id_];
        if (event.kind == LLMC_EVENT_TOKEN && first_[index] == 0) first_[index] = now;
        if (event.kind != LLMC_EVENT_FINISHED && event.kind != LLMC_EVENT_FAILED) continue;
        ++ended_;
        if (event.kind == LLMC_EVENT_FINISHED) last_[index] = now;
      }
    }
  }

  uint32_t vocab() const { return static_cast<uint32_t>(device_->model().vocab_size); }

  const llmc_sim_trace& trace_;
  Engine* engine_;
  SimulatedDevice* device_;
  uint64_t *first_, *last_;
  uint64_t next_ = 0, ended_ = 0, steps_ = 0, first_id_ = 0;
  std::vector<uint64_t> index_of_;  // by request id
  std::vector<int32_t> prompt_;
  std::vector<llmc_event> events_;
};

}  // namespace

Status Simulate(const llmc_sim_trace& trace, Engine* engine, SimulatedDevice* device, uint64_t* first_token_ns,
                uint64_t* last_token_ns) {
  return Run(trace, engine, device, first_token_ns, last_token_ns).All();
}

}  // namespace llmc
