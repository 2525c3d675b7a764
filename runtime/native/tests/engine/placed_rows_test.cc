// Rows in place of tokens: what is refused, how the prefix cache tells contents apart, steps that run again, and the
// encoder that makes such rows.
#include <limits>
#include <string>
#include <vector>

#include "engine/encoder.h"
#include "support/engine_harness.h"

using namespace llmc_test;

namespace {

ModelShape Placing() {
  ModelShape m = Usual();
  m.places_rows = m.takes_states = true;
  m.states_width = kRowWidth;
  return m;
}

Job WithRows(uint32_t length, std::vector<Placed> placed) {
  Job job = Simple(length, 4);
  job.placed = std::move(placed);
  return job;
}

void CheckRefused(Engine* engine, Job job, const char* words) {
  const Status status = Submit(engine, &job);
  CHECK_EQ(status.code, LLMC_ERR_INVALID_ARGUMENT);
  if (!CHECK(status.message.find(words) != std::string::npos)) std::fprintf(stderr, "%s\n", status.message.c_str());
}

void TestRefused() {
  auto engine = Make(Placing(), 40, {});
  CheckRefused(engine.get(), WithRows(8, {{5, {1, 2, 3}, 1}}), "before the prompt's last token, 7");
  CheckRefused(engine.get(), WithRows(8, {{0, {1, 2, 3}, 1}, {2, {4}, 2}}),
               "placed[1] takes the place of tokens 2 to 2");
  CheckRefused(engine.get(), WithRows(8, {{4, {1}, 1}, {1, {4}, 2}}), "ascending and apart");
  CheckRefused(engine.get(), WithRows(8, {{40, {1}, 1}}), "placed[0] takes the place of tokens 40 to 40");
  CheckRefused(engine.get(), WithRows(8, {{1, {}, 1}}), "placed[0] has no rows");
  auto plain = Make(Usual(), 40, {});
  CheckRefused(plain.get(), WithRows(8, {{1, {1}, 1}}), "compile the model with --images");
  ModelShape head = Usual();
  head.takes_states = true;
  head.states_width = kRowWidth;
  std::unique_ptr<Engine> made;
  Status status = Engine::Create(std::make_unique<NullDevice>(head, 40), {}, &made);
  CHECK(status.message.find("is a head that guesses") != std::string::npos);
  head.vector_width = 8;
  status = Engine::Create(std::make_unique<NullDevice>(head, 40), {}, &made);
  CHECK(status.message.find("encodes images for another model") != std::string::npos);
}

// A head reads states that such a model does not leave, and a draft that takes rows would be given none.
void TestDrafts() {
  EngineOptions options;
  options.speculate_tokens = 2;
  std::unique_ptr<Engine> made;
  ModelShape head = Usual();
  head.takes_states = true;
  head.states_width = kRowWidth;
  for (const auto& [draft, words] :
       {std::pair(head, "the model leaves none"), std::pair(Placing(), "without --images")}) {
    const Status status = Engine::Create(std::make_unique<NullDevice>(Placing(), 40), options, &made,
                                         std::make_unique<NullDevice>(draft, 40));
    CHECK_EQ(status.code, LLMC_ERR_INVALID_ARGUMENT);
    CHECK(status.message.find(words) != std::string::npos);
  }
}

uint32_t CachedOf(Engine* engine, Job job) {
  Outputs outputs;
  CHECK_OK(Submit(engine, &job));
  RunAll(engine, &outputs);
  const Output& got = outputs[{job.id, 0}];
  Compare(got, Reference(job, 0, 64));
  return got.num_cached;
}

void TestPrefixCache() {
  auto engine = Make(Placing(), 60, {});
  const Placed cat{2, {100, 101, 102, 103, 104, 105}, 1}, dog{2, {200, 201, 202, 203, 204, 205}, 2};
  const Placed later{3, cat.values, 1};
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {cat})), 0u);
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {cat})), 12u);
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {dog})), 0u);
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {dog})), 12u);
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {later})), 0u);
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {})), 0u);
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {cat, {9, {7, 8}, 3}})), 8u);
}

