// Engine, continued: checks that its parts agree; tests call it after each step.
#include <algorithm>
#include <string>
#include <unordered_map>

#include "engine/engine.h"

namespace llmc {

Status Engine::CheckIntegrity() const {
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  LLMC_RETURN_IF_ERROR(scheduler_.CheckIntegrity());
  std::lock_guard<std::mutex> lock(mutex_);
  if (!leaving_.empty() && !step_.on_its_way) {
    return Status::Error(LLMC_ERR_INTERNAL, std::to_string(leaving_.size()) + " requests have ended and are kept.");
  }
  uint64_t active = 0;
  for (const auto& [id, request] : live_) {
    for (const auto& s : request->sequences) {
      active += s->state == Sequence::State::kRunning || s->state == Sequence::State::kWaiting;
    }
  }
  if (active != scheduler_.num_running() + scheduler_.num_waiting()) {
    return Status::Error(LLMC_ERR_INTERNAL, std::to_string(active) + " sequences are active but the scheduler holds " +
                                                std::to_string(scheduler_.num_running() + scheduler_.num_waiting()) +
                                                ".");
  }
  std::unordered_map<uint64_t, uint32_t> users;
  for (const auto& [id, request] : live_) {
    if (request->adapter != 0) ++users[request->adapter];
  }
  for (const auto& request : leaving_) {
    if (request->adapter != 0) ++users[request->adapter];
  }
  for (const auto& [id, adapter] : adapters_) {
    if (adapter.num_requests != users[id] || (adapter.unloaded && adapter.num_requests == 0)) {
      return Status::Error(LLMC_ERR_INTERNAL, "Adapter " + std::to_string(id) + " is kept for " +
                                                  std::to_string(adapter.num_requests) + " requests, not for " +
                                                  std::to_string(users[id]) + ".");
    }
  }
  for (const auto& [id, request] : live_) {
    // The scheduler does not know masks set since the last step yet.
    if (std::find(mask_inbox_.begin(), mask_inbox_.end(), request.get()) != mask_inbox_.end()) continue;
    for (const auto& s : request->sequences) {
      // A mask that a step in flight uses is looked at again once that has drawn.
      if (!s->finished && s->in_flight == 0 && s->held != IsHeld(*request, *s)) {
        return Status::Error(LLMC_ERR_INTERNAL, "Request " + std::to_string(id) + " is held by mistake, or not held.");
      }
    }
  }
  return Status::Ok();
}

}  // namespace llmc
