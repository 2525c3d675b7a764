// llmc_engine_*: the C boundary of the engine.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cpu_device.h"
#include "engine.h"
#include "error.h"

struct llmc_engine {
  std::unique_ptr<llmc::Engine> engine;
};

namespace {

using llmc::Status;

constexpr uint64_t kDefaultKvBytes = 1ull << 30;

Status Invalid(std::string message) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::move(message)); }

Status Null(const char* what) { return Invalid(std::string(what) + " is NULL."); }

// Reads a caller's struct of any version: what it lacks keeps the default in *to.
template <typename T>
Status ReadStruct(const T* from, const char* init, T* to) {
  if (from->struct_size < sizeof(uint32_t) * 2) {
    return Invalid("struct_size is " + std::to_string(from->struct_size) + "; call " + init + " first.");
  }
  std::memcpy(to, from, std::min<size_t>(from->struct_size, sizeof(T)));
  to->struct_size = sizeof(T);
  return Status::Ok();
}

// Copies `items` to a caller's array whose elements may be older and smaller, or newer and larger, than ours.
template <typename T>
void WriteArray(std::vector<T> items, uint64_t count, T* to) {
  const uint32_t stride = count ? to[0].struct_size : 0;
  for (uint64_t i = 0; i < count; ++i) {
    items[i].struct_size = stride;
    std::memcpy(reinterpret_cast<char*>(to) + i * stride, &items[i], std::min<size_t>(stride, sizeof(T)));
  }
}

// llmc_request embeds llmc_sampling_params, so an older one differs in the middle; the embedded struct_size says where
// its fields end and those behind it begin.
Status ReadRequest(const llmc_request* from, llmc_request* to) {
  constexpr size_t kHead = offsetof(llmc_request, sampling);
  if (from->struct_size < kHead + sizeof(uint32_t) * 2) {
    return Invalid("struct_size of the request is " + std::to_string(from->struct_size) +
                   "; call llmc_request_init first.");
  }
  llmc_sampling_params sampling = to->sampling;
  LLMC_RETURN_IF_ERROR(ReadStruct(&from->sampling, "llmc_sampling_params_init", &sampling));
  std::memcpy(to, from, kHead);
  constexpr size_t kTail = offsetof(llmc_request, guided);
  const size_t from_tail = kHead + (static_cast<size_t>(from->sampling.struct_size) + 7) / 8 * 8;
  if (from->struct_size > from_tail) {
    std::memcpy(reinterpret_cast<char*>(to) + kTail, reinterpret_cast<const char*>(from) + from_tail,
                std::min<size_t>(from->struct_size - from_tail, sizeof(*to) - kTail));
  }
  to->struct_size = sizeof(*to);
  to->sampling = sampling;
  return Status::Ok();
}

