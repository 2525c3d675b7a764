#include "device/simulated/simulated_device.h"

#include <algorithm>
#include <utility>

namespace llmc {

double ReplayCost::operator()(uint32_t rows, double pairs) const {
  const size_t last = tokens.size() - 1;
  double at = ns[0];
  if (last > 0 && rows > tokens[0]) {
    const size_t right = std::min<size_t>(std::lower_bound(tokens.begin(), tokens.end(), rows) - tokens.begin(), last);
    const double slope = (ns[right] - ns[right - 1]) / (tokens[right] - tokens[right - 1]);
    at = ns[right] + slope * (static_cast<double>(rows) - tokens[right]);
  }
  return at + ns_per_pair * pairs;
}

namespace {

// Guesses behind the last token of a sequence, at most: each of them has logits, too.
uint32_t MostGuesses(const StepBatch& b) {
  uint32_t most = 0, sample = 0;
  for (uint32_t i = 0; i < b.num_seqs; ++i) {
    const uint32_t first = sample;
    while (sample < b.num_samples && b.sample_index[sample] < b.query_start[i + 1]) ++sample;
    most = std::max(most, sample - first);
  }
  return most > 1 ? most - 1 : 0;
}

}  // namespace

SimulatedDevice::SimulatedDevice(ModelShape model, std::vector<SimulatedGraph> graphs, const PoolCounts& counts,
                                 const SimulatedTimes& times)
    : model_(std::move(model)),
      graphs_(std::move(graphs)),
      counts_(counts),
      times_(times),
      stages_(times.stages, times.steps_in_flight, times.bus_share) {
  uint32_t samples = 0;
  for (const GraphShape& g : model_.graphs) samples = std::max(samples, g.max_samples);
  logits_.resize(static_cast<size_t>(samples) * static_cast<size_t>(model_.vocab_size));
}

Status SimulatedDevice::Enqueue(const StepBatch& b, Fence* fence) {
  const uint32_t block_size = static_cast<uint32_t>(model_.block_size);
  const GraphShape& shape = model_.graphs[b.graph];
  const bool decode = shape.phase == Phase::kDecode;
  double pairs = 0;
  uint64_t contexts = 0;
  uint32_t length = 0, blocks = 0;
  for (uint32_t i = 0; i < b.num_seqs; ++i) {
    const uint32_t context = static_cast<uint32_t>(b.context_lens[i]);
    const uint32_t rows = static_cast<uint32_t>(b.query_start[i + 1] - b.query_start[i]);
    // The last row sees the whole context, each row before it one token less.
    pairs += static_cast<double>(rows) * context - 0.5 * static_cast<double>(rows) * (rows - 1.0);
    contexts += context;
    blocks += (context + block_size - 1) / block_size;
    length = std::max(length, decode ? context : rows);
  }
  const SimulatedGraph& graph = graphs_[b.graph];
  const double ns = graph.cost(b.num_tokens, pairs);
  // Loads count context in whole blocks, which decide on the graph of a decode step: exact lengths would make many
  // loads.
  const uint32_t longest = decode ? (length + block_size - 1) / block_size * block_size : length;
  const uint32_t held = shape.max_blocks != 0 ? blocks * block_size : longest;
  SimulatedLoad& load = loads_[{b.graph, b.num_seqs, held, decode ? b.num_tokens : 0}];
  load.graph = b.graph;
  load.num_seqs = b.num_seqs;
  load.length = held;
  load.replays += 1;
  load.tokens += b.num_tokens;
  load.contexts += contexts;
  load.longest += length;
  load.blocks += blocks;
  const double draft_ns = times_.draft_ns > 0 ? times_.draft_ns * MostGuesses(b) : 0;
  load.ns += ns + draft_ns;
  load.exact_ns += std::min(ns, graph.exact(b.num_tokens, pairs)) + draft_ns;
  // Time outside replays is that of the first stage's host.
  now_ns_ += times_.step_ns + draft_ns;
  busy_ns_ += ns + times_.step_ns + draft_ns + times_.token_ns * b.num_samples;
  const double read_ns = std::min(ns, times_.read_ns + (decode ? graph.cost.ns_per_pair * pairs : 0));
  in_flight_.push_back({stages_.num_steps(), b.num_samples});
  now_ns_ = stages_.Begin(now_ns_, ns, read_ns);
  *fence = 0;
  return Status::Ok();
}

void SimulatedDevice::DrawTokens(uint32_t rows) {
  for (uint32_t i = 0; i < rows; ++i) {
    float* row = logits_.data() + std::size_t{i} * static_cast<uint32_t>(model_.vocab_size);
    const bool right = static_cast<double>(MixBits(draws_++) >> 11) * 0x1p-53 < times_.odds;
    row[kGuess] = right ? 1 : 0;
    row[kOther] = right ? 0 : 1;
  }
}

Status SimulatedDevice::Wait(Fence, const float** logits) {
  const InFlight step = in_flight_.front();
  in_flight_.pop_front();
  // Nobody waits for the last stage where it hands over no logits.
  if (step.samples > 0) AdvanceTo(stages_.End(step.number));
  now_ns_ += times_.token_ns * step.samples;
  if (times_.odds > 0) DrawTokens(step.samples);
  *logits = logits_.data();
  return Status::Ok();
}

std::vector<SimulatedLoad> SimulatedDevice::Loads() const {
  std::vector<SimulatedLoad> all;
  all.reserve(loads_.size());
  for (const auto& [key, load] : loads_) all.push_back(load);
  return all;
}

}  // namespace llmc
