// llmc_engine_*: the C boundary of the engine.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "artifact/artifact.h"
#include "capi/c_device.h"
#include "capi/c_engine.h"
#include "capi/device_stats.h"
#include "capi/pool_sizes.h"
#include "core/c_struct.h"
#include "core/error.h"

namespace {

using llmc::NullArgument;
using llmc::Status;

Status Invalid(std::string message) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::move(message)); }

llmc_engine_options DefaultOptions() {
  llmc_engine_options o{};
  o.struct_size = sizeof(o);
  o.prefix_cache = 1;
  o.miss_policy = LLMC_MISS_LARGER;
  return o;
}

llmc_sampling_params DefaultSampling() {
  llmc_sampling_params p{};
  p.struct_size = sizeof(p);
  p.n = 1;
  p.max_tokens = 16;
  p.temperature = 1;
  p.top_p = 1;
  p.repetition_penalty = 1;
  p.num_logprobs = -1;
  p.length_penalty = 1;
  return p;
}

llmc_request DefaultRequest() {
  llmc_request r{};
  r.struct_size = sizeof(r);
  r.num_prompt_logprobs = -1;
  return r;
}

llmc::PoolOptions PoolOptionsOf(const llmc_engine_options& o) {
  return {o.num_blocks, o.num_states, o.kv_bytes, o.max_num_seqs};
}

uint64_t RandomSeed() {
  try {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32) ^ device();
  } catch (...) {
    return static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  }
}

}  // namespace

llmc::Status llmc::MakeEngine(const ModelShape& model, const llmc_engine_options* options, const MakeDevice& make,
                              std::unique_ptr<llmc_engine>* out, const MakeDraft& make_draft) {
  llmc_engine_options o = DefaultOptions();
  if (options != nullptr) LLMC_RETURN_IF_ERROR(ReadStruct(options, "options", &o));
  if (o.miss_policy > LLMC_MISS_SPLIT) {
    return Invalid("miss_policy is " + std::to_string(o.miss_policy) +
                   "; use LLMC_MISS_LARGER (0), LLMC_MISS_ERROR (1) or LLMC_MISS_SPLIT (2).");
  }
  if (o.speculate_tokens > LLMC_MAX_SPECULATE_TOKENS) {
    return Invalid("speculate_tokens is " + std::to_string(o.speculate_tokens) + "; use 0 (none) to " +
                   std::to_string(LLMC_MAX_SPECULATE_TOKENS) + ".");
  }
  if (o.draft != nullptr && (o.speculate_tokens == 0 || !make_draft)) {
    return Invalid(make_draft
                       ? "draft is given but speculate_tokens is 0; say how many guesses it makes, or leave it out."
                       : "A simulated engine has no draft; leave it out.");
  }
  PoolCounts counts;
  LLMC_RETURN_IF_ERROR(PoolSizes(model, PoolOptionsOf(o), &counts));
  std::unique_ptr<Device> device, draft;
  LLMC_RETURN_IF_ERROR(make(o, WithDummies(model, counts), &device));
  if (o.draft != nullptr) {
    const ModelShape& of = o.draft->artifact->shape();
    const uint64_t tokens = uint64_t{counts.blocks} * static_cast<uint32_t>(model.block_size);
    const uint64_t block_size = static_cast<uint32_t>(std::max(of.block_size, 1));
    // One that has states is refused once it is loaded.
    const PoolCounts drafts = {static_cast<uint32_t>((tokens + block_size - 1) / block_size), 1};
    LLMC_RETURN_IF_ERROR(make_draft(o, *device, WithDummies(of, drafts), &draft));
  }
  EngineOptions e;
  e.max_num_seqs = o.max_num_seqs;
  e.max_waiting = o.max_waiting;
  e.max_tokens_per_step = o.max_tokens_per_step;
  e.prefix_cache = o.prefix_cache != 0;
  e.swap_bytes = o.swap_bytes;
  e.swap_always = o.swap_always != 0;
  e.miss_policy = o.miss_policy == LLMC_MISS_ERROR   ? MissPolicy::kError
                  : o.miss_policy == LLMC_MISS_SPLIT ? MissPolicy::kSplit
                                                     : MissPolicy::kLarger;
  e.priority_patience = o.priority_patience;
  e.seed = RandomSeed();
  e.speculate_tokens = o.speculate_tokens;
  e.speculate_always = o.speculate_always != 0;
  *out = std::make_unique<llmc_engine>();
  return Engine::Create(std::move(device), e, &(*out)->engine, std::move(draft));
}

