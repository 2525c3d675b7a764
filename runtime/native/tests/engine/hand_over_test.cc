// Blocks that one engine computes and another one uses: same tokens, same bits; and bytes that are refused.
#include <cstring>
#include <random>

#include "core/crc32.h"
#include "engine/handed_blocks.h"
#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

constexpr uint32_t kBlock = 4;
bool recurrent = false;

ModelShape HandedShape() {
  ModelShape shape = Usual();
  shape.state_bytes = recurrent ? sizeof(NullDevice::State) : 0;
  shape.kv_block_bytes = kBlock * sizeof(uint64_t);
  shape.kv_identity = 77;
  return shape;
}

using Handed = std::vector<unsigned char>;

uint64_t StateBytes() { return recurrent ? HandedBlocks::StateRecordBytes(HandedShape()) : 0; }

// Bytes of that many blocks, with or without the room that states behind the last one take.
uint64_t Room(uint64_t blocks) { return 64 + blocks * HandedBlocks::RecordBytes(HandedShape()) + StateBytes(); }

uint64_t NumBlocks(const Handed& data) {
  uint32_t count = 0;
  std::memcpy(&count, data.data() + 36, sizeof(count));
  return count;
}

// Blocks of a text from first_block on, as much as fits into `most` bytes.
Handed Export(Engine* engine, HandedText* text, uint64_t first_block = 0, uint64_t most = 1 << 20) {
  Handed out(most);
  uint64_t blocks = 0, bytes = 0;
  CHECK_OK(engine->ExportBlocks(text, first_block, out.data(), out.size(), &blocks, &bytes));
  CHECK(bytes <= most && (blocks == 0) == (bytes == 0));
  out.resize(bytes);
  if (bytes != 0) CHECK_OK(engine->SealBlocks(out.data(), out.size()));
  return out;
}

// Tokens of the blocks that a request with this prompt finds: its last token is always computed.
std::vector<int32_t> Found(const std::vector<int32_t>& prompt) {
  return {prompt.begin(), prompt.begin() + static_cast<long>((prompt.size() - 1) / kBlock * kBlock)};
}

Handed Export(Engine* engine, const std::vector<int32_t>& text, uint64_t first_block = 0) {
  HandedText handed{text, {}};
  return Export(engine, &handed, first_block);
}

Status Import(Engine* engine, HandedText* text, const Handed& data, uint64_t* blocks) {
  Status status = engine->CheckHandOver();
  if (status.ok()) status = engine->CheckBlocks(*text, data.data(), data.size());
  if (status.ok()) status = engine->ImportBlocks(text, data.data(), data.size(), blocks);
  CHECK_OK(engine->CheckIntegrity());
  return status;
}

Status Import(Engine* engine, const std::vector<int32_t>& text, const Handed& data, uint64_t* blocks) {
  HandedText handed{text, {}};
  return Import(engine, &handed, data, blocks);
}

Output RunOne(Engine* engine, Job* job) {
  Outputs outputs;
  CHECK_OK(Submit(engine, job));
  RunAll(engine, &outputs);
  return outputs[{job->id, 0}];
}

// The second engine computes the rest of the last block only, and says what it would have said alone.
void TestSameTokens() {
  const ModelShape shape = HandedShape();
  for (const bool late : {false, true}) {
    NullDevice::late = late;
    for (const uint32_t length : {5u, 8u, 9u, 31u, 40u}) {
      NullDevice* device;
      auto first = Make(shape, 40, {}, nullptr), second = Make(shape, 40, {}, &device);
      Job prefill = Simple(length, 1), decode = Simple(length, 12);
      RunOne(first.get(), &prefill);
      const std::vector<int32_t> text = Found(prefill.prompt);
      const Handed data = Export(first.get(), text);
      CHECK_EQ(data.size(), Room(text.size() / kBlock));
      uint64_t blocks = 0;
      CHECK_OK(Import(second.get(), text, data, &blocks));
      CHECK_EQ(blocks, text.size() / kBlock);
      // Once more: what is there already stays.
      CHECK_OK(Import(second.get(), text, data, &blocks));
      CHECK_EQ(blocks, text.size() / kBlock);
      CHECK_EQ(device->runs, 0);
      const Output found = RunOne(second.get(), &decode);
      Compare(found, Reference(decode, 0, 64));
      CHECK_EQ(found.num_cached, text.size());
      CHECK(Export(second.get(), text) == data);
    }
  }
  NullDevice::late = false;
}

