#include "engine/encoder.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

namespace llmc {

Status Encoder::Create(const ModelShape& model, const MakeDevice& make, std::unique_ptr<Encoder>* out) {
  if (!model.takes_states || model.places_rows || model.vector_width <= 0 || model.graphs.empty()) {
    return Status::Invalid(
        "The artifact encodes no images; give the one that llmc compile --images made beside the model's.");
  }
  uint32_t longest = 0;
  for (const GraphShape& graph : model.graphs) longest = std::max(longest, graph.max_tokens);
  const auto block_size = static_cast<uint32_t>(model.block_size);
  std::unique_ptr<Device> device;
  LLMC_RETURN_IF_ERROR(make((longest + block_size - 1) / block_size + 1, &device));
  if (device->TakenStates() == nullptr) {
    return Status::Invalid("A device of several ranks encodes no images; use one of a single process.");
  }
  out->reset(new Encoder(std::move(device)));
  return Status::Ok();
}

Encoder::Encoder(std::unique_ptr<Device> device) : device_(std::move(device)), model_(device_->model()) {
  for (const GraphShape& graph : model_.graphs) {
    max_patches_ = std::max(max_patches_, std::min(graph.max_tokens, static_cast<uint32_t>(model_.max_model_len)));
    max_rows_ = std::max(max_rows_, graph.max_samples);
  }
}

// The smallest graph that holds the image.
Status Encoder::ChooseGraph(const llmc_patches& p, uint32_t* graph) const {
  const std::vector<GraphShape>& graphs = model_.graphs;
  bool found = false;
  // A bucket may have more rows than the largest image has patches.
  const bool fits = p.num_patches <= max_patches_;
  for (uint32_t i = 0; fits && i < graphs.size(); ++i) {
    if (graphs[i].max_tokens < p.num_patches || graphs[i].max_samples < p.num_rows) continue;
    if (!found || graphs[i].max_tokens < graphs[*graph].max_tokens) *graph = i;
    found = true;
  }
  if (found) return Status::Ok();
  return Status::Error(LLMC_ERR_OUT_OF_RANGE,
                       "The image has " + std::to_string(p.num_patches) + " patches for " + std::to_string(p.num_rows) +
                           " rows, but at most " + std::to_string(max_patches_) + " and " + std::to_string(max_rows_) +
                           " fit a bucket; scale it down, or compile the model with larger ones.");
}

Status Encoder::CheckIndices(const llmc_patches& p) const {
  const auto check = [](const char* what, const int32_t* values, uint32_t count, int64_t end) {
    for (uint32_t i = 0; i < count; ++i) {
      if (values[i] >= 0 && values[i] < end) continue;
      return Status::Error(LLMC_ERR_OUT_OF_RANGE, std::string(what) + "[" + std::to_string(i) + "] is " +
                                                      std::to_string(values[i]) + "; use 0 to " +
                                                      std::to_string(end - 1) + ".");
    }
    return Status::Ok();
  };
  LLMC_RETURN_IF_ERROR(check("places", p.places, p.num_patches, model_.vocab_size));
  return check("first", p.first, p.num_rows, p.num_patches);
}

void Encoder::Fill(uint32_t graph, const llmc_patches& p) {
  const auto block_size = static_cast<uint32_t>(model_.block_size);
  const auto count = static_cast<int32_t>(p.num_patches);
  batch_.graph = graph;
  batch_.num_tokens = p.num_patches;
  batch_.num_seqs = 1;
  batch_.num_samples = p.num_rows;
  batch_.block_table_stride = (p.num_patches + block_size - 1) / block_size;
  batch_.input_ids.assign(p.places, p.places + p.num_patches);
  batch_.positions.resize(p.num_patches);
  std::iota(batch_.positions.begin(), batch_.positions.end(), 0);
  batch_.slot_mapping.resize(p.num_patches);  // behind the dummy block
  std::iota(batch_.slot_mapping.begin(), batch_.slot_mapping.end(), model_.block_size);
  batch_.block_tables.resize(batch_.block_table_stride);
  std::iota(batch_.block_tables.begin(), batch_.block_tables.end(), 1);
  batch_.context_lens.assign(1, count);
  batch_.query_start = {0, count};
  batch_.sample_index.assign(p.first, p.first + p.num_rows);
}

Status Encoder::Encode(const llmc_patches& p, float* rows) {
  if (p.num_patches == 0 || p.num_rows == 0) return Status::Invalid("An image needs at least one patch and one row.");
  uint32_t graph = 0;
  LLMC_RETURN_IF_ERROR(ChooseGraph(p, &graph));
  LLMC_RETURN_IF_ERROR(CheckIndices(p));
  const std::size_t size = std::size_t{p.num_rows} * static_cast<uint32_t>(model_.vector_width);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Fill(graph, p);
    LLMC_RETURN_IF_ERROR(device_->BeforeStep());
    std::copy_n(p.patches, std::size_t{p.num_patches} * static_cast<uint32_t>(model_.states_width),
                device_->TakenStates());
    Fence fence = 0;
    LLMC_RETURN_IF_ERROR(device_->Enqueue(batch_, &fence));
    const float* made = nullptr;
    LLMC_RETURN_IF_ERROR(device_->Wait(fence, &made));
    std::copy_n(made, size, rows);
  }
  if (std::all_of(rows, rows + size, [](float value) { return std::isfinite(value); })) return Status::Ok();
  return Status::Error(
      LLMC_ERR_NOT_FINITE,
      "A row of the image is NaN or infinite; check the model's weights, or compile it with --dtype f32.");
}

}  // namespace llmc