// Positions on axes belong to a model that has them, and end where the text goes on.
void TestAxes() {
  auto engine = Make(Placing(), 40, {});
  CheckRefused(engine.get(), WithRows(8, {{1, {1, 2, 3, 4}, 1, 2}}), "placed[0].positions is given, but");
  ModelShape shape = Placing();
  shape.rope_axes = kRopeAxes;
  engine = Make(shape, 40, {});
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {{2, {1, 2, 3, 4, 5, 6}, 1, 2}, {9, {7}, 2, 1}})), 0u);
  CHECK_EQ(CachedOf(engine.get(), WithRows(13, {{2, {1, 2, 3, 4, 5, 6}, 1, 2}})), 8u);
  const std::vector<float> rows(4 * kRowWidth, 1);
  std::vector<int32_t> positions(4 * kRopeAxes, 0);
  const Job job = Simple(8, 2);
  llmc_placed_rows one{};
  one.struct_size = sizeof(one);
  one.num_rows = 4;
  one.rows = rows.data();
  one.positions = positions.data();
  const llmc_sampling_params params = Params();
  llmc_request r;
  llmc_request_init(&r, sizeof(r));
  r.prompt_token_ids = job.prompt.data();
  r.num_prompt_tokens = job.prompt.size();
  r.sampling = &params;
  r.placed = &one;
  r.num_placed = 1;
  uint64_t id = 0;
  CHECK(engine->Submit(r, &id).message.find("advance is 0; use 1 to 4") != std::string::npos);
  one.advance = 5;
  CHECK(engine->Submit(r, &id).message.find("advance is 5; use 1 to 4") != std::string::npos);
  one.advance = 2;
  positions[7] = 2;
  CHECK(engine->Submit(r, &id).message.find("positions[7] is 2; use 0 to 1") != std::string::npos);
  positions[7] = -1;
  CHECK(engine->Submit(r, &id).message.find("positions[7] is -1; use 0 to 1") != std::string::npos);
  positions[7] = 1;
  CHECK_OK(engine->Submit(r, &id));
}

void TestNames() {
  RowNames names;
  PlacedRows::Identity one{}, other{};
  other[31] = 1;
  const int32_t first = names.Of(one), second = names.Of(other);
  CHECK(first < 0 && second < 0 && first != second);
  CHECK_EQ(names.Of(one), first);
  int32_t least = std::min(first, second);
  for (uint32_t i = 0; i < 100000; ++i) {  // more than are remembered
    PlacedRows::Identity many{};
    std::memcpy(many.data(), &i, sizeof(i));
    many[8] = 1;
    const int32_t name = names.Of(many);
    CHECK(name < least);
    least = name;
  }
  CHECK(names.Of(one) < least);  // forgotten, so it has a new one
}

// A device that loses the step behind each chained one runs this one again, with its rows.
void TestLostSteps() {
  NullDevice::late = NullDevice::draws = NullDevice::chains = true;
  NullDevice* device = nullptr;
  auto engine = Make(Placing(), 60, {}, &device);
  device->never_refuses = true;
  device->loses = 1;
  Outputs outputs;
  std::vector<Job> jobs{WithRows(9, {{1, {5, 6, 7}, 1}}), WithRows(7, {{0, {9}, 2}, {3, {4, 4}, 3}})};
  for (Job& job : jobs) CHECK_OK(Submit(engine.get(), &job));
  RunAll(engine.get(), &outputs);
  for (const Job& job : jobs) Compare(outputs[{job.id, 0}], Reference(job, 0, 64));
  CHECK(device->lost_steps > 0);
  CHECK(device->rows_placed > 6);  // some twice
  NullDevice::late = NullDevice::draws = NullDevice::chains = false;
}

// The device gives rows of kVocab floats, which depend on places, patches and their order.
struct Image {
  std::vector<float> patches;
  std::vector<int32_t> places, first;

  llmc_patches view() const {
    llmc_patches p{};
    p.struct_size = sizeof(p);
    p.num_patches = static_cast<uint32_t>(places.size());
    p.num_rows = static_cast<uint32_t>(first.size());
    p.patches = patches.data();
    p.places = places.data();
    p.first = first.data();
    return p;
  }
};

Image ImageOf(uint32_t patches) {
  Image image;
  for (uint32_t i = 0; i < patches; ++i) {
    image.patches.insert(image.patches.end(), kRowWidth, static_cast<float>(i * i % 97));
    image.places.push_back(static_cast<int32_t>(i * 7 % kVocab));
    if (i % 2 == 0) image.first.push_back(static_cast<int32_t>(i));
  }
  return image;
}