// In parts, as a server sends them; the other engine serves others meanwhile.
void TestInParts() {
  const ModelShape shape = HandedShape();
  auto first = Make(shape, 40, {}, nullptr), second = Make(shape, 40, {}, nullptr);
  Job prefill = Simple(38, 1), decode = Simple(38, 10), other = Simple(17, 20);
  for (int32_t& token : other.prompt) token = (token + 1) % kVocab;
  RunOne(first.get(), &prefill);
  Outputs outputs;
  CHECK_OK(Submit(second.get(), &other));
  const uint64_t most = Room(2) + 3;
  HandedText given{Found(prefill.prompt), {}}, taken{Found(decode.prompt), {}};
  for (uint64_t blocks = 0; blocks < 9;) {
    bool more = false;
    CHECK_OK(second->Step(&more));
    const Handed data = Export(first.get(), &given, blocks, most);
    const uint64_t before = blocks;
    CHECK_OK(Import(second.get(), &taken, data, &blocks));
    CHECK_EQ(blocks, std::min<uint64_t>(before + 2, 9));
    if (blocks == before) return;
  }
  CHECK_EQ(second->CountBlocks(taken), 9u);
  CHECK_EQ(Export(second.get(), &taken, 1).size(), Room(8));
  CHECK_EQ(Export(second.get(), &taken, 9).size(), 0u);
  CHECK_OK(Submit(second.get(), &decode));
  RunAll(second.get(), &outputs);
  Compare(outputs[{decode.id, 0}], Reference(decode, 0, 64));
  Compare(outputs[{other.id, 0}], Reference(other, 0, 64));
  CHECK_EQ((outputs[{decode.id, 0}].num_cached), 36u);
}

// While a text is computed, each step adds blocks; other texts push some out, here and there. What is said to be cached
// is cached, and no block of the text makes room for another one.
void TestWhileComputing() {
  const ModelShape shape = HandedShape();
  std::mt19937_64 random(11);
  int whole = 0;
  for (int round = 0; round < 60; ++round) {
    NullDevice::late = round % 2 != 0;
    EngineOptions options;
    options.max_tokens_per_step = 3 + static_cast<uint32_t>(random() % 9);
    auto first = Make(shape, 24 + static_cast<uint32_t>(random() % 20), options, nullptr);
    auto second = Make(shape, 14 + static_cast<uint32_t>(random() % 20), {}, nullptr);
    Job prefill = Simple(41, 1), decode = Simple(41, 6);
    std::vector<Job> others(6);
    for (size_t i = 0; i < others.size(); ++i) {
      others[i] = Simple(4 + static_cast<uint32_t>(random() % 20), 1 + static_cast<uint32_t>(random() % 4));
      for (int32_t& token : others[i].prompt) token = (token + 2 + static_cast<int32_t>(i)) % kVocab;
      CHECK_OK(Submit(i % 2 ? first.get() : second.get(), &others[i]));
    }
    CHECK_OK(Submit(first.get(), &prefill));
    HandedText given{Found(prefill.prompt), {}}, taken{Found(decode.prompt), {}};
    uint64_t sent = 0, blocks = 0;
    for (bool goes_on = true, ended = false; !ended;) {
      ended = !goes_on;
      CHECK_OK(first->Step(&goes_on));
      bool more = false;
      CHECK_OK(second->Step(&more));
      const Handed data = Export(first.get(), &given, sent, Room(1 + random() % 4));
      if (data.empty()) continue;
      ended = false;
      sent += NumBlocks(data);
      CHECK_OK(Import(second.get(), &taken, data, &blocks));
      // Blocks count once there are states behind them, which come with the last one.
      CHECK_EQ(second->CountBlocks(taken), recurrent && blocks < 10 ? 0 : blocks);
      whole += blocks == 10;
      if (blocks < sent) break;
    }
    Outputs others_outputs, outputs;
    RunAll(first.get(), &others_outputs);
    CHECK_OK(Submit(second.get(), &decode));
    RunAll(second.get(), &outputs);
    Compare(outputs[{decode.id, 0}], Reference(decode, 0, 64));
  }
  CHECK(whole > 5);
  NullDevice::late = false;
}

// The place behind the last part leads to blocks that are computed again after they were evicted.
void TestEvictedBetweenParts() {
  const ModelShape shape = HandedShape();
  auto engine = Make(shape, 12, {}, nullptr), second = Make(shape, 40, {}, nullptr);
  Job prefill = Simple(33, 1), other = Simple(40, 1);
  for (int32_t& token : other.prompt) token = (token + 7) % kVocab;
  HandedText given{Found(prefill.prompt), {}}, taken{Found(prefill.prompt), {}};
  const uint64_t most = Room(3);
  uint64_t blocks = 0;
  RunOne(engine.get(), &prefill);
  CHECK_OK(Import(second.get(), &taken, Export(engine.get(), &given, 0, most), &blocks));
  CHECK_EQ(blocks, 3u);
  RunOne(engine.get(), &other);
  CHECK(engine->CountBlocks(given) < 3);
  CHECK(Export(engine.get(), &given, 3, most).empty());
  RunOne(engine.get(), &prefill);
  CHECK_OK(Import(second.get(), &taken, Export(engine.get(), &given, 3), &blocks));
  CHECK_EQ(blocks, 8u);
}

