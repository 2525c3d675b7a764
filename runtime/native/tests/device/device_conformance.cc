// What every device promises, checked on an artifact of a target: device_conformance KIND ARTIFACT [KEY=VALUE...]
// Bits are compared, never bounds. It knows a device by device.h and registry.h alone. defect=NAME has the device make a
// mistake, which must be noticed.
//
// Guards stand between the blocks that steps are given: every fourth block, the first and the last among them, holds keys
// and values of a sequence that nothing else uses, and must have them after every graph, copy and mistake. A device that
// runs steps command by command shows its memory after each (support/watched_step.h).
// Of a model with states there are as many slots as blocks. A sequence has the slot that is numbered as its first block,
// so that slots of guards are guards, too.
// tests/compiler/targets/test_commands.py also looks at bytes that no operand has, of devices that run code on the host.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/crc32.h"
#include "device/registry.h"
#include "device/replay_profile.h"
#include "engine/engine.h"
#include "support/check.h"
#include "support/watched_step.h"

namespace {

using llmc::Device;
using llmc::GraphShape;
using llmc::Phase;
using llmc::Status;
using llmc::StepBatch;

std::mt19937 g_random(1);
uint32_t Pick(uint32_t low, uint32_t high) { return std::uniform_int_distribution<uint32_t>(low, high)(g_random); }

// A part of a sequence in a step: `count` tokens from `start` on, whose keys lie in the blocks of `table`.
struct Part {
  uint32_t sequence, start, count;
  std::vector<int32_t> table;
  uint32_t num_samples;  // of its last tokens
  int32_t own_slot = -1;  // of its states; -1: that of its first block
  int32_t keep_tokens = 0, keep_slot = 0;

  uint32_t end() const { return start + count; }
  int32_t slot() const { return own_slot < 0 ? table[0] : own_slot; }
};

// A device with one of these mistakes: copy, late, company, spill, stray, leak, beside.
class Defective final : public Device, public llmc::CommandRunner {
 public:
  Defective(std::unique_ptr<Device> inner, std::string defect) : inner_(std::move(inner)), defect_(std::move(defect)) {}

  const llmc::ModelShape& model() const override { return inner_->model(); }
  uint32_t num_blocks() const override { return inner_->num_blocks(); }
  uint32_t num_states() const override { return inner_->num_states(); }
  Status Enqueue(const StepBatch& batch, llmc::Fence* fence) override {
    batch_ = &batch;
    company_ = batch.num_seqs > 1;
    written_ = static_cast<uint32_t>(batch.slot_mapping.empty() ? 0 : batch.slot_mapping.back() / model().block_size);
    slot_ = static_cast<uint32_t>(batch.state_slots.empty() ? 0 : batch.state_slots[0]);
    const auto named = [&](uint32_t block) {
      return std::count(batch.block_tables.begin(), batch.block_tables.end(), static_cast<int32_t>(block)) != 0;
    };
    for (beside_ = 0; beside_ + 1 < num_blocks() && named(beside_);) ++beside_;
    return defect_ == "late" ? Status::Ok() : inner_->Enqueue(batch, fence);
  }
  Status Wait(llmc::Fence fence, const float** logits) override {
    if (defect_ == "late") LLMC_RETURN_IF_ERROR(inner_->Enqueue(*batch_, &fence));  // what the caller has changed
    const Status status = inner_->Wait(fence, logits);
    // Into a block that the step does not name.
    if (status.ok() && defect_ == "stray") return inner_->CopyBlock(written_, beside_);
    if (status.ok() && defect_ == "leak") return inner_->CopyState(slot_, 0);
    if (status.ok() && defect_ == "company" && company_ && *logits != nullptr) {
      rows_.assign(*logits, *logits + model().vocab_size);
      rows_[0] = std::nextafter(rows_[0], 1e30f);
      *logits = rows_.data();
    }
    return status;
  }
  Status CopyBlock(uint32_t from, uint32_t to) override {
    return defect_ == "copy" && from < num_blocks() && to < num_blocks() ? Status::Ok() : inner_->CopyBlock(from, to);
  }
  // Writes where no row says so.
  void Visit(uint32_t graph) override {
    inner_->Visit(graph);
    if (defect_ == "spill") {
      for (uint32_t block = 1; block < num_blocks(); ++block) static_cast<void>(inner_->CopyBlock(0, block).ok());
    }
  }
  Status CopyState(uint32_t from, uint32_t to) override {
    return defect_ == "copy" && from < num_states() && to < num_states() ? Status::Ok() : inner_->CopyState(from, to);
  }
  Status ReadState(uint32_t slot, unsigned char* out) override { return inner_->ReadState(slot, out); }
  Status WriteState(uint32_t slot, const unsigned char* from) override { return inner_->WriteState(slot, from); }
  Status ReadBlock(uint32_t block, unsigned char* out) override { return inner_->ReadBlock(block, out); }
  Status WriteBlock(uint32_t block, const unsigned char* from) override { return inner_->WriteBlock(block, from); }
  llmc::CommandRunner* command_runner() override { return inner_->command_runner() == nullptr ? nullptr : this; }
  Status Begin(const StepBatch& batch) override {
    num_run_ = 0;
    return inner_->command_runner()->Begin(batch);
  }
  Status RunCommand(uint32_t command) override {
    ++num_run_;
    return inner_->command_runner()->RunCommand(command);
  }
  Status ReadOperand(uint32_t command, uint32_t operand, uint64_t bytes, void* out) override {
    const Status status = inner_->command_runner()->ReadOperand(command, operand, bytes, out);
    if (defect_ == "beside" && num_run_ >= 3) static_cast<unsigned char*>(out)[bytes - 1] ^= 1;
    return status;
  }