std::vector<float> RowsOf(const Image& image) {
  std::vector<float> rows(image.first.size() * kVocab);
  uint64_t fold = 0;
  std::vector<uint64_t> folds;
  for (uint32_t i = 0; i < image.places.size(); ++i) {
    fold = Fold(fold, TokenHash(fold, SeenRow(image.patches[i * kRowWidth]) + image.places[i], i));
    folds.push_back(fold);
  }
  for (size_t i = 0; i < image.first.size(); ++i) {
    LogitsOf(folds[static_cast<size_t>(image.first[i])], kVocab, &rows[i * kVocab]);
  }
  return rows;
}

ModelShape Encoding() {
  ModelShape m = Shape(4, 30, 1);
  m.takes_states = m.whole_prompts = true;
  m.states_width = kRowWidth;
  m.vector_width = kVocab;
  for (const uint32_t tokens : {16u, 8u, 36u}) {
    AddGraph(&m, Phase::kPrefill, tokens, 1, 8);
    m.graphs.back().max_samples = tokens / 2;
  }
  return m;
}

void TestEncoder() {
  NullDevice* device = nullptr;
  const ModelShape shape = Encoding();
  std::unique_ptr<Encoder> encoder;
  CHECK_OK(Encoder::Create(
      shape,
      [&](uint32_t num_blocks, std::unique_ptr<Device>* made) {
        CHECK_EQ(num_blocks, 10u);  // of a bucket's 36 rows, and the dummy block
        auto own = std::make_unique<NullDevice>(shape, num_blocks);
        device = own.get();
        *made = std::move(own);
        return Status::Ok();
      },
      &encoder));
  CHECK_EQ(encoder->max_patches(), 30u);
  CHECK_EQ(encoder->max_rows(), 18u);
  const uint32_t sizes[][2] = {{1, 1}, {8, 1}, {9, 0}, {16, 0}, {17, 2}, {30, 2}, {2, 1}};
  for (const auto& [patches, graph] : sizes) {
    const Image image = ImageOf(patches);
    if (image.first.size() > patches / 2) continue;  // an odd one has more rows than half of its patches
    std::vector<float> rows(image.first.size() * kVocab);
    CHECK_OK(encoder->Encode(image.view(), rows.data()));
    CHECK_EQ(device->last_graph, graph);
    CHECK(rows == RowsOf(image));
  }
  std::vector<float> rows(64 * kVocab);
  Image image = ImageOf(32);
  Status status = encoder->Encode(image.view(), rows.data());
  CHECK_EQ(status.code, LLMC_ERR_OUT_OF_RANGE);
  CHECK(status.message.find("32 patches for 16 rows, but at most 30 and 18") != std::string::npos);
  image = ImageOf(8);
  image.places[3] = kVocab;
  status = encoder->Encode(image.view(), rows.data());
  CHECK(status.message.find("places[3] is 53; use 0 to 52") != std::string::npos);
  image = ImageOf(8);
  image.first[1] = 8;
  status = encoder->Encode(image.view(), rows.data());
  CHECK(status.message.find("first[1] is 8; use 0 to 7") != std::string::npos);
  image = ImageOf(8);
  device->poison = true;
  CHECK_EQ(encoder->Encode(image.view(), rows.data()).code, LLMC_ERR_NOT_FINITE);
  device->poison = false;
  device->fail_after = 1;
  device->fail_code = LLMC_ERR_DEVICE_FAILED;
  CHECK_EQ(encoder->Encode(image.view(), rows.data()).code, LLMC_ERR_DEVICE_FAILED);
  rows.resize(image.first.size() * kVocab);
  CHECK_OK(encoder->Encode(image.view(), rows.data()));
  CHECK(rows == RowsOf(image));
  const auto no_device = [](uint32_t, std::unique_ptr<Device>*) { return Status::Invalid("not reached"); };
  for (const ModelShape& other : {Usual(), Placing()}) {
    status = Encoder::Create(other, no_device, &encoder);
    CHECK(status.message.find("encodes no images") != std::string::npos);
  }
}

}  // namespace

int main() {
  TestRefused();
  TestDrafts();
  TestPrefixCache();
  TestAxes();
  TestNames();
  TestLostSteps();
  TestEncoder();
  return Finish("placed_rows_test");
}