// A small pool takes the beginning. Blocks of running sequences are left alone, and the text's own are not evicted.
void TestNoRoom() {
  const ModelShape shape = HandedShape();
  auto first = Make(shape, 40, {}, nullptr), second = Make(shape, 11, {}, nullptr);
  Job prefill = Simple(37, 1), busy = Simple(14, 8);
  for (int32_t& token : busy.prompt) token = (token + 5) % kVocab;
  RunOne(first.get(), &prefill);
  const std::vector<int32_t> text = Found(prefill.prompt);
  const Handed data = Export(first.get(), text);
  CHECK_OK(Submit(second.get(), &busy));
  bool more = false;
  CHECK_OK(second->Step(&more));
  uint64_t blocks = 0;
  CHECK_OK(Import(second.get(), text, data, &blocks));
  CHECK(blocks > 2 && blocks < 9);
  Outputs outputs;
  RunAll(second.get(), &outputs);
  Compare(outputs[{busy.id, 0}], Reference(busy, 0, 40));
  // Without its beginning, a block has no place.
  auto empty = Make(shape, 40, {}, nullptr);
  CHECK_OK(Import(empty.get(), text, Export(first.get(), text, 2), &blocks));
  CHECK_EQ(blocks, 0);
}

void TestRefusals() {
  const ModelShape shape = HandedShape();
  auto first = Make(shape, 40, {}, nullptr);
  Job prefill = Simple(21, 1);
  RunOne(first.get(), &prefill);
  const Handed data = Export(first.get(), prefill.prompt);
  const auto refused = [&](const ModelShape& by, const std::vector<int32_t>& text, llmc_status code, const char* word) {
    auto engine = Make(by, 40, {}, nullptr);
    uint64_t blocks = 99;
    const Status status = Import(engine.get(), text, data, &blocks);
    CHECK_EQ(status.code, code);
    CHECK(status.message.find(word) != std::string::npos);
    CHECK_EQ(blocks, 99);
  };
  ModelShape other = shape;
  other.kv_dtype = 3;
  refused(other, prefill.prompt, LLMC_ERR_INVALID_ARGUMENT, "kv_dtype");
  other = shape;
  other.num_layers = 2;
  refused(other, prefill.prompt, LLMC_ERR_INVALID_ARGUMENT, "num_layers");
  other = shape;
  other.kv_block_bytes *= 2;
  refused(other, prefill.prompt, LLMC_ERR_INVALID_ARGUMENT, "block_bytes");
  other = shape;
  other.kv_identity = 78;
  refused(other, prefill.prompt, LLMC_ERR_INVALID_ARGUMENT, "another artifact");
  std::vector<int32_t> text = prefill.prompt;
  text[9] ^= 1;
  refused(shape, text, LLMC_ERR_INVALID_ARGUMENT, "another text");
  text = prefill.prompt;
  text.resize(19);
  refused(shape, text, LLMC_ERR_OUT_OF_RANGE, "reach token 20");
  EngineOptions options;
  options.prefix_cache = false;
  auto without = Make(shape, 40, options, nullptr);
  uint64_t blocks = 0, bytes = 0;
  CHECK_EQ(Import(without.get(), prefill.prompt, data, &blocks).code, LLMC_ERR_INVALID_ARGUMENT);
  unsigned char small[70];
  HandedText handed{text, {}};
  CHECK_EQ(first->ExportBlocks(&handed, 0, small, sizeof(small), &blocks, &bytes).code, LLMC_ERR_OUT_OF_RANGE);
}

// Any byte that differs is noticed, any size that is wrong, and any header with a right checksum.
void TestDamage() {
  const ModelShape shape = HandedShape();
  auto first = Make(shape, 40, {}, nullptr), second = Make(shape, 40, {}, nullptr);
  Job prefill = Simple(17, 1);
  RunOne(first.get(), &prefill);
  const std::vector<int32_t> text = Found(prefill.prompt);
  const Handed data = Export(first.get(), text);
  CHECK_EQ(data.size(), Room(4));
  std::mt19937_64 random(5);
  uint64_t blocks = 0;
  for (size_t at = 0; at < data.size(); ++at) {
    Handed bad = data;
    bad[at] ^= static_cast<unsigned char>(1 + random() % 255);
    const Status status = Import(second.get(), text, bad, &blocks);
    CHECK(!status.ok() && status.message.size() > 20);
  }
  for (size_t size = 0; size < data.size(); ++size) {
    CHECK(!Import(second.get(), text, {data.begin(), data.begin() + static_cast<long>(size)}, &blocks).ok());
  }
  for (int round = 0; round < 2000; ++round) {
    Handed bad = data;
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes)
      bad[random() % 60] = static_cast<unsigned char>(random() % 3 ? random() : 255);
    bad.resize(64 + random() % (data.size() - 63));
    const uint32_t crc = llmc::Crc32(bad.data(), 60);
    std::memcpy(bad.data() + 60, &crc, sizeof(crc));
    static_cast<void>(second->SealBlocks(bad.data(), bad.size()).ok());
    static_cast<void>(Import(second.get(), text, bad, &blocks).ok());
  }
  // Nothing of this is believed.
  Job decode = Simple(17, 6);
  Compare(RunOne(second.get(), &decode), Reference(decode, 0, 64));
}

}  // namespace

int main() {
  for (recurrent = true;; recurrent = false) {
    TestSameTokens();
    TestInParts();
    TestWhileComputing();
    TestEvictedBetweenParts();
    TestNoRoom();
    TestDamage();
    if (!recurrent) break;
  }
  TestRefusals();
  return Finish("hand_over_test");
}