 private:
  std::unique_ptr<Device> inner_;
  std::string defect_;
  uint32_t num_run_ = 0;  // commands of a step that runs one by one
  const StepBatch* batch_ = nullptr;
  bool company_ = false;
  uint32_t written_ = 0, beside_ = 0, slot_ = 0;
  std::vector<float> rows_;
};

class Suite {
 public:
  Suite(std::string kind, std::string path, llmc::DeviceOptions options, std::string defect)
      : kind_(std::move(kind)), path_(std::move(path)), options_(std::move(options)), defect_(std::move(defect)) {}

  void Run() {
    CHECK_OK(llmc::Artifact::Open(path_, &artifact_));
    CHECK_OK(llmc::OpenDeviceOf(kind_, options_, &opened_));
    if (artifact_ == nullptr || opened_ == nullptr) return;
    Facts();
    Refusals();
    Prepare();
    if (device_ == nullptr) return;
    for (uint32_t g = 0; g < model().graphs.size(); ++g) {
      for (int round = 0; round < 6; ++round) Company(g, round);
      CheckGuards("graph " + std::to_string(g));
      for (int round = 0; round < 3; ++round) Commands(g, round);
      CheckGuards("the commands of graph " + std::to_string(g));
    }
    if (device_->samples()) Draws();
    if (device_->overlap() == llmc::Overlap::kChained) Chains();
    Copies();
    CheckGuards("copies");
    HandsOver();
    CheckGuards("hand-overs");
    if (model().recurrent()) {
      Keeps();
      CheckGuards("kept states");
    }
    Mistakes();
    CheckGuards("mistakes");
    Counts();
    device_.reset();
    Swaps();
    Engines();
  }

