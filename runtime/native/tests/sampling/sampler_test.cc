// The sampler against a brute force that sorts the whole vocabulary.
#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "core/isa.h"
#include "support/check.h"

using namespace llmc;

namespace {

struct Reference {
  std::vector<double> probability;  // of every token, after all filters
  std::vector<int32_t> order;       // kept tokens, best first
};

Reference BruteForce(std::vector<float> row, const SamplingParams& p, const std::vector<int32_t>& tokens,
                     size_t num_prompt, const std::vector<int32_t>& eos) {
  const size_t v = row.size();
  for (const auto& b : p.logit_bias) row[b.token_id] += b.bias;
  if (tokens.size() - num_prompt < p.min_tokens) {
    for (int32_t id : eos) row[id] = -INFINITY;
    for (int32_t id : p.stop_token_ids) row[id] = -INFINITY;
  }
  for (size_t id = 0; id < v; ++id) {
    const auto n = std::count(tokens.begin(), tokens.end(), static_cast<int32_t>(id));
    const auto out = std::count(tokens.begin() + static_cast<long>(num_prompt), tokens.end(), static_cast<int32_t>(id));
    if (n) row[id] = row[id] > 0 ? row[id] / p.repetition_penalty : row[id] * p.repetition_penalty;
    if (out) row[id] -= p.frequency_penalty * static_cast<float>(out);
    if (out) row[id] -= p.presence_penalty;
  }
  Reference r;
  for (size_t id = 0; id < v; ++id) r.order.push_back(static_cast<int32_t>(id));
  std::stable_sort(r.order.begin(), r.order.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
  r.probability.assign(v, 0);
  if (p.temperature == 0) {
    r.order.resize(1);
    r.probability[r.order[0]] = 1;
    return r;
  }
  const float max = row[r.order[0]];
  auto weight = [&](int32_t id) { return std::exp((static_cast<double>(row[id]) - max) / p.temperature); };
  while (weight(r.order.back()) < std::max<double>(p.min_p, 1e-37)) r.order.pop_back();
  if (p.top_k > 0 && r.order.size() > static_cast<size_t>(p.top_k)) r.order.resize(p.top_k);
  double total = 0, sum = 0;
  for (int32_t id : r.order) total += weight(id);
  if (p.top_p < 1) {
    size_t keep = 0;
    while (keep < r.order.size()) {
      sum += weight(r.order[keep++]);
      if (sum >= p.top_p * total) break;
    }
    r.order.resize(keep);
    total = sum;
  }
  for (int32_t id : r.order) r.probability[id] = weight(id) / total;
  return r;
}

void TestExp() {
  double worst = 0;
  for (float x = -86.5f; x <= 0; x += 0.0137f) {
    worst = std::max(worst, std::fabs(ExpNegative(x) / std::exp(static_cast<double>(x)) - 1));
  }
  CHECK(worst < 3e-7);
  CHECK(ExpNegative(0) == 1.0f);
  CHECK(ExpNegative(-100) == 0.0f);
  CHECK(ExpNegative(-INFINITY) == 0.0f);
}

// The bits of plain loops.
void TestRowsOfOneLevel() {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 4);
  for (uint32_t n : {1u, 7u, 16u, 33u, 2047u, 2048u, 2049u, 6000u}) {
    std::vector<float> row(n), out(n);
    for (float& x : row) x = normal(random);
    if (n % 2) row[n / 2] = row[n - 1] = 40;
    float max = row[0];
    for (float x : row) max = std::max(max, x);
    const uint32_t first = static_cast<uint32_t>(std::find(row.begin(), row.end(), max) - row.begin());
    const RowScan scan = ScanRow(row.data(), n);
    CHECK(scan.finite && scan.max == max && scan.max_begin <= first && first < scan.max_end && scan.max_end <= n);
    ExpRow(row.data(), n, max, 0.7f, out.data());
    double lanes[8] = {}, sum = 0;
    for (uint32_t i = 0; i < n; ++i) {
      CHECK(out[i] == ExpNegative((row[i] - max) * 0.7f));
      lanes[n - i <= n % 8 ? i - n / 8 * 8 : i % 8] += out[i];
    }
    for (double lane : lanes) sum += lane;
    CHECK(SumRow(out.data(), n) == sum);
    for (float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      std::vector<float> broken = row;
      broken[n / 3] = bad;
      CHECK(!ScanRow(broken.data(), n).finite);
    }
  }
  // The first of equal zeros, whatever their signs.
  std::vector<float> zeros(5000, -1.0f);
  zeros[100] = -0.0f;
  zeros[4500] = 0.0f;
  const RowScan scan = ScanRow(zeros.data(), 5000);
  CHECK(scan.max == 0.0f && scan.max_begin <= 100 && 100 < scan.max_end);
}

// With every width of vectors that the machine has.
void TestRows() {
  const uint32_t machine = MachineIsaLevel();
  for (uint32_t level = 0; level <= machine; ++level) {
    LimitIsaLevel(level);
    CHECK_EQ(MachineIsaLevel(), level);
    TestRowsOfOneLevel();
  }
  LimitIsaLevel(kMaxIsaLevel);
  CHECK_EQ(MachineIsaLevel(), machine);
}

void TestUniform() {
  double sum = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    const double u = UniformFromKey(i % 7, i % 11, i);
    CHECK(u >= 0 && u < 1);
    sum += u;
  }
  CHECK(std::fabs(sum / 20000 - 0.5) < 0.01);
  CHECK(UniformFromKey(1, 2, 3) == UniformFromKey(1, 2, 3));
  CHECK(UniformFromKey(1, 2, 3) != UniformFromKey(2, 1, 3));
  CHECK(UniformFromKey(1, 2, 3) != UniformFromKey(1, 3, 2));
  CHECK(UniformFromKey(1, 2, 3) != UniformFromKey(3, 2, 1));
}

