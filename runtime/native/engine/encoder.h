// Encoder: a model that turns an image into rows which take the place of tokens of another model's prompts.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "device/device.h"
#include "llmc/llmc.h"

namespace llmc {

class Encoder {
 public:
  // make: loads the model with so many KV blocks, the dummy block among them.
  using MakeDevice = std::function<Status(uint32_t num_blocks, std::unique_ptr<Device>* device)>;
  static Status Create(const ModelShape& model, const MakeDevice& make, std::unique_ptr<Encoder>* out);

  uint32_t max_patches() const { return max_patches_; }
  uint32_t max_rows() const { return max_rows_; }
  // rows: [patches.num_rows][vector_width]. Calls take turns.
  Status Encode(const llmc_patches& patches, float* rows);

 private:
  explicit Encoder(std::unique_ptr<Device> device);

  Status ChooseGraph(const llmc_patches& patches, uint32_t* graph) const;
  Status CheckIndices(const llmc_patches& patches) const;
  void Fill(uint32_t graph, const llmc_patches& patches);

  std::mutex mutex_;  // guards the device and the batch
  std::unique_ptr<Device> device_;
  const ModelShape& model_;
  uint32_t max_patches_ = 0, max_rows_ = 0;
  StepBatch batch_;
};

}  // namespace llmc