 private:
  const llmc::ModelShape& model() const { return artifact_->shape(); }
  uint32_t block_size() const { return static_cast<uint32_t>(model().block_size); }
  // Tokens that a sequence may have in a graph.
  uint32_t Reach(const GraphShape& g) const {
    return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{g.max_blocks_per_seq} * block_size(),
                                                    static_cast<uint64_t>(model().max_model_len)));
  }

  int32_t Token(uint32_t sequence, uint32_t position) const {
    uint64_t x = (uint64_t{sequence} << 32 | position) * 0x9e3779b97f4a7c15ull;
    return static_cast<int32_t>((x ^ x >> 29) % static_cast<uint64_t>(model().vocab_size));
  }

  llmc::LoadOptions Pools(uint32_t entries) const { return {entries, model().recurrent() ? entries : 0}; }

  StepBatch BatchOf(uint32_t graph, const std::vector<Part>& parts) const {
    StepBatch b;
    b.graph = graph;
    b.num_seqs = static_cast<uint32_t>(parts.size());
    b.query_start.push_back(0);
    for (const Part& p : parts)
      b.block_table_stride = std::max(b.block_table_stride, static_cast<uint32_t>(p.table.size()));
    for (const Part& p : parts) {
      for (uint32_t position = p.start; position < p.end(); ++position) {
        b.input_ids.push_back(Token(p.sequence, position));
        b.positions.push_back(static_cast<int32_t>(position));
        b.slot_mapping.push_back(p.table[position / block_size()] * static_cast<int32_t>(block_size()) +
                                 static_cast<int32_t>(position % block_size()));
      }
      b.query_start.push_back(static_cast<int32_t>(b.input_ids.size()));
      b.context_lens.push_back(static_cast<int32_t>(p.end()));
      std::vector<int32_t> row = p.table;
      row.resize(b.block_table_stride, 0);
      b.block_tables.insert(b.block_tables.end(), row.begin(), row.end());
      for (uint32_t i = p.num_samples; i > 0; --i)
        b.sample_index.push_back(b.query_start.back() - static_cast<int32_t>(i));
      if (model().recurrent()) b.state_slots.insert(b.state_slots.end(), {p.slot(), p.keep_tokens, p.keep_slot});
    }
    b.num_tokens = static_cast<uint32_t>(b.input_ids.size());
    b.num_samples = static_cast<uint32_t>(b.sample_index.size());
    return b;
  }

  // Rows of logits. What the caller gave is overwritten between Enqueue and Wait.
  std::vector<std::vector<float>> Step(uint32_t graph, const std::vector<Part>& parts) {
    StepBatch b = BatchOf(graph, parts);
    const uint32_t rows = b.num_samples;
    CHECK_OK(device_->BeforeStep());
    llmc::Fence fence = 0;
    CHECK_OK(device_->Enqueue(b, &fence));
    for (auto* array : {&b.input_ids, &b.positions, &b.slot_mapping, &b.block_tables, &b.context_lens, &b.query_start,
                        &b.sample_index, &b.state_slots}) {
      std::fill(array->begin(), array->end(), -1);
    }
    const float* logits = nullptr;
    CHECK_OK(device_->Wait(fence, &logits));
    std::vector<std::vector<float>> out;
    const size_t vocab = static_cast<size_t>(model().vocab_size);
    for (uint32_t i = 0; i < rows && logits != nullptr; ++i)
      out.emplace_back(logits + i * vocab, logits + (i + 1) * vocab);
    return out;
  }

  std::vector<int32_t> TableOf(uint32_t tokens) {
    std::vector<int32_t> table;
    for (uint32_t i = 0; i * block_size() < tokens; ++i) {
      CHECK(!free_.empty());
      table.push_back(free_.back());
      free_.pop_back();
    }
    return table;
  }
  void Free(const std::vector<int32_t>& table) {
    free_.insert(free_.end(), table.begin(), table.end());
    std::shuffle(free_.begin(), free_.end(), g_random);
  }

  // Computes a sequence up to `tokens`, in chunks that the first prefill graph holds. slot: as in Part.
  std::vector<float> Fill(uint32_t sequence, uint32_t from, uint32_t tokens, const std::vector<int32_t>& table,
                          int32_t slot = -1) {
    std::vector<float> last;
    const uint32_t most = model().graphs[fill_].max_tokens;
    for (uint32_t start = from; start < tokens;) {
      const uint32_t count = std::min(most, tokens - start);
      auto rows = Step(fill_, {{sequence, start, count, table, 1, slot}});
      if (!rows.empty()) last = rows[0];
      start += count;
    }
    return last;
  }

  // Logits of the token at position `tokens` - 1, of a sequence that nobody keeps company.
  const std::vector<float>& Reference(uint32_t sequence, uint32_t tokens) {
    const auto key = std::make_pair(sequence, tokens);
    if (!references_.count(key)) {
      const std::vector<int32_t> table = TableOf(tokens);
      references_[key] = Fill(sequence, 0, tokens, table);
      Free(table);
      for (const float value : references_[key]) CHECK(std::isfinite(value));
    }
    return references_[key];
  }

  void CheckRow(const std::vector<float>& row, uint32_t sequence, uint32_t tokens, const char* what) {
    const std::vector<float>& wanted = Reference(sequence, tokens);
    const bool same =
        row.size() == wanted.size() && std::memcmp(row.data(), wanted.data(), row.size() * sizeof(float)) == 0;
    if (!same) std::fprintf(stderr, "sequence %u at %u tokens: other bits %s\n", sequence, tokens, what);
    CHECK(same);
  }

  void Facts() {
    CHECK(!opened_->Facts().empty());
    std::set<std::string> names;
    for (const auto& [name, value] : opened_->Facts())
      CHECK(!name.empty() && !value.empty() && names.insert(name).second);
    std::unique_ptr<llmc::OpenDevice> none;
    const Status status = llmc::OpenDeviceOf(kind_, {{"no such option", "1"}}, &none);
    CHECK_EQ(status.code, static_cast<int32_t>(LLMC_ERR_INVALID_ARGUMENT));
    CHECK(status.message.find("no such option") != std::string::npos);
  }

  // An artifact whose target record has another value in one field; the other files are links.
  Status LoadPatched(size_t field, uint32_t value) {
    char folder[] = "/tmp/llmc_conformance_XXXXXX";
    CHECK(::mkdtemp(folder) != nullptr);
    const std::string path = folder;
    std::vector<std::string> links = {"weights.safetensors"};
    for (const llmc::CodeRecord& code : artifact_->code()) links.push_back(artifact_->code_name(code));
    char* whole = ::realpath(path_.c_str(), nullptr);
    for (const std::string& name : links)
      CHECK(::symlink((std::string(whole) + "/" + name).c_str(), (path + "/" + name).c_str()) == 0);
    std::free(whole);
    std::ifstream in(path_ + "/graphs.bin", std::ios::binary);
    std::vector<unsigned char> bytes(std::istreambuf_iterator<char>(in), {});
    uint64_t offset = 0;
    std::memcpy(&offset, &bytes[64 + 7 * 24 + 8], sizeof(offset));  // the eighth section: the target
    std::memcpy(&bytes[offset + field], &value, sizeof(value));
    const uint32_t crc = llmc::Crc32(&bytes[32], bytes.size() - 32, llmc::Crc32(bytes.data(), 28));
    std::memcpy(&bytes[28], &crc, sizeof(crc));
    std::ofstream(path + "/graphs.bin", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    std::shared_ptr<const llmc::Artifact> patched;
    Status status = llmc::Artifact::Open(path, &patched);
    CHECK_OK(status);
    std::unique_ptr<Device> device;
    if (status.ok()) status = opened_->Load(patched, Pools(4), &device);
    links.push_back("graphs.bin");
    for (const std::string& name : links) ::unlink((path + "/" + name).c_str());
    ::rmdir(folder);
    return status;
  }

  void Refusals() {
    // A level that no hardware has, and a kind that is a part of another name.
    for (const auto& [field, value] : {std::pair<size_t, uint32_t>{24, 1u << 20}, {4, 1}}) {
      const Status status = LoadPatched(field, value);
      CHECK_EQ(status.code, static_cast<int32_t>(LLMC_ERR_UNSUPPORTED_TARGET));
      CHECK(!status.message.empty() && status.message.find('\n') == std::string::npos);
    }
    std::unique_ptr<Device> device;
    CHECK(!opened_->Load(artifact_, Pools(1), &device).ok() && device == nullptr);  // no block besides the dummy block
    if (model().recurrent()) CHECK(!opened_->Load(artifact_, {4, 0}, &device).ok() && device == nullptr);
  }

  void Prepare() {
    uint64_t blocks = 0;
    for (uint32_t g = 0; g < model().graphs.size(); ++g) {
      const GraphShape& shape = model().graphs[g];
      blocks = std::max(
          blocks, uint64_t{std::min(shape.max_seqs, 6u) + 2} * ((Reach(shape) + block_size() - 1) / block_size()));
      if (shape.phase == Phase::kPrefill && Reach(shape) >= Reach(model().graphs[fill_])) fill_ = g;
    }
    const uint32_t needed = static_cast<uint32_t>(blocks) + 8;
    num_blocks_ = needed + needed / (kBlocksOfGuard - 1) + 2;
    CHECK_OK(opened_->Load(artifact_, Pools(num_blocks_), &device_));
    if (device_ == nullptr) return;
    if (!defect_.empty()) device_ = std::make_unique<Defective>(std::move(device_), defect_);
    CHECK_EQ(device_->num_blocks(), num_blocks_);
    CHECK_EQ(device_->num_states(), model().recurrent() ? num_blocks_ : 0u);
    CHECK_EQ(device_->model().graphs.size(), model().graphs.size());
    // The dummy block, too: a step touches what its tables and slots name, and nothing else.
    for (uint32_t i = 0; i < num_blocks_; ++i) {
      const bool guard = i % kBlocksOfGuard == 0 || i + 1 == num_blocks_;
      (guard ? guards_ : free_).push_back(static_cast<int32_t>(i));
    }
    std::shuffle(free_.begin(), free_.end(), g_random);
    for (const int32_t guard : guards_) Fill(GuardSequence(guard), 0, GuardTokens(), {guard});
    CheckGuards("being filled");
  }

  static uint32_t GuardSequence(int32_t block) { return 1u << 20 | static_cast<uint32_t>(block); }
  // A full block, if a sequence can be longer than that.
  uint32_t GuardTokens() const { return std::min(block_size(), Reach(model().graphs[fill_]) - 1); }

  // The next token of each guard's sequence, in a block of its own, sees all that lies in the guard.
  void CheckGuards(const std::string& behind) {
    const std::vector<int32_t> beside = TableOf(1);
    for (const int32_t guard : guards_) {
      const uint32_t sequence = GuardSequence(guard), tokens = GuardTokens();
      std::vector<int32_t> table = {guard};
      if (tokens == block_size()) table.push_back(beside[0]);
      // A state goes on with each token: a copy of the guard's does.
      if (model().recurrent())
        CHECK_OK(device_->CopyState(static_cast<uint32_t>(guard), static_cast<uint32_t>(beside[0])));
      const auto rows = Step(fill_, {{sequence, tokens, 1, table, 1, beside[0]}});
      const std::string what = "in guard block " + std::to_string(guard) + " behind " + behind;
      CheckRow(rows.empty() ? std::vector<float>() : rows[0], sequence, tokens + 1, what.c_str());
    }
    Free(beside);
  }

  uint32_t ReachOf(uint32_t graph) const {
    return std::min(Reach(model().graphs[graph]), Reach(model().graphs[fill_]));
  }

  // Sequences side by side, each with a context of its own: in a bucket that they fill or that is mostly padding. Their
  // contexts are computed.
  std::vector<Part> Shape(uint32_t graph, int round) {
    const GraphShape& g = model().graphs[graph];
    const uint32_t reach = ReachOf(graph);
    const uint32_t most = std::min(g.max_seqs, 6u);
    const uint32_t seqs = round == 0   ? 1
                          : round == 1 ? std::min(most, g.max_tokens)
                                       : Pick(1, std::min(most, g.max_tokens));
    std::vector<Part> parts;
    uint32_t room = g.max_tokens, samples = g.max_samples;
    for (uint32_t i = 0; i < seqs; ++i) {
      const uint32_t left = seqs - i - 1;
      uint32_t count = g.phase == Phase::kDecode ? 1 : round == 1 && left == 0 ? room - left : Pick(1, room - left);
      count = std::min(count, reach);
      const uint32_t awkward[] = {0, 1, block_size() - 1, block_size(), block_size() + 1, reach - count};
      const uint32_t start = std::min(round == 0 ? reach - count : awkward[Pick(0, 5)], reach - count);
      const uint32_t wanted = std::min({Pick(0, 2) ? 1u : Pick(0, count), count, samples});
      room -= count;
      samples -= wanted;
      parts.push_back({100 * graph + 10 * static_cast<uint32_t>(round) + i, start, count, {}, wanted});
    }
    for (Part& p : parts) {
      p.table = TableOf(p.end());
      Fill(p.sequence, 0, p.start, p.table);
    }
    return parts;
  }

  // Sequences have the bits that each has alone, after a step that left other values in all memory between kernels.
  void Company(uint32_t graph, int round) {
    const std::vector<Part> parts = Shape(graph, round);
    if (round % 2 != 0) device_->Visit(graph);
    if (round % 3 != 0) device_->Reserve(BatchOf(graph, parts));
    const auto rows = Step(graph, parts);
    size_t row = 0;
    for (const Part& p : parts) {
      for (uint32_t i = p.num_samples; i > 0; --i, ++row) {
        if (row < rows.size()) CheckRow(rows[row], p.sequence, p.end() - i + 1, "in company");
      }
    }
    CHECK_EQ(row, rows.size());
    // What the step wrote is what the next tokens read.
    for (const Part& p : parts) {
      if (p.end() % block_size() != 0 && p.end() < ReachOf(graph)) {
        CheckRow(Fill(p.sequence, p.end(), p.end() + 1, p.table), p.sequence, p.end() + 1, "behind a step in company");
      }
    }
    for (const Part& p : parts) Free(p.table);
  }

  // Each command of a step writes its operands alone, and all together give the bits of the step.
  void Commands(uint32_t graph, int round) {
    if (device_->command_runner() == nullptr) return;
    const std::vector<Part> parts = Shape(graph, round);
    llmc_test::WatchedStep step(*artifact_, device_.get());
    const std::vector<float> logits = step.Run(BatchOf(graph, parts));
    auto row = logits.begin();
    for (const Part& p : parts) {
      for (uint32_t i = p.num_samples; i > 0; --i, row += model().vocab_size) {
        CheckRow({row, row + model().vocab_size}, p.sequence, p.end() - i + 1, "command by command");
      }
      Free(p.table);
    }
  }

  // What a device draws is what the host draws of the same rows: tokens, logprobs and ranks.
  void Draws() {
    const uint32_t vocab = static_cast<uint32_t>(model().vocab_size);
    const uint32_t tokens = std::min(model().graphs[fill_].max_tokens, Reach(model().graphs[fill_]));
    const std::vector<int32_t> table = TableOf(tokens);
    const StepBatch b = BatchOf(fill_, {{6, 0, tokens, table, 1}});
    std::vector<int32_t> text;
    for (uint32_t position = 0; position < tokens; ++position) text.push_back(Token(6, position));
    std::vector<uint32_t> mask((vocab + 31) / 32);
    for (uint32_t& word : mask) word = Pick(0, UINT32_MAX);
    std::vector<llmc::SamplingParams> params(8);
    std::vector<llmc::SampleTask> tasks;
    for (uint32_t i = 0; i < params.size(); ++i) {
      llmc::SamplingParams& p = params[i];
      p.seed = i;
      p.temperature = i % 4 == 0 ? 0.0f : 0.3f * static_cast<float>(i);
      p.top_k = i % 4 == 1 ? 5 : 0;
      p.top_p = i % 4 == 2 ? 0.7f : 1.0f;
      p.num_logprobs = static_cast<int32_t>(i % 3) - 1;
      if (i >= 4) p.repetition_penalty = 1.2f;
      if (i >= 6) p.logit_bias = {{1, 2.5f}, {1, -0.5f}};
      llmc::SampleTask draw;
      draw.params = &p;
      draw.context = {text.data(), tokens, tokens / 2, i};
      if (i % 2 != 0) draw.context.mask = mask.data(), draw.context.num_mask_words = static_cast<uint32_t>(mask.size());
      tasks.push_back(draw);
    }
    llmc::SampleTask score;
    score.token = 3;
    score.num_top = 4;
    tasks.push_back(score);
    std::vector<llmc::SampleOutcome> found(tasks.size());
    llmc::Fence fence = 0;
    CHECK_OK(device_->Enqueue(b, &fence));
    CHECK_OK(device_->Sample(fence, tasks, &found));
    const float* logits = nullptr;
    CHECK_OK(device_->Run(b, &logits));
    llmc::Sampler host(model().vocab_size, model().eos_token_ids);
    for (size_t i = 0; i < tasks.size() && logits != nullptr; ++i) {
      const llmc::SampleOutcome wanted = host.Do(tasks[i], logits);
      CHECK_OK(found[i].status);
      CHECK_EQ(found[i].result.token, wanted.result.token);
      CHECK_EQ(found[i].result.rank, wanted.result.rank);
      CHECK_EQ(found[i].result.num_top, wanted.result.num_top);
      CHECK(std::memcmp(&found[i].result.logprob, &wanted.result.logprob, sizeof(float)) == 0);
      for (uint32_t top = 0; top < std::min(found[i].result.num_top, wanted.result.num_top); ++top) {
        CHECK_EQ(found[i].result.top_token_ids[top], wanted.result.top_token_ids[top]);
        CHECK(found[i].result.top_logprobs[top] == wanted.result.top_logprobs[top]);
      }
    }
    Free(table);
  }

  // Steps that are on their way before their tokens are known have the bits of steps that begin behind them.
  void Chains() {
    constexpr uint32_t kSteps = 4;
    for (uint32_t graph = 0; graph < model().graphs.size(); ++graph) {
      const GraphShape& g = model().graphs[graph];
      const uint32_t reach = std::min(Reach(g), Reach(model().graphs[fill_]));
      if (g.phase != Phase::kDecode || reach < kSteps + 1) continue;
      const uint32_t seqs = std::min({g.max_seqs, g.max_tokens, g.max_samples, 3u});
      const uint32_t start = std::min(block_size() - 1, reach - kSteps);
      std::vector<Part> parts;
      std::vector<llmc::SamplingParams> params(seqs);
      for (uint32_t i = 0; i < seqs; ++i) {
        params[i].seed = graph + i;
        params[i].temperature = i == 0 ? 0.0f : 0.8f;
        parts.push_back({2000 + 10 * graph + i, start, 1, TableOf(start + kSteps), 1});
      }
      std::vector<int32_t> text(start + kSteps);
      std::vector<llmc::SampleTask> tasks(seqs);
      // A batch has the sequences in the order of its step: forwards or backwards.
      const auto step = [&](uint32_t number) {
        if (number > 0) std::reverse(parts.begin(), parts.end());
        for (uint32_t i = 0; i < seqs; ++i) {
          parts[i].start = start + number;
          tasks[i].row = i;
          tasks[i].params = &params[i];
          tasks[i].context = {text.data(), start + number + 1, start, i};
        }
        return BatchOf(graph, parts);
      };
      std::vector<std::vector<int32_t>> drawn(kSteps - 1);
      std::vector<std::vector<float>> last;
      for (const bool chained : {true, false}) {
        for (const Part& part : parts) Fill(part.sequence, 0, start, part.table);
        StepBatch batch = step(0);
        llmc::Fence fence = 0;
        CHECK_OK(device_->Enqueue(batch, &fence));
        for (uint32_t number = 1; number < kSteps; ++number) {
          std::vector<llmc::SampleTask> draws = tasks;
          // A sequence that has ended: nobody misses what only the host could draw.
          draws.push_back(tasks[0]);
          draws.back().num_best = 2;
          draws.back().unwanted = true;
          std::vector<llmc::SampleOutcome> found(draws.size());
          StepBatch next = step(number);
          std::vector<llmc::DrawnRow> rows;
          for (uint32_t row = 0; row < seqs; ++row) rows.push_back({row, seqs - 1 - row});
          llmc::Fence next_fence = 0;
          bool done = false, lost = false;
          std::fill(next.input_ids.begin(), next.input_ids.end(), 0);
          if (chained) {
            CHECK_OK(device_->Chain(draws, next, rows, &next_fence, &done));
            std::fill(next.input_ids.begin(), next.input_ids.end(), -1);  // the device has its own
            CHECK(done);
            if (!done) return;
            CHECK_OK(device_->SampleChained(fence, draws, &found, &lost));
            CHECK(!lost);
          } else {
            CHECK_OK(device_->Sample(fence, draws, &found));
            for (const llmc::DrawnRow& one : rows) next.input_ids[one.row] = found[one.task].result.token;
            CHECK_OK(device_->Enqueue(next, &next_fence));
          }
          fence = next_fence;
          found.pop_back();
          std::vector<int32_t> tokens;
          for (const llmc::SampleOutcome& one : found) tokens.push_back(one.result.token);
          if (chained) drawn[number - 1] = tokens;
          CHECK(drawn[number - 1] == tokens);
        }
        const float* logits = nullptr;
        CHECK_OK(device_->Wait(fence, &logits));
        const auto vocab = static_cast<size_t>(model().vocab_size);
        for (uint32_t row = 0; row < seqs && logits != nullptr; ++row) {
          const std::vector<float> found(logits + row * vocab, logits + (row + 1) * vocab);
          if (chained) last.push_back(found);
          CHECK(std::memcmp(found.data(), last[row].data(), vocab * sizeof(float)) == 0);
        }
        if (kSteps % 2 == 0) std::reverse(parts.begin(), parts.end());
      }
      for (const Part& part : parts) Free(part.table);
    }
  }

  // A sequence with one and a half blocks, and a copy of its last block, and of its states, elsewhere. copy(from, to) and
  // copy_state(from, to) make it.
  template <class Copy, class CopyState>
  void GoesOn(uint32_t sequence, const char* what, Copy copy, CopyState copy_state) {
    const uint32_t reach = Reach(model().graphs[fill_]);
    const uint32_t tokens = std::min(reach - 1, block_size() + block_size() / 2);
    std::vector<int32_t> table = TableOf(tokens + 1);
    Fill(sequence, 0, tokens, table);
    std::vector<int32_t> other = table;
    const std::vector<int32_t> fresh = TableOf(1);
    other.back() = fresh[0];
    copy(static_cast<uint32_t>(table.back()), static_cast<uint32_t>(fresh[0]));
    if (model().recurrent()) copy_state(static_cast<uint32_t>(table[0]), static_cast<uint32_t>(fresh[0]));
    // Another sequence takes block and slot over.
    Fill(sequence + 1, 0, std::min(reach, block_size()), {table.back()}, table[0]);
    CheckRow(Fill(sequence, tokens, tokens + 1, other, fresh[0]), sequence, tokens + 1, what);
    Free(table);
    Free(fresh);
  }

  // A copied block is its own from then on, and so is a slot: both halves go on as if there were one.
  void Copies() {
    GoesOn(
        7, "on a copy", [&](uint32_t from, uint32_t to) { CHECK_OK(device_->CopyBlock(from, to)); },
        [&](uint32_t from, uint32_t to) { CHECK_OK(device_->CopyState(from, to)); });
    CHECK(!device_->CopyBlock(num_blocks_, 1).ok() && !device_->CopyBlock(1, num_blocks_).ok());
    CHECK(!device_->CopyState(num_blocks_, 1).ok() && !device_->CopyState(1, num_blocks_).ok());
  }

  // What went through the host's memory is the same to the sequence that reads it. Not all devices can do it.
  void HandsOver() {
    std::vector<unsigned char> kv(model().kv_block_bytes + 1, 0xa5), again(kv);
    std::vector<unsigned char> state(model().state_bytes + 1, 0xa5), state_again(state);
    if (device_->ReadBlock(1, kv.data()).code == LLMC_ERR_INVALID_ARGUMENT) return;
    kv = again;
    const auto hand_over = [&](uint32_t from, uint32_t to) {
      CHECK_OK(device_->ReadBlock(from, kv.data()));
      CHECK_EQ(kv.back(), 0xa5);
      CHECK_OK(device_->WriteBlock(to, kv.data()));
      CHECK_OK(device_->ReadBlock(to, again.data()));
      CHECK(kv == again);
    };
    const auto hand_over_state = [&](uint32_t from, uint32_t to) {
      CHECK_OK(device_->ReadState(from, state.data()));
      CHECK_EQ(state.back(), 0xa5);
      CHECK_OK(device_->WriteState(to, state.data()));
      CHECK_OK(device_->ReadState(to, state_again.data()));
      CHECK(state == state_again);
    };
    GoesOn(11, "on a block that was handed over", hand_over, hand_over_state);
    CHECK(!device_->ReadBlock(num_blocks_, kv.data()).ok() && !device_->WriteBlock(num_blocks_, kv.data()).ok());
    CHECK(!device_->ReadState(num_blocks_, state.data()).ok() && !device_->WriteState(num_blocks_, state.data()).ok());
  }

  // What was saved in the swap space comes back, each from its place. Not all devices have one.
  void Swaps() {
    CHECK_OK(opened_->Load(artifact_, Pools(num_blocks_), &device_));
    if (device_ == nullptr) return;
    const uint32_t places = 3, state_places = model().recurrent() ? 2 : 0;
    uint64_t ns = 0, state_ns = 7;
    const Status opened = device_->OpenSwapSpace(places, state_places, &ns, &state_ns);
    if (opened.code != LLMC_ERR_INVALID_ARGUMENT) {
      CHECK_OK(opened);
      CHECK(ns > 0 && (state_ns > 0) == model().recurrent());
      const uint32_t other = static_cast<uint32_t>(guards_[0]);
      GoesOn(
          13, "on a block that was saved",
          [&](uint32_t from, uint32_t to) {
            CHECK_OK(device_->SaveBlock(from, 2));
            CHECK_OK(device_->SaveBlock(other, 1));
            CHECK_OK(device_->LoadBlock(2, to));
          },
          [&](uint32_t from, uint32_t to) {
            CHECK_OK(device_->SaveState(from, 1));
            CHECK_OK(device_->SaveState(other, 0));
            CHECK_OK(device_->LoadState(1, to));
          });
    }
    device_.reset();
  }

  // A state that is kept behind a number of tokens is that of these, if the step computes the last of them; else the
  // slot stays what it is.
  void Keeps() {
    const GraphShape& g = model().graphs[fill_];
    const uint32_t tokens = std::min({g.max_tokens, Reach(g) - 1, 2 * block_size() + 3});
    const std::vector<int32_t> table = TableOf(tokens + 1), beside = TableOf(1);
    const int32_t kept = beside[0];
    for (const uint32_t keep : {1u, tokens / 2, tokens - 1, tokens}) {
      Fill(15, 0, tokens, table);
      for (const uint32_t from : {keep - 1, uint32_t{0}}) {
        Fill(15, 0, from, table);
        Step(fill_, {{15, from, tokens - from, table, 0, -1, static_cast<int32_t>(keep), kept}});
        const auto rows = Step(fill_, {{15, keep, 1, table, 1, kept}});
        CheckRow(rows.empty() ? std::vector<float>() : rows[0], 15, keep + 1, "behind a kept state");
      }
      CheckRow(Fill(15, tokens, tokens + 1, table), 15, tokens + 1, "beside a kept state");
    }
    // Behind fewer tokens than were there before, and behind more than there are.
    const uint32_t half = tokens / 2;
    Fill(15, 0, half, table);
    CHECK_OK(device_->CopyState(static_cast<uint32_t>(table[0]), static_cast<uint32_t>(kept)));
    for (const uint32_t keep : {half, half - 1, half + 2}) {
      Step(fill_, {{15, half, 1, table, 0, -1, static_cast<int32_t>(keep), kept}});
      CHECK_OK(device_->CopyState(static_cast<uint32_t>(kept), static_cast<uint32_t>(table[0])));
    }
    CheckRow(Fill(15, half, half + 1, table, kept), 15, half + 1, "behind a state that was kept before");
    Free(table);
    Free(beside);
  }

  // What does not fit is an error, nothing runs, and the device goes on.
  void Mistakes() {
    const std::vector<int32_t> table = TableOf(2);
    const StepBatch good = BatchOf(fill_, {{9, 0, 2, table, 1}});
    const GraphShape& g = model().graphs[fill_];
    const auto fails = [&](auto change) {
      StepBatch bad = good;
      change(&bad);
      llmc::Fence fence = 0;
      const Status status = device_->Enqueue(bad, &fence);
      CHECK(!status.ok() && !status.message.empty());
    };
    fails([&](StepBatch* b) { b->graph = static_cast<uint32_t>(model().graphs.size()); });
    fails([&](StepBatch* b) { b->num_tokens = 0; });
    fails([&](StepBatch* b) { b->num_tokens = g.max_tokens + 1; });
    fails([&](StepBatch* b) { b->num_seqs = g.max_seqs + 1; });
    fails([&](StepBatch* b) { b->input_ids[0] = model().vocab_size; });
    fails([&](StepBatch* b) { b->input_ids[1] = -1; });
    fails([&](StepBatch* b) { b->slot_mapping[1] = static_cast<int32_t>(num_blocks_ * block_size()); });
    fails([&](StepBatch* b) { b->block_tables[0] = static_cast<int32_t>(num_blocks_); });
    fails([&](StepBatch* b) { b->context_lens[0] = 1; });
    fails([&](StepBatch* b) { b->query_start[1] = 1; });
    fails([&](StepBatch* b) { b->sample_index[0] = 2; });
    fails([&](StepBatch* b) { b->positions.pop_back(); });
    fails([&](StepBatch* b) { b->state_slots.resize(model().recurrent() ? 0 : llmc::kStateFields); });
    if (model().recurrent()) {
      const auto fails_with = [&](uint32_t field, int32_t value) {
        fails([&](StepBatch* b) { b->state_slots[1] = 1, b->state_slots[field] = value; });
      };
      for (const uint32_t slot : {0u, 2u}) {
        fails_with(slot, -1);
        fails_with(slot, static_cast<int32_t>(num_blocks_));
      }
      fails_with(1, -1);
      fails_with(1, model().max_model_len + 1);
      fails_with(2, table[0]);
      fails([&](StepBatch* b) { b->state_slots.pop_back(); });
    }
    CheckRow(Fill(9, 0, 2, table), 9, 2, "after mistakes");
    Free(table);
  }

  void Counts() {
    std::vector<llmc::DeviceStat> before, after;
    device_->GetStats(&before);
    Reference(10, 1);
    device_->GetStats(&after);
    CHECK_EQ(before.size(), after.size());
    std::set<std::string> names;
    for (size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
      CHECK(std::string(before[i].name) == after[i].name && names.insert(after[i].name).second);
    }
    if (llmc::ReplayProfile* profile = device_->profile()) {
      profile->SetProfiling(true);
      Reference(11, 1);
      CHECK(profile->num_profiled() > 0 && profile->stats().num_replays > 0);
      profile->SetProfiling(false);
    }
    CHECK(device_->num_host_threads() >= 1);
  }

  std::vector<int32_t> Generate(llmc::Engine* engine, uint32_t sequence, uint32_t tokens, uint32_t most, bool others) {
    std::vector<std::vector<int32_t>> prompts;
    std::vector<uint64_t> ids;
    for (uint32_t i = 0; i <= (others ? 3u : 0u); ++i) {
      std::vector<int32_t> prompt;
      for (uint32_t position = 0; position < tokens; ++position) prompt.push_back(Token(sequence + i, position));
      llmc_sampling_params sampling;
      llmc_sampling_params_init(&sampling, sizeof(sampling));
      sampling.temperature = 0.8f;
      sampling.has_seed = sampling.ignore_eos = 1;
      sampling.seed = sequence + i;
      sampling.max_tokens = most;
      sampling.n = i == 1 ? 2 : 1;  // its blocks are copied when the two part
      llmc_request request;
      llmc_request_init(&request, sizeof(request));
      request.prompt_token_ids = prompt.data();
      request.num_prompt_tokens = prompt.size();
      request.sampling = &sampling;
      ids.push_back(0);
      CHECK_OK(engine->Submit(request, &ids.back()));
    }
    std::vector<int32_t> found;
    // Cancels come at any time, also while a step is on its way.
    std::thread canceller;
    if (others) canceller = std::thread([&] { static_cast<void>(engine->Cancel(ids[2]).ok()); });
    for (bool more = true; more;) {
      CHECK_OK(engine->Step(&more));
      CHECK_OK(engine->CheckIntegrity());
      llmc_event events[16];
      events[0].struct_size = sizeof(llmc_event);
      for (uint64_t count = 16; count == 16;) {
        count = engine->Poll(events, 16);
        for (uint64_t i = 0; i < count; ++i) {
          CHECK(events[i].kind != LLMC_EVENT_FAILED);
          if (events[i].request_id == ids[0] && events[i].kind == LLMC_EVENT_TOKEN) found.push_back(events[i].token_id);
        }
      }
    }
    if (canceller.joinable()) canceller.join();
    return found;
  }

  void Engines() {
    const bool decodes = std::any_of(model().graphs.begin(), model().graphs.end(),
                                     [](const GraphShape& g) { return g.phase == Phase::kDecode; });
    if (!decodes) return;
    const uint32_t tokens = std::min(block_size() + 3, static_cast<uint32_t>(model().max_model_len) / 2);
    std::vector<int32_t> alone;
    for (const bool others : {false, true}) {
      std::unique_ptr<Device> device;
      CHECK_OK(opened_->Load(artifact_, Pools(num_blocks_), &device));
      std::unique_ptr<llmc::Engine> engine;
      CHECK_OK(llmc::Engine::Create(std::move(device), {}, &engine));
      for (int again = 0; again < 2; ++again) {  // the second time out of the prefix cache
        const std::vector<int32_t> found = Generate(engine.get(), 20, tokens, 8, others);
        CHECK_EQ(found.size(), 8u);
        if (alone.empty()) alone = found;
        CHECK(found == alone);
      }
    }
  }

  std::string kind_, path_;
  llmc::DeviceOptions options_;
  std::string defect_;
  std::shared_ptr<const llmc::Artifact> artifact_;
  std::unique_ptr<llmc::OpenDevice> opened_;
  std::unique_ptr<Device> device_;
  static constexpr uint32_t kBlocksOfGuard = 4;
  uint32_t num_blocks_ = 0, fill_ = 0;
  std::vector<int32_t> free_, guards_;
  std::map<std::pair<uint32_t, uint32_t>, std::vector<float>> references_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: %s KIND ARTIFACT [KEY=VALUE...]\n", argv[0]), 2;
  llmc::DeviceOptions options;
  std::string defect;
  for (int i = 3; i < argc; ++i) {
    const std::string option = argv[i];
    const size_t equals = option.find('=');
    if (equals == std::string::npos) return std::fprintf(stderr, "'%s' is not a KEY=VALUE\n", argv[i]), 2;
    if (option.substr(0, equals) == "defect") {
      defect = option.substr(equals + 1);
    } else {
      options.emplace_back(option.substr(0, equals), option.substr(equals + 1));
    }
  }
  Suite(argv[1], argv[2], options, defect).Run();
  return llmc_test::Finish("device_conformance");
}