SamplingParams RandomParams(std::mt19937& rng, int32_t vocab) {
  SamplingParams p;
  auto one_in = [&](uint32_t n) { return rng() % n == 0; };
  auto id = [&] { return static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab)); };
  p.temperature = one_in(4) ? 0.0f : 0.2f + static_cast<float>(rng() % 20) / 10;
  if (one_in(2)) p.top_k = 1 + static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab + 5));
  if (one_in(2)) p.top_p = 0.05f + 0.9f * static_cast<float>(rng() % 1000) / 1000;
  if (one_in(3)) p.min_p = 0.3f * static_cast<float>(rng() % 1000) / 1000;
  if (one_in(3)) p.repetition_penalty = 0.5f + static_cast<float>(rng() % 20) / 10;
  if (one_in(3)) p.presence_penalty = static_cast<float>(rng() % 40) / 10 - 2;
  if (one_in(3)) p.frequency_penalty = static_cast<float>(rng() % 40) / 10 - 2;
  if (one_in(3)) {
    for (int i = 0; i < 3; ++i) p.logit_bias.push_back({id(), static_cast<float>(rng() % 200) / 10 - 10});
  }
  if (one_in(3)) p.min_tokens = rng() % 4;
  if (one_in(3)) p.stop_token_ids = {id()};
  p.num_logprobs = static_cast<int32_t>(rng() % 7) - 1;
  return p;
}

