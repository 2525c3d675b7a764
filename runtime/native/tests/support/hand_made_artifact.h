// A hand-made artifact with two kernels that the C compiler builds: the runtime is tested without llmc's compiler.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "artifact/artifact.h"
#include "core/crc32.h"
#include "llmc/llmc.h"
#include "support/check.h"

namespace llmc_test {

using Bytes = std::vector<unsigned char>;

constexpr int kVocab = 8, kTokens = 4, kBlockSize = 16;
constexpr size_t kTailBytes = 56;

// Command 0 doubles the ids into the arena. Command 1 adds the weight and writes the logits of the sampled rows. It
// reads block_tables and token_seq, so that logits depend on all inputs that Run computes.
const char* const kSource = R"(
#include <stdint.h>
void twice(void *ids, void *arena, const int64_t *s, int32_t task, int32_t n) {
  for (int64_t t = task; t < s[0]; t += n) ((float *)arena)[t] = 2.0f * ((int32_t *)ids)[t];
}
void logits(void *arena, void *weight, void *sample, void *seq, void *tables, void *k, void *v, void *out,
            const int64_t *s, int32_t task, int32_t n) {
  (void)k; (void)v;
  for (int64_t i = task; i < s[2] * 8; i += n) {
    int32_t row = ((int32_t *)sample)[i / 8], q = ((int32_t *)seq)[row];
    ((float *)out)[i] = ((float *)arena)[row] + ((float *)weight)[i % 8] + 100.0f * q +
                        1000.0f * ((int32_t *)tables)[q * s[3]];
  }
})";

// Sets the CRC-32 of the whole file except the field itself.
inline void FixCrc(Bytes* file) {
  if (file->size() < 32) return;
  const uint32_t crc = llmc::Crc32(file->data() + 32, file->size() - 32, llmc::Crc32(file->data(), 28));
  std::memcpy(file->data() + 28, &crc, 4);
}

template <class T>
void Put(Bytes* file, size_t at, T value) {
  if (!CHECK(at <= file->size() && sizeof(T) <= file->size() - at)) return;
  std::memcpy(file->data() + at, &value, sizeof(T));
}

struct Tables {
  Bytes file;
  std::array<size_t, 15> offset{};  // of each section, by kind
};

inline Bytes Read(const std::string& name);

// Of the layers of an uneven artifact, of which commands read the first.
inline const std::vector<llmc::KvLayerRecord> kUnevenLayers = {{4 * 16 * 4, 16 * 16 * 4}, {512, 64}, {192, 0}};