// KV blocks besides the dummy block.
Status PoolBlocks(const llmc::ModelShape& model, const llmc_engine_options& o, uint32_t* out) {
  constexpr uint64_t kMost = 0x7ffffffe;
  const uint64_t block_size = static_cast<uint64_t>(std::max(model.block_size, 1));
  const uint64_t block_bytes = std::max<uint64_t>(model.kv_block_bytes, 1);
  uint64_t blocks = o.num_blocks;
  if (blocks == 0 && o.kv_bytes != 0) {
    blocks = o.kv_bytes / block_bytes;
    if (blocks < 2) {
      return Invalid("kv_bytes is " + std::to_string(o.kv_bytes) + " but one KV block takes " +
                     std::to_string(block_bytes) + " bytes and one more is the dummy block; use at least " +
                     std::to_string(2 * block_bytes) + ".");
    }
    --blocks;
  } else if (blocks == 0) {
    const uint64_t seqs = o.max_num_seqs ? o.max_num_seqs : static_cast<uint64_t>(std::max(model.max_num_seqs, 1));
    const uint64_t per_seq = (static_cast<uint64_t>(std::max(model.max_model_len, 1)) + block_size - 1) / block_size;
    blocks = std::max<uint64_t>(std::min(seqs * per_seq, kDefaultKvBytes / block_bytes), 1);
  }
  // Slots are int32.
  if (blocks > kMost / block_size - 1) {
    return Invalid("num_blocks is " + std::to_string(blocks) + "; use at most " +
                   std::to_string(kMost / block_size - 1) + ".");
  }
  *out = static_cast<uint32_t>(blocks);
  return Status::Ok();
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

extern "C" {

void llmc_engine_options_init(llmc_engine_options* options) {
  if (options == nullptr) return;
  std::memset(options, 0, sizeof(*options));
  options->struct_size = sizeof(*options);
  options->prefix_cache = 1;
  options->miss_policy = LLMC_MISS_LARGER;
  options->pin_threads = 1;
  options->idle_spin_us = 1000;
}

void llmc_sampling_params_init(llmc_sampling_params* params) {
  if (params == nullptr) return;
  std::memset(params, 0, sizeof(*params));
  params->struct_size = sizeof(*params);
  params->n = 1;
  params->max_tokens = 16;
  params->temperature = 1;
  params->top_p = 1;
  params->repetition_penalty = 1;
  params->num_logprobs = -1;
}

void llmc_request_init(llmc_request* request) {
  if (request == nullptr) return;
  std::memset(request, 0, sizeof(*request));
  request->struct_size = sizeof(*request);
  llmc_sampling_params_init(&request->sampling);
  request->num_prompt_logprobs = -1;
}

llmc_status llmc_engine_create(llmc_artifact* artifact, const llmc_engine_options* options, llmc_engine** out,
                               llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (artifact == nullptr) return Null("artifact");
    if (out == nullptr) return Null("out");
    llmc_engine_options o;
    llmc_engine_options_init(&o);
    if (options != nullptr) LLMC_RETURN_IF_ERROR(ReadStruct(options, "llmc_engine_options_init", &o));
    if (o.miss_policy > LLMC_MISS_ERROR) {
      return Invalid("miss_policy is " + std::to_string(o.miss_policy) +
                     "; use LLMC_MISS_LARGER (0) or LLMC_MISS_ERROR (1).");
    }
    uint32_t num_blocks = 0;
    LLMC_RETURN_IF_ERROR(PoolBlocks(llmc::ArtifactModelShape(artifact), o, &num_blocks));
    std::unique_ptr<llmc::Device> device;
    LLMC_RETURN_IF_ERROR(llmc::MakeCpuDevice(artifact, o.num_threads, num_blocks + 1, o.pin_threads != 0,
                                             o.idle_spin_us, &device));
    llmc::EngineOptions e;
    e.max_num_seqs = o.max_num_seqs;
    e.max_waiting = o.max_waiting;
    e.max_tokens_per_step = o.max_tokens_per_step;
    e.prefix_cache = o.prefix_cache != 0;
    e.error_on_miss = o.miss_policy == LLMC_MISS_ERROR;
    e.seed = RandomSeed();
    auto handle = std::make_unique<llmc_engine>();
    LLMC_RETURN_IF_ERROR(llmc::Engine::Create(std::move(device), e, &handle->engine));
    *out = handle.release();
    return Status::Ok();
  });
}

void llmc_engine_destroy(llmc_engine* engine) { delete engine; }

llmc_status llmc_engine_submit(llmc_engine* engine, const llmc_request* request, uint64_t* id, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (request == nullptr) return Null("request");
    if (id == nullptr) return Null("id");
    llmc_request r;
    llmc_request_init(&r);
    LLMC_RETURN_IF_ERROR(ReadRequest(request, &r));
    return engine->engine->Submit(r, id);
  });
}

llmc_status llmc_engine_cancel(llmc_engine* engine, uint64_t id, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    return engine->engine->Cancel(id);
  });
}

llmc_status llmc_engine_set_token_mask(llmc_engine* engine, uint64_t id, uint32_t output_index, const uint32_t* words,
                                       uint64_t num_words, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (words == nullptr) return Null("words");
    return engine->engine->SetTokenMask(id, output_index, words, num_words);
  });
}