void TestAgainstBruteForce() {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    std::mt19937 rng(seed);
    const int32_t vocab = seed % 10 == 0 ? 5000 : 2 + static_cast<int32_t>(rng() % 300);
    const std::vector<int32_t> eos = {0};
    Sampler sampler(vocab, eos);
    std::normal_distribution<float> normal(0, 0.5f + static_cast<float>(seed % 5));
    std::vector<float> row(static_cast<size_t>(vocab));
    for (auto& x : row) x = seed % 3 == 0 ? std::round(normal(rng)) : normal(rng);  // many ties
    SamplingParams p = RandomParams(rng, vocab);
    if (p.min_tokens > 0 && vocab <= 2) p.min_tokens = 0;
    std::vector<int32_t> tokens(1 + rng() % 20);
    for (auto& t : tokens) t = static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab));
    const size_t num_prompt = 1 + rng() % tokens.size();
    const Reference want = BruteForce(row, p, tokens, num_prompt, eos);
    const uint32_t count = static_cast<uint32_t>(tokens.size());
    for (uint64_t draw = 0; draw < 20; ++draw) {
      p.seed = draw;
      SampleResult r;
      CHECK_OK(sampler.Sample(row.data(), p, {tokens.data(), count, static_cast<uint32_t>(num_prompt), 1}, &r));
      if (p.temperature == 0) {
        CHECK_EQ(r.token, want.order[0]);
      } else {
        // Inverse CDF: in rank order when a filter is on, else in id order. Near an edge rounding may decide.
        const double u = UniformFromKey(p.seed, 1, count);
        const bool filtered = (p.top_k > 0 && p.top_k < vocab) || p.top_p < 1 || p.min_p > 0;
        double low = 0;
        if (filtered) {
          for (int32_t id : want.order) {
            if (id == r.token) break;
            low += want.probability[id];
          }
        } else {
          for (int32_t id = 0; id < r.token; ++id) low += want.probability[id];
        }
        const double high = low + want.probability[r.token];
        // A token that the reference keeps or drops by rounding at the top-p edge shifts the scale a little.
        if (p.top_k != 1) CHECK(u > low - 1e-4 - 0.02 * filtered && u < high + 1e-4 + 0.02 * filtered);
        CHECK(want.probability[r.token] > 0 || p.top_p < 1 || p.min_p > 0);
      }
      if (p.num_logprobs >= 0) {
        double sum = 0;
        for (float x : row) sum += std::exp(static_cast<double>(x));
        CHECK(std::fabs(r.logprob - (row[r.token] - std::log(sum))) < 1e-4);
        CHECK_EQ(r.num_top, static_cast<uint32_t>(std::min(p.num_logprobs, vocab)));
        std::vector<int32_t> order(row.size());
        for (size_t i = 0; i < row.size(); ++i) order[i] = static_cast<int32_t>(i);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
        for (uint32_t i = 0; i < r.num_top; ++i) {
          CHECK_EQ(r.top_token_ids[i], order[i]);
          CHECK(std::fabs(r.top_logprobs[i] - (row[order[i]] - std::log(sum))) < 1e-4);
        }
      } else {
        CHECK_EQ(r.num_top, 0u);
      }
      // The same call on a fresh sampler has the same answer: no state leaks from row to row.
      Sampler fresh(vocab, eos);
      SampleResult again;
      CHECK_OK(fresh.Sample(row.data(), p, {tokens.data(), count, static_cast<uint32_t>(num_prompt), 1}, &again));
      CHECK(again.token == r.token && again.logprob == r.logprob);
    }
  }
}

void TestDistribution() {
  const std::vector<float> row = {0, 1, 2, 0.5f, -1};
  Sampler sampler(5, {});
  for (float top_p : {1.0f, 0.9f}) {
    SamplingParams p;
    p.top_p = top_p;
    const int32_t prompt = 0;
    const Reference want = BruteForce(row, p, {0}, 1, {});
    std::vector<int> counts(5);
    const int n = 40000;
    for (int i = 0; i < n; ++i) {
      p.seed = static_cast<uint64_t>(i);
      SampleResult r;
      CHECK_OK(sampler.Sample(row.data(), p, {&prompt, 1, 1, 0}, &r));
      ++counts[static_cast<size_t>(r.token)];
    }
    for (size_t i = 0; i < 5; ++i) CHECK(std::fabs(static_cast<double>(counts[i]) / n - want.probability[i]) < 0.01);
  }
}

void TestErrors() {
  const int32_t prompt = 0;
  Sampler sampler(3, {1});
  SampleResult r;
  SamplingParams p;
  for (float bad : {static_cast<float>(NAN), static_cast<float>(INFINITY), static_cast<float>(-INFINITY)}) {
    const float row[] = {1, bad, 0};
    Status s = sampler.Sample(row, p, {&prompt, 1, 1, 0}, &r);
    CHECK_EQ(s.code, LLMC_ERR_NOT_FINITE);
    CHECK(s.message.find("token 1") != std::string::npos);
  }
  const float row[] = {1, 2, 3};
  p.min_tokens = 1;
  p.stop_token_ids = {0, 2};
  CHECK_EQ(sampler.Sample(row, p, {&prompt, 1, 1, 0}, &r).code, LLMC_ERR_INVALID_ARGUMENT);
  p.stop_token_ids = {2};
  CHECK_OK(sampler.Sample(row, p, {&prompt, 1, 1, 0}, &r));
  CHECK_EQ(r.token, 0);
  // Equal logits: the lowest id; minus zero equals zero.
  const float ties[] = {-0.0f, 0.0f, -1.0f};
  SamplingParams greedy;
  greedy.temperature = 0;
  CHECK_OK(sampler.Sample(ties, greedy, {&prompt, 1, 1, 0}, &r));
  CHECK_EQ(r.token, 0);
}