// ranks 2: two ranks add up the results of command 0. Each computes its part of the logits; joined, a row has 2 kVocab.
// uneven_stages: of how many stages an uneven artifact is, 1 or 2. The second one passes on what it gets.
// states: layers 1 and 2 of an uneven artifact have a state.
inline Tables MakeTables(int ranks = 0, int uneven_stages = 0, bool states = false) {
  const Bytes weight_file = Read("weights.safetensors"), code = Read("kernels.so");
  const uint64_t bias = weight_file.size() - 128 - kTailBytes;
  const std::string strings("twice\0logits\0tablebiascpux86-64-v3tilesrowskernels.so", 53);
  llmc::ModelRecord model{};
  model = {1, 1, 4, kBlockSize, 0, kVocab, 64, 2, 0, 0, 1, {7}, 1, 4 * 16 * 4, 16 * 16 * 4, 0, 0, 0, 0, 0, 0, 0, 0};
  const std::vector<llmc::KernelRecord> kernels = {{0, 5, 2, 0, 0, {}}, {6, 6, 8, 2, 0, {64, 1}}};
  if (ranks != 0) model.vocab_size = 2 * kVocab, model.num_ranks = ranks, model.num_shared_weights = 1;
  std::vector<llmc::WeightRecord> weights = {
      {13, 5, 0, 1, 64, kVocab * 4, {kVocab, 0, 0, 0}, llmc::Crc32(weight_file.data() + 64, kVocab * 4), 39, 4, 0},
      {18, 4, 3, 1, 128, bias, {int64_t(bias), 0, 0, 0}, llmc::Crc32(weight_file.data() + 128, bias), 39, 4, 0}};
  std::vector<llmc::GraphRecord> graphs = {{0, 1, 4, kTokens, 2, 2, 4, 4, 0, 2, 64, 0, {}}};
  std::vector<llmc::CommandRecord> commands = {{0, 0, 2, 1, -1, 0}, {1, 2, 8, 0, 0, 2}};
  std::vector<llmc::OperandRecord> operands = {
      {2, 0, 0, kTokens * 4}, {0, 0, 0, kTokens * 4},   {0, 0, 0, kTokens * 4}, {1, 0, 0, kVocab * 4},
      {2, 6, 0, 8},           {2, 7, 0, kTokens * 4},   {2, 3, 0, 32},          {3, 0, 0, 4 * 16 * 4},
      {4, 0, 0, 16 * 16 * 4}, {5, 0, 0, 2 * kVocab * 4}};
  std::vector<llmc::CollectiveRecord> collectives;
  if (ranks != 0) {
    const auto piece = [&](uint64_t at) {
      const uint32_t crc = llmc::Crc32(weight_file.data() + at, kVocab * 4);
      return llmc::WeightRecord{18, 4, 0, 1, at, kVocab * 4, {kVocab, 0, 0, 0}, crc, 39, 4, 0};
    };
    weights = {weights[0], piece(128), piece(192)};
    collectives = {{0, 0, 1, 0, 0, {}}, {1, 1, 2 * kVocab, 0, 0, {}}};
    graphs[0].num_commands = 4, graphs[0].arena_bytes = 192;
    commands = {{0, 0, 2, 1, -1, 0},
                {llmc::kCollective, 10, 2, 1, -1, 7},
                {1, 2, 8, 1, 0, 2},
                {llmc::kCollective + 1, 12, 2, 1, -1, 7}};
    operands[2].offset = 64, operands[3].index = 1, operands[9] = {0, 0, 128, 2 * kVocab * 4};
    operands.insert(
        operands.end(),
        {{0, 0, 0, kTokens * 4}, {0, 0, 64, kTokens * 4}, {0, 0, 128, 2 * kVocab * 4}, {5, 0, 0, 2 * 2 * kVocab * 4}});
  }
  std::vector<llmc::StageRecord> stages;
  if (uneven_stages != 0) {
    model.num_layers = 3, model.key_block_bytes = kUnevenLayers[1].key_block_bytes;
    model.value_block_bytes = kUnevenLayers[0].value_block_bytes;
  }
  if (uneven_stages == 2) {
    stages = {{0, 1}, {1, 2}};
    collectives = {{2, 1, kVocab, 0, 0, {}}, {2, 1, kVocab, 0, 1, {}}};
    graphs[0].num_commands = 4, commands[1].barrier = 1;
    for (uint32_t stage : {0u, 1u}) commands.push_back({llmc::kCollective + stage, 9, 1, 1, -1, 7});
  }
  const uint32_t num_sections = states ? 14 : uneven_stages != 0 ? 13 : ranks == 0 ? 9 : 11;
  Tables t;
  const llmc::TargetRecord target = {22, 3, 25, 9, 34, 5, 1, 0};
  const llmc::CodeRecord code_file = {43, 10, llmc::Crc32(code.data(), code.size()), 0, code.size()};
  t.file.resize(64 + num_sections * 24);
  size_t entry = 64;
  const auto add = [&](uint32_t kind, uint32_t record_bytes, const void* data, size_t count) {
    t.file.resize((t.file.size() + 7) / 8 * 8);
    t.offset[kind] = t.file.size();
    Put(&t.file, entry, kind);
    Put(&t.file, entry + 4, record_bytes);
    Put(&t.file, entry + 8, uint64_t{t.file.size()});
    Put(&t.file, entry + 16, uint64_t{count});
    entry += 24;
    const auto* bytes = static_cast<const unsigned char*>(data);
    t.file.insert(t.file.end(), bytes, bytes + record_bytes * count);
  };
  add(1, 1, strings.data(), strings.size());
  add(2, 128, &model, 1);
  add(3, 48, kernels.data(), kernels.size());
  add(4, 80, weights.data(), weights.size());
  add(5, 64, graphs.data(), graphs.size());
  add(6, 24, commands.data(), commands.size());
  add(7, 24, operands.data(), operands.size());
  add(8, 32, &target, 1);
  add(9, 24, &code_file, 1);
  if (num_sections > 9) {
    add(10, 64, collectives.data(), 0);
    add(11, 32, collectives.data(), collectives.size());
  }
  if (uneven_stages != 0) {
    add(12, 8, stages.data(), stages.size());
    add(13, 16, kUnevenLayers.data(), kUnevenLayers.size());
  }
  const std::vector<llmc::StateLayerRecord> state_layers = {{1, 0}, {2, 0}};
  if (states) add(14, 8, state_layers.data(), state_layers.size());
  std::memcpy(t.file.data(), "LLMCGRPH", 8);
  Put(&t.file, 8, uint32_t{states ? 12u : uneven_stages != 0 ? 10u : ranks == 0 ? 5u : 7u});
  Put(&t.file, 12, uint32_t{64});
  Put(&t.file, 16, uint64_t{t.file.size()});
  Put(&t.file, 24, num_sections);
  Put(&t.file, 32, uint64_t{weight_file.size()});
  Put(&t.file, 40, llmc::Crc32(weight_file.data(), 64));
  FixCrc(&t.file);
  return t;
}