extern "C" {

void llmc_engine_options_init(llmc_engine_options* options, uint32_t struct_size) {
  static const llmc_engine_options defaults = DefaultOptions();
  llmc::InitStruct(defaults, struct_size, options);
}

void llmc_sampling_params_init(llmc_sampling_params* params, uint32_t struct_size) {
  static const llmc_sampling_params defaults = DefaultSampling();
  llmc::InitStruct(defaults, struct_size, params);
}

void llmc_request_init(llmc_request* request, uint32_t struct_size) {
  static const llmc_request defaults = DefaultRequest();
  llmc::InitStruct(defaults, struct_size, request);
}

llmc_status llmc_artifact_info_get_pool_sizes(const llmc_artifact_info* info, const llmc_engine_options* options,
                                              uint32_t* num_blocks, uint32_t* num_states, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (num_blocks == nullptr || num_states == nullptr) return NullArgument("num_blocks or num_states");
    llmc_artifact_info of{};
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(info, "info", &of));
    llmc_engine_options o = DefaultOptions();
    if (options != nullptr) LLMC_RETURN_IF_ERROR(llmc::ReadStruct(options, "options", &o));
    llmc::ModelShape model{};
    model.block_size = of.block_size;
    model.max_model_len = of.max_model_len;
    model.max_num_seqs = of.max_num_seqs;
    model.kv_block_bytes = of.kv_block_bytes;
    model.max_kv_blocks = of.max_kv_blocks;
    model.state_bytes = of.state_bytes;
    model.max_states = of.max_states;
    llmc::PoolCounts counts;
    LLMC_RETURN_IF_ERROR(llmc::PoolSizes(model, PoolOptionsOf(o), &counts));
    *num_blocks = counts.blocks;
    *num_states = counts.states;
    return Status::Ok();
  });
}

llmc_status llmc_engine_create(const llmc_device* device, llmc_artifact* artifact, const llmc_engine_options* options,
                               llmc_engine** out, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (device == nullptr) return NullArgument("device");
    if (artifact == nullptr) return NullArgument("artifact");
    if (out == nullptr) return NullArgument("out");
    const auto make = [&](const llmc_engine_options&, const llmc::PoolCounts& counts,
                          std::unique_ptr<llmc::Device>* made) {
      return device->device->Load(artifact->artifact, {counts.blocks, counts.states, /*timed=*/false}, made);
    };
    const auto make_draft = [&](const llmc_engine_options& o, const llmc::Device& beside,
                                const llmc::PoolCounts& counts, std::unique_ptr<llmc::Device>* made) {
      return device->device->Load(o.draft->artifact, {counts.blocks, counts.states, /*timed=*/false, &beside}, made);
    };
    std::unique_ptr<llmc_engine> engine;
    LLMC_RETURN_IF_ERROR(llmc::MakeEngine(artifact->artifact->shape(), options, make, &engine, make_draft));
    *out = engine.release();
    return Status::Ok();
  });
}

void llmc_engine_destroy(llmc_engine* engine) {
  if (engine != nullptr && engine->made.here()) delete engine;
}

llmc_status llmc_engine_submit(llmc_engine* engine, const llmc_request* request, uint64_t* id, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (id == nullptr) return NullArgument("id");
    llmc_request r = DefaultRequest();
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(request, "request", &r));
    llmc_sampling_params sampling = DefaultSampling();
    if (r.sampling != nullptr) LLMC_RETURN_IF_ERROR(llmc::ReadStruct(r.sampling, "request->sampling", &sampling));
    r.sampling = &sampling;
    return engine->engine->Submit(r, id);
  });
}

llmc_status llmc_engine_cancel(llmc_engine* engine, uint64_t id, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->Cancel(id);
  });
}

llmc_status llmc_engine_set_token_mask(llmc_engine* engine, uint64_t id, uint32_t output_index, const uint32_t* words,
                                       uint64_t num_words, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (words == nullptr) return NullArgument("words");
    return engine->engine->SetTokenMasks(id, output_index, words, num_words);
  });
}

llmc_status llmc_engine_set_token_masks(llmc_engine* engine, uint64_t id, uint32_t output_index, const uint32_t* words,
                                        uint64_t num_words, const int32_t* guesses, uint64_t num_guesses,
                                        llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (words == nullptr) return NullArgument("words");
    if (guesses == nullptr && num_guesses > 0) return NullArgument("guesses");
    return engine->engine->SetTokenMasks(id, output_index, words, num_words, guesses, num_guesses);
  });
}

llmc_status llmc_engine_get_guesses(llmc_engine* engine, uint64_t id, uint32_t output_index, int32_t* tokens,
                                    uint64_t capacity, uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (tokens == nullptr && capacity > 0) return NullArgument("tokens");
    if (count == nullptr) return NullArgument("count");
    return engine->engine->GetGuesses(id, output_index, tokens, capacity, count);
  });
}

llmc_status llmc_engine_wait(llmc_engine* engine, uint64_t timeout_ns, uint32_t* ready, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (ready == nullptr) return NullArgument("ready");
    *ready = engine->engine->Wait(timeout_ns);
    return Status::Ok();
  });
}