llmc_status llmc_engine_wait(llmc_engine* engine, uint64_t timeout_ns, uint32_t* ready, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (ready == nullptr) return Null("ready");
    *ready = engine->engine->Wait(timeout_ns);
    return Status::Ok();
  });
}

llmc_status llmc_engine_warm_graph(llmc_engine* engine, uint32_t graph, uint64_t* ns, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    return engine->engine->WarmGraph(graph, ns);
  });
}

llmc_status llmc_engine_step(llmc_engine* engine, uint32_t* progressed, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    bool any = false;
    LLMC_RETURN_IF_ERROR(engine->engine->Step(&any));
    if (progressed != nullptr) *progressed = any ? 1 : 0;
    return Status::Ok();
  });
}

llmc_status llmc_engine_poll(llmc_engine* engine, llmc_event* events, uint64_t capacity, uint64_t* count,
                             llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (count == nullptr) return Null("count");
    if (capacity > 0) {
      if (events == nullptr) return Null("events");
      if (events[0].struct_size < sizeof(uint32_t) * 2) {
        return Invalid("events[0].struct_size is " + std::to_string(events[0].struct_size) +
                       "; set it to sizeof(llmc_event).");
      }
    }
    *count = engine->engine->Poll(events, capacity);
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_stats(const llmc_engine* engine, llmc_engine_stats* stats, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (stats == nullptr) return Null("stats");
    if (stats->struct_size < sizeof(uint32_t) * 2) {
      return Invalid("stats.struct_size is " + std::to_string(stats->struct_size) +
                     "; set it to sizeof(llmc_engine_stats).");
    }
    const uint32_t size = stats->struct_size;
    llmc_engine_stats all = engine->engine->Stats();
    all.struct_size = size;
    std::memcpy(stats, &all, std::min<size_t>(size, sizeof(all)));
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_graph_use(const llmc_engine* engine, uint64_t* replays, uint64_t* tokens,
                                      uint64_t capacity, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (replays == nullptr) return Null("replays");
    if (tokens == nullptr) return Null("tokens");
    if (capacity < engine->engine->num_graphs()) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) +
                                                      " but the artifact has " +
                                                      std::to_string(engine->engine->num_graphs()) + " graphs.");
    }
    for (const llmc_graph_stats& g : engine->engine->GraphStats()) {
      *replays++ = g.replays;
      *tokens++ = g.tokens;
    }
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_graph_stats(const llmc_engine* engine, llmc_graph_stats* stats, uint64_t capacity,
                                        uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (stats == nullptr) return Null("stats");
    if (count == nullptr) return Null("count");
    const uint64_t num_graphs = engine->engine->num_graphs();
    if (capacity < num_graphs) {
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, "capacity is " + std::to_string(capacity) +
                                                      " but the artifact has " + std::to_string(num_graphs) +
                                                      " graphs.");
    }
    if (stats[0].struct_size < sizeof(uint32_t) * 2) {
      return Invalid("stats[0].struct_size is " + std::to_string(stats[0].struct_size) +
                     "; set it to sizeof(llmc_graph_stats).");
    }
    WriteArray(engine->engine->GraphStats(), num_graphs, stats);
    *count = num_graphs;
    return Status::Ok();
  });
}

llmc_status llmc_engine_get_bucket_misses(const llmc_engine* engine, llmc_bucket_miss* misses, uint64_t capacity,
                                          uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    if (count == nullptr) return Null("count");
    if (capacity > 0 && misses == nullptr) return Null("misses");
    if (capacity > 0 && misses[0].struct_size < sizeof(uint32_t) * 2) {
      return Invalid("misses[0].struct_size is " + std::to_string(misses[0].struct_size) +
                     "; set it to sizeof(llmc_bucket_miss).");
    }
    std::vector<llmc_bucket_miss> all = engine->engine->BucketMisses();
    const uint64_t given = std::min<uint64_t>(capacity, all.size());
    WriteArray(std::move(all), given, misses);
    *count = given;
    return Status::Ok();
  });
}

llmc_status llmc_engine_check_integrity(const llmc_engine* engine, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (engine == nullptr) return Null("engine");
    return engine->engine->CheckIntegrity();
  });
}

}  // extern "C"