// A mask is the same as logits of minus infinity, and leaves the logprobs alone.
void TestMask() {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 rng(seed);
    const int32_t vocab = 2 + static_cast<int32_t>(rng() % 300);
    Sampler sampler(vocab, {0});
    std::normal_distribution<float> normal(0, 2);
    std::vector<float> row(static_cast<size_t>(vocab));
    for (auto& x : row) x = normal(rng);
    SamplingParams p = RandomParams(rng, vocab);
    p.min_tokens = 0;
    std::vector<int32_t> tokens(1 + rng() % 20);
    for (auto& t : tokens) t = static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab));
    // Sometimes shorter than the vocabulary: what it does not cover is not allowed.
    std::vector<uint32_t> mask(1 + rng() % ((static_cast<uint32_t>(vocab) + 31) / 32));
    for (auto& word : mask) word = rng() & rng();
    mask[0] |= 2;
    auto allowed = [&](int32_t id) {
      return static_cast<size_t>(id) / 32 < mask.size() && ((mask[id / 32] >> (id % 32)) & 1);
    };
    std::vector<float> masked = row;
    for (int32_t id = 0; id < vocab; ++id) {
      if (!allowed(id)) masked[id] = -INFINITY;
    }
    const Reference want = BruteForce(masked, p, tokens, 1, {});
    SampleContext context{tokens.data(), static_cast<uint32_t>(tokens.size()), 1, 0};
    context.mask = mask.data();
    context.num_mask_words = static_cast<uint32_t>(mask.size());
    for (uint64_t draw = 0; draw < 10; ++draw) {
      p.seed = draw;
      SampleResult r, raw;
      CHECK_OK(sampler.Sample(row.data(), p, context, &r));
      CHECK(allowed(r.token));
      if (p.temperature == 0) CHECK_EQ(r.token, want.order[0]);
      if (p.temperature != 0 && p.top_p >= 1 && p.min_p <= 0) CHECK(want.probability[r.token] > 0);
      if (p.num_logprobs < 0) continue;
      CHECK_OK(sampler.Score(row.data(), r.token, static_cast<uint32_t>(p.num_logprobs), 1, &raw));
      CHECK(raw.logprob == r.logprob && raw.rank == r.rank && raw.num_top == r.num_top);
      uint32_t better = 0;
      for (float x : row) better += x > row[r.token];
      CHECK_EQ(r.rank, better + 1);
    }
  }
}

void TestMaskEdges() {
  const int32_t prompt = 0;
  Sampler sampler(3, {1});
  SampleResult r;
  SamplingParams p;
  const float row[] = {1, 2, 3};
  uint32_t mask = 0xfffffff8u;  // only tokens that do not exist
  SampleContext context{&prompt, 1, 1, 0};
  context.mask = &mask;
  context.num_mask_words = 1;
  CHECK_EQ(sampler.Sample(row, p, context, &r).code, LLMC_ERR_EMPTY_MASK);
  // min_tokens forbids eos while the mask leaves something else, and gives way when it does not.
  p.min_tokens = 2;
  mask = 3;
  CHECK_OK(sampler.Sample(row, p, context, &r));
  CHECK_EQ(r.token, 0);
  mask = 2;
  CHECK_OK(sampler.Sample(row, p, context, &r));
  CHECK_EQ(r.token, 1);
  const float bad[] = {1, NAN, 0};
  CHECK_EQ(sampler.Score(bad, 0, 1, 1, &r).code, LLMC_ERR_NOT_FINITE);
  // Equal logits rank by id.
  const float ties[] = {5, 5, 5};
  CHECK_OK(sampler.Score(ties, 2, 3, 1, &r));
  CHECK(r.rank == 3 && r.num_top == 3 && r.top_token_ids[2] == 2);
}

}  // namespace

int main() {
  TestExp();
  TestRows();
  TestUniform();
  TestAgainstBruteForce();
  TestDistribution();
  TestErrors();
  TestMask();
  TestMaskEdges();
  return llmc_test::Finish("sampler_test");
}
