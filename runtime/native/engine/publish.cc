// Engine, continued: events and statistics, made visible to other threads once per step.
#include <algorithm>
#include <chrono>
#include <vector>

#include "core/c_struct.h"
#include "core/clock.h"
#include "engine/engine.h"
#include "engine/make_room.h"
#include "engine/wanted_bucket.h"

namespace llmc {

uint32_t Engine::Ready() const {
  const bool work = runnable_ || !inbox_.empty() || !cancel_inbox_.empty() || !mask_inbox_.empty() ||
                    (next_deadline_ns_ != 0 && next_deadline_ns_ <= MonotonicNs());
  uint32_t ready = 0;
  if (!events_.empty()) ready |= LLMC_READY_EVENTS;
  if (work) ready |= LLMC_READY_WORK;
  return ready;
}

uint32_t Engine::Wait(uint64_t timeout_ns) {
  constexpr uint64_t kForever = INT64_MAX;
  const uint64_t begin = MonotonicNs();
  const uint64_t end = timeout_ns < kForever - begin ? begin + timeout_ns : kForever;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    const uint32_t ready = Ready();
    if (ready != 0 || MonotonicNs() >= end) return ready;
    const uint64_t until = std::min(end, next_deadline_ns_ ? next_deadline_ns_ : kForever);
    if (until >= kForever) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock,
                          std::chrono::steady_clock::time_point(std::chrono::nanoseconds(static_cast<int64_t>(until))));
    }
  }
}

uint64_t Engine::Poll(llmc_event* events, uint64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capacity == 0) return 0;
  const uint64_t count = std::min<uint64_t>(capacity, events_.size());
  WriteArray(events_, count, events);
  events_.erase(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

llmc_engine_stats Engine::Stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

std::vector<DeviceStat> Engine::DeviceStats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_stats_;
}

std::vector<llmc_graph_stats> Engine::GraphStats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return graph_stats_;
}

// Gives each graph of the device its statistics. Call it between two steps.
void Engine::ListGraphs() {
  std::lock_guard<std::mutex> lock(mutex_);
  graph_stats_.resize(model_.graphs.size());
  for (uint32_t graph = 0; graph < graph_stats_.size(); ++graph)
    graph_stats_[graph].launched = device_->launches(graph);
}

std::vector<llmc_eviction_count> Engine::Evictions() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return evictions_;
}

std::vector<llmc_bucket_miss> Engine::BucketMisses() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bucket_misses_;
}

std::vector<llmc_request_mark> Engine::TakeRequestMarks(bool* complete) {
  std::vector<llmc_request_mark> marks;
  marks.reserve(RequestMarks::kMost);
  marks_.Take(&marks, complete);
  return marks;
}

std::vector<llmc_step_shape> Engine::TakeStepShapes(uint64_t* lost) {
  std::vector<llmc_step_shape> shapes;
  shapes.reserve(StepShapes::kMost);
  std::lock_guard<std::mutex> lock(mutex_);
  step_shapes_.Take(&shapes, lost);
  return shapes;
}

// The bucket for a missed shape is chosen once, by the graphs that exist when it first misses. mutex_ is held.
void Engine::CopyMisses() {
  const std::vector<BucketMiss>& all = scheduler_.bucket_misses();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const BucketMiss& m = all[i];
    if (i == bucket_misses_.size()) {
      const WantedBucket wanted = WantedFor(m, model_);
      bucket_misses_.push_back(
          {0, static_cast<uint32_t>(m.phase), m.seqs, m.tokens, m.blocks, 0, 0, m.graph, 0, wanted.batch, wanted.seq});
    }
    bucket_misses_[i].count = m.count;
  }
}

// Frees ended requests without rows in a step in flight, which uses their parameters and adapters. mutex_ is held.
void Engine::FreeLeaving() noexcept {
  const auto free = [](const std::unique_ptr<Request>& r) {
    return std::all_of(r->sequences.begin(), r->sequences.end(), [](const auto& s) { return s->in_flight == 0; });
  };
  const auto first = std::partition(leaving_.begin(), leaving_.end(), [&](const auto& r) { return !free(r); });
  for (auto it = first; it != leaving_.end(); ++it) ReleaseAdapter(**it);
  leaving_.erase(first, leaving_.end());
}