inline std::string g_dir;  // directory of the artifact

inline void Write(const std::string& name, const Bytes& bytes) {
  std::ofstream out(g_dir + "/" + name, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  CHECK(out.good());
}

inline Bytes Read(const std::string& name) {
  std::ifstream in(g_dir + "/" + name, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(in), {});
}

// Writes the artifact to a new directory, g_dir. bias_bytes: size of a weight that no command reads. With ranks it must
// be 128: their tables lie there.
inline Tables MakeArtifact(uint64_t bias_bytes = 8, int ranks = 0, int uneven_stages = 0, bool states = false) {
  char pattern[] = "/tmp/llmc_artifact_XXXXXX";
  CHECK(::mkdtemp(pattern) != nullptr);
  g_dir = pattern;
  {
    std::ofstream source(g_dir + "/kernels.c");
    source << kSource;
  }
  CHECK(std::system(("cc -O1 -shared -fPIC -o " + g_dir + "/kernels.so " + g_dir + "/kernels.c").c_str()) == 0);
  Bytes weights(128 + bias_bytes + kTailBytes);  // header, "table", padding, "bias", padding
  for (size_t i = 0; i < bias_bytes; ++i) weights[128 + i] = static_cast<unsigned char>(i % 251 + 1);
  Put(&weights, 0, uint64_t{56});
  for (int v = 0; v < kVocab; ++v) Put(&weights, 64 + 4 * static_cast<size_t>(v), 0.5f * static_cast<float>(v));
  if (ranks != 0) {
    // The table of rank 0 is 100 + v, that of rank 1 200 + v; padding is zero.
    std::fill(weights.begin() + 128, weights.end(), static_cast<unsigned char>(0));
    for (int r = 0; r < 2; ++r) {
      for (int v = 0; v < kVocab; ++v) {
        Put(&weights, 128 + 64 * static_cast<size_t>(r) + 4 * static_cast<size_t>(v), 100.0f * (r + 1) + v);
      }
    }
  }
  Write("weights.safetensors", weights);
  const Tables good = MakeTables(ranks, uneven_stages, states);
  Write("graphs.bin", good.file);
  return good;
}

inline void RemoveArtifact() {
  for (const char* name : {"graphs.bin", "weights.safetensors", "kernels.so", "kernels.c"}) {
    ::unlink((g_dir + "/" + name).c_str());
  }
  ::rmdir(g_dir.c_str());
}

// Opens a device of kind "cpu" with one option, or none.
inline llmc_device* OpenCpu(const char* key = nullptr, const std::string& value = "") {
  const llmc_key_value option{key, value.c_str()};
  llmc_device* device = nullptr;
  CHECK(llmc_device_open("cpu", &option, key == nullptr ? 0 : 1, &device, nullptr) == LLMC_OK);
  return device;
}

// A batch for the artifact's graph. Its first row of logits is 1008 + table, the second 2110 + table.
struct Batch {
  std::vector<int32_t> ids{3, 4, 5}, positions{0, 1, 0}, slots{16, 17, 32}, tables{1, 0, 0, 0, 2, 0, 0, 0};
  std::vector<int32_t> context{2, 1}, start{0, 2, 3}, sample{1, 2};
  std::vector<int32_t> states{};  // of an artifact with states
  uint32_t num_tokens = 3, num_seqs = 2, num_samples = 2, stride = 4;
  llmc_batch View() const {
    llmc_batch b;
    llmc_batch_init(&b, sizeof(b));
    b.num_tokens = num_tokens, b.num_seqs = num_seqs, b.num_samples = num_samples, b.block_table_stride = stride;
    b.input_ids = ids.data(), b.positions = positions.data(), b.slot_mapping = slots.data();
    b.block_tables = tables.data(), b.context_lens = context.data(), b.query_start = start.data();
    b.sample_index = sample.data();
    b.state_slots = states.empty() ? nullptr : states.data();
    return b;
  }
};

}  // namespace llmc_test
