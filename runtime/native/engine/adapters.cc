// The engine's adapters: slots and lifetimes.
#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "engine/engine.h"

namespace llmc {
namespace {

Status NotLoaded(uint64_t id) {
  return Status::Error(LLMC_ERR_NOT_FOUND, "Adapter " + std::to_string(id) + " is not loaded; load it again.");
}

}  // namespace

Status Engine::CheckMatrices(const std::vector<AdapterMatrix>& matrices) const {
  if (model_.adapters.empty()) {
    return Status::Invalid("The artifact takes no adapters; compile it with --lora-slots.");
  }
  if (matrices.empty()) return Status::Invalid("The adapter has no matrices; give at least one.");
  std::vector<std::tuple<uint32_t, uint32_t>> places;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const AdapterMatrix& m = matrices[i];
    const std::string name = "matrices[" + std::to_string(i) + "]";
    if (m.linear >= model_.adapters.size() || m.part >= model_.adapters[m.linear].num_parts) {
      return Status::Invalid(name + " is of part " + std::to_string(m.part) + " of layer " + std::to_string(m.linear) +
                             ", which the artifact has not; see llmc_artifact_get_adapter_linear.");
    }
    const uint32_t most = model_.adapters[m.linear].rank;
    if (m.rank < 1 || m.rank > most) {
      return Status::Invalid(name + " has rank " + std::to_string(m.rank) + "; use 1 to " + std::to_string(most) +
                             ", or compile with a larger --lora-rank.");
    }
    if (!std::isfinite(m.scale)) {
      return Status::Invalid(name + " has a scale that is not finite; save the adapter again.");
    }
    if (m.a == nullptr || m.b == nullptr) return Status::Invalid(name + " has no a or no b; give both.");
    places.emplace_back(m.linear, m.part);
  }
  std::sort(places.begin(), places.end());
  const auto twice = std::adjacent_find(places.begin(), places.end());
  if (twice == places.end()) return Status::Ok();
  return Status::Invalid("Part " + std::to_string(std::get<1>(*twice)) + " of layer " +
                         std::to_string(std::get<0>(*twice)) + " is given twice; give each once.");
}

// Takes the first free slot for an adapter that no request can use yet.
Status Engine::TakeSlot(uint64_t* id, uint32_t* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bool> taken(model_.adapter_slots);
  for (const auto& [other, adapter] : adapters_) taken[adapter.slot] = true;
  const auto free = std::find(taken.begin(), taken.end(), false);
  if (free == taken.end()) {
    return Status::Error(LLMC_ERR_QUEUE_FULL, "All " + std::to_string(taken.size()) +
                                                  " slots of adapters are taken; unload one, or compile with more "
                                                  "--lora-slots.");
  }
  *slot = static_cast<uint32_t>(free - taken.begin());
  Adapter adapter;
  adapter.slot = *slot;
  adapters_.emplace(next_adapter_id_, adapter);
  *id = next_adapter_id_++;
  return Status::Ok();
}

Status Engine::LoadAdapter(const std::vector<AdapterMatrix>& matrices, uint64_t* id) {
  LLMC_RETURN_IF_ERROR(CheckMatrices(matrices));
  uint64_t new_id = 0;
  uint32_t slot = 0;
  LLMC_RETURN_IF_ERROR(TakeSlot(&new_id, &slot));
  // Beside steps: none reads the slot, since no request has it.
  Status status = device_->LoadAdapter(slot, matrices);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!status.ok()) {
    adapters_.erase(new_id);
    return status;
  }
  adapters_.at(new_id).ready = true;
  *id = new_id;
  return Status::Ok();
}

// Returns NULL for an adapter that new requests cannot use. mutex_ is held.
Adapter* Engine::FindAdapter(uint64_t id) {
  const auto it = adapters_.find(id);
  return it == adapters_.end() || !it->second.ready || it->second.unloaded ? nullptr : &it->second;
}

Status Engine::UnloadAdapter(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Adapter* adapter = FindAdapter(id);
  if (adapter == nullptr) return NotLoaded(id);
  adapter->unloaded = true;
  if (adapter->num_requests == 0) adapters_.erase(id);
  return Status::Ok();
}

// Call when a request with an adapter has ended. mutex_ is held.
void Engine::ReleaseAdapter(const Request& request) noexcept {
  if (request.adapter == 0) return;
  const auto it = adapters_.find(request.adapter);
  if (--it->second.num_requests == 0 && it->second.unloaded) adapters_.erase(it);
}

}  // namespace llmc