// Makes the step visible to other threads: events, statistics, ended requests.
void Engine::Publish(bool stepped, bool progressed) {
  llmc_engine_stats& c = counters_;
  if (stepped) {
    const GraphShape& g = model_.graphs[step_.plan.graph];
    ++c.num_steps;
    ++(step_.plan.prefill ? c.num_prefill_steps : c.num_decode_steps);
    c.num_mixed_steps += step_.plan.mixed;
    c.scheduled_tokens += step_.plan.load.tokens;
    c.padded_tokens += g.max_tokens - step_.plan.load.tokens;
  }
  c.num_running = scheduler_.num_running();
  c.num_blocks = blocks_.num_usable();
  c.num_free_blocks = blocks_.num_free();
  c.num_cached_blocks = blocks_.num_cached();
  c.num_states = blocks_.states().num_usable();
  c.num_free_states = blocks_.states().num_free();
  c.num_kept_states = blocks_.states().num_kept();
  device_->GetStats(&new_device_stats_);
  if (const DraftModel* draft = speculator_.draft(); draft != nullptr) {
    c.num_draft_blocks = draft->num_blocks();
    c.num_free_draft_blocks = draft->num_free_blocks();
    c.draft_ns = speculator_.total_draft_ns();
  }
  c.judged_tokens = speculator_.num_judged();
  c.num_preemptions = scheduler_.num_preemptions();
  c.num_evictions = scheduler_.num_evictions();
  c.num_promotions = scheduler_.num_promotions();
  c.num_bucket_misses = scheduler_.num_bucket_misses();
  c.num_missed_shapes = scheduler_.bucket_misses().size();
  c.prefix_query_tokens = scheduler_.num_query_tokens();
  c.prefix_hit_tokens = scheduler_.num_hit_tokens();

  MakeRoom(&leaving_, ended_.size());
  std::lock_guard<std::mutex> lock(mutex_);
  if (stepped) {
    llmc_graph_stats& g = graph_stats_[step_.plan.graph];
    ++g.replays;
    g.tokens += step_.plan.load.tokens;
    g.padded_tokens += model_.graphs[step_.plan.graph].max_tokens - step_.plan.load.tokens;
    g.replay_ns += replay_ns_;
    if (!step_.plan.prefill) decode_ns_ = decode_ns_ == 0 ? replay_ns_ : (7 * decode_ns_ + replay_ns_) / 8;
    const Phase carried = step_.plan.mixed ? Phase::kMixed : step_.plan.prefill ? Phase::kPrefill : Phase::kDecode;
    const StepLoad& load = step_.plan.load;
    step_shapes_.Count({0, static_cast<uint32_t>(carried), step_.plan.graph, load.seqs, load.tokens, load.samples,
                        load.blocks, carried == Phase::kDecode ? load.all_blocks : 0, 0, 0, 0},
                       replay_ns_);
  }
  if (stats_.num_bucket_misses != c.num_bucket_misses) CopyMisses();
  if (stats_.num_evictions != c.num_evictions) {
    evictions_.clear();
    for (const EvictionCount& one : scheduler_.evictions()) evictions_.push_back({0, one.priority, one.count});
  }
  const uint64_t asked_ns = mask_updates_.empty() ? 0 : MonotonicNs();
  for (MaskUpdate& update : mask_updates_) {
    update.mask->state = update.state;
    update.mask->asked_ns = asked_ns;
    update.mask->offered.swap(update.offered);
  }
  mask_updates_.clear();
  events_.insert(events_.end(), new_events_.begin(), new_events_.end());
  new_events_.clear();
  CountAsked();
  if (!ended_.empty()) {
    // A cancel or a mask may still name a request that ends now.
    for (std::vector<Request*>* inbox : {&cancel_inbox_, &mask_inbox_}) {
      inbox->erase(std::remove_if(inbox->begin(), inbox->end(), [](Request* r) { return r->ended; }), inbox->end());
    }
    for (Request* r : ended_) {
      const auto it = live_.find(r->id);
      leaving_.push_back(std::move(it->second));  // capacity is reserved
      live_.erase(it);
    }
    ended_.clear();
  }
  FreeLeaving();
  num_queued_ = static_cast<uint32_t>(inbox_.size()) + scheduler_.num_unstarted();
  c.num_waiting = static_cast<uint32_t>(inbox_.size()) + scheduler_.num_waiting();
  stats_ = c;
  device_stats_.swap(new_device_stats_);
  runnable_ = !landed_.ok() || ahead_.on_its_way || num_more_ > 0 ||
              (progressed && scheduler_.num_running() + scheduler_.num_waiting() > 0);
  next_deadline_ns_ = deadlines_.empty() ? 0 : deadlines_.begin()->first;
  changed_.notify_all();
}

}  // namespace llmc