llmc_status llmc_engine_check_device(llmc_engine* engine, uint64_t timeout_ns, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->CheckDevice(timeout_ns);
  });
}

llmc_status llmc_engine_step(llmc_engine* engine, uint32_t* progressed, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    bool any = false;
    LLMC_RETURN_IF_ERROR(engine->engine->Step(&any));
    if (progressed != nullptr) *progressed = any ? 1 : 0;
    return Status::Ok();
  });
}

llmc_status llmc_engine_poll(llmc_engine* engine, llmc_event* events, uint64_t capacity, uint64_t* count,
                             llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (count == nullptr) return NullArgument("count");
    if (capacity > 0) LLMC_RETURN_IF_ERROR(llmc::CheckStruct(events, "events[0]"));
    *count = engine->engine->Poll(events, capacity);
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_stats(const llmc_engine* engine, llmc_engine_stats* stats, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    LLMC_RETURN_IF_ERROR(llmc::CheckStruct(stats, "stats"));
    llmc::WriteStruct(engine->engine->Stats(), stats->struct_size, stats);
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_device_stats(const llmc_engine* engine, llmc_device_stat* stats, uint64_t capacity,
                                         uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return llmc::GiveDeviceStats(engine->engine->DeviceStats(), stats, capacity, count);
  });
}

llmc_status llmc_engine_get_graph_stats(const llmc_engine* engine, llmc_graph_stats* stats, uint64_t capacity,
                                        uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (count == nullptr) return NullArgument("count");
    const uint64_t num_graphs = engine->engine->num_graphs();
    if (capacity < num_graphs) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) + " but the artifact has " +
                                                      std::to_string(num_graphs) + " graphs.");
    }
    LLMC_RETURN_IF_ERROR(llmc::CheckStruct(stats, "stats[0]"));
    llmc::WriteArray(engine->engine->GraphStats(), num_graphs, stats);
    *count = num_graphs;
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_bucket_misses(const llmc_engine* engine, llmc_bucket_miss* misses, uint64_t capacity,
                                          uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (count == nullptr) return NullArgument("count");
    if (capacity > 0) LLMC_RETURN_IF_ERROR(llmc::CheckStruct(misses, "misses[0]"));
    const std::vector<llmc_bucket_miss> all = engine->engine->BucketMisses();
    const uint64_t given = std::min<uint64_t>(capacity, all.size());
    llmc::WriteArray(all, given, misses);
    *count = given;
    return Status::Ok();
  });
}

llmc_status llmc_engine_take_step_shapes(llmc_engine* engine, llmc_step_shape* shapes, uint64_t capacity,
                                         uint64_t* count, uint64_t* lost, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (count == nullptr) return NullArgument("count");
    if (capacity < LLMC_MAX_STEP_SHAPES) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) + " but up to " +
                                                      std::to_string(LLMC_MAX_STEP_SHAPES) + " shapes are given.");
    }
    LLMC_RETURN_IF_ERROR(llmc::CheckStruct(shapes, "shapes[0]"));
    uint64_t not_counted = 0;
    const std::vector<llmc_step_shape> all = engine->engine->TakeStepShapes(&not_counted);
    llmc::WriteArray(all, all.size(), shapes);
    *count = all.size();
    if (lost != nullptr) *lost = not_counted;
    return Status::Ok();
  });
}

llmc_status llmc_engine_take_request_marks(llmc_engine* engine, llmc_request_mark* marks, uint64_t capacity,
                                           uint64_t* count, uint32_t* complete, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (count == nullptr) return NullArgument("count");
    if (capacity < LLMC_MAX_REQUEST_MARKS) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) + " but up to " +
                                                      std::to_string(LLMC_MAX_REQUEST_MARKS) + " marks are given.");
    }
    LLMC_RETURN_IF_ERROR(llmc::CheckStruct(marks, "marks[0]"));
    bool all_there = false;
    const std::vector<llmc_request_mark> all = engine->engine->TakeRequestMarks(&all_there);
    llmc::WriteArray(all, all.size(), marks);
    *count = all.size();
    if (complete != nullptr) *complete = all_there ? 1 : 0;
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_evictions(const llmc_engine* engine, llmc_eviction_count* counts, uint64_t capacity,
                                      uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (count == nullptr) return NullArgument("count");
    if (capacity > 0) LLMC_RETURN_IF_ERROR(llmc::CheckStruct(counts, "counts[0]"));
    const std::vector<llmc_eviction_count> all = engine->engine->Evictions();
    const uint64_t given = std::min<uint64_t>(capacity, all.size());
    llmc::WriteArray(all, given, counts);
    *count = given;
    return Status::Ok();
  });
}

llmc_status llmc_engine_check_integrity(const llmc_engine* engine, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->CheckIntegrity();
  });
}

}  // extern "C"
