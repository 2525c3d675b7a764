// The choice of depth on made-up machines and texts, whose clock is a sum.
#include "engine/speculation/guess_depth.h"

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "engine/speculation/acceptance.h"
#include "support/check.h"

using namespace llmc;
using namespace llmc_test;

namespace {

using Cost = std::function<double(uint32_t)>;  // of a step with so many extra rows, in plain steps

struct Served {
  double time = 0, tokens = 0, guesses = 0;
  double rate() const { return tokens / time; }
};

// Steps of `seqs` sequences; each guess is right with these odds, which the controller is told as `told`. twice: right
// guesses beside wrong ones are computed again.
Served Serve(GuessDepth* depth, uint32_t seqs, double odds, double told, uint32_t steps, const Cost& cost,
             uint32_t room = 64, double noise = 0, bool twice = false) {
  std::mt19937 rng(11);
  std::uniform_real_distribution<double> uniform(0, 1);
  Served served;
  std::vector<GuessChoice> choices(seqs);
  uint32_t again = 0;
  for (uint32_t step = 0; step < steps; ++step) {
    for (GuessChoice& choice : choices) choice = {told, 8, 7};
    depth->Choose(100 * seqs, room, {again, twice}, &choices);
    uint32_t guesses = 0, tokens = seqs, next = 0;
    for (const GuessChoice& choice : choices) {
      CHECK(choice.depth <= choice.most);
      guesses += choice.depth;
      uint32_t right = 0;
      while (right < choice.depth && uniform(rng) < odds) ++right;
      tokens += right;
      if (twice && right < choice.depth) next += right;
    }
    CHECK(guesses <= room);
    const double took = cost(again + guesses) * (1 + noise * uniform(rng));
    depth->Took(seqs, 100 * seqs, again + guesses, tokens, static_cast<uint64_t>(took * 1e6));
    again = next;
    served.time += took;
    served.tokens += static_cast<double>(tokens) / seqs;
    served.guesses += guesses;
  }
  return served;
}

Cost Line(double row) {
  return [row](uint32_t extra) { return 1 + row * extra; };
}

// Guesses that are right are taken along, deep where they are likely and cheap.
void Gains() {
  GuessDepth cheap, dear, wide;
  CHECK(Serve(&cheap, 1, 0.9, 0.9, 400, Line(0.03)).rate() > 3.5);
  CHECK(Serve(&dear, 1, 0.9, 0.9, 400, Line(0.5)).rate() > 1.1);
  CHECK(Serve(&wide, 8, 0.8, 0.8, 400, Line(0.02)).rate() > 1.8);
  GuessDepth narrow;
  CHECK(Serve(&narrow, 8, 0.9, 0.9, 50, Line(0.02), 3).guesses <= 3 * 50);
}

// Whatever it believes and whatever rows cost, little is lost.
void LossIsBounded() {
  constexpr double kSteps = 2000;
  for (double told : {0.3, 0.7, 0.99}) {
    for (double row : {0.01, 0.1, 0.4, 1.0}) {
      for (uint32_t seqs : {1u, 8u, 16u}) {
        GuessDepth depth;
        const Served served = Serve(&depth, seqs, 0, told, static_cast<uint32_t>(kSteps), Line(row));
        // Credit at the start is one step; the last one may have taken longer than was foreseen.
        CHECK(served.time <= kSteps * 1.02 + 4);
      }
    }
  }
  // A text that repeated itself for long and stops doing so: no more than what may be kept of the gain is lost.
  GuessDepth depth;
  Serve(&depth, 1, 0.9, 0.9, 500, Line(0.05));
  CHECK(depth.credit() <= 4);
  CHECK(Serve(&depth, 1, 0, 0.9, 1000, Line(0.05)).time <= 1000 * 1.02 + 5);
}

// Where rows cost as much as steps nothing is to be had, and unlikely guesses stay at home.
void NoGuessesThatDoNotPay() {
  GuessDepth dear, unlikely, noisy;
  CHECK(Serve(&dear, 1, 0.6, 0.6, 1000, Line(1)).guesses < 20);
  CHECK(Serve(&unlikely, 1, 0.02, 0.02, 1000, Line(0.1)).guesses < 60);
  CHECK(Serve(&noisy, 1, 0.9, 0.9, 1000, Line(0.05), 64, 0.3).rate() > 2);
}

// Tokens that are computed twice cost rows: guesses pay less, and what they lose has the same bound.
void ComputedTwice() {
  GuessDepth cheap, sure, wide;
  CHECK(Serve(&cheap, 1, 0.9, 0.9, 400, Line(0.03), 64, 0, true).rate() > 3);
  CHECK(Serve(&sure, 1, 1, 0.99, 400, Line(0.03), 64, 0, true).rate() > 5);
  CHECK(Serve(&wide, 8, 0.8, 0.8, 400, Line(0.02), 64, 0, true).rate() > 1.5);
  for (const uint32_t seqs : {1u, 8u}) {
    for (const double row : {0.01, 0.1, 0.4, 1.0}) {
      for (const double odds : {0.0, 0.3, 0.6, 0.9}) {
        GuessDepth depth;
        const Served served = Serve(&depth, seqs, odds, odds > 0 ? odds : 0.9, 1000, Line(row), 64, 0, true);
        CHECK(served.time <= served.tokens * 1.02 + 4);
      }
    }
  }
}

// A draft reads a text where what is left of it is long enough to win the time back.
void Reading() {
  GuessDepth depth;
  CHECK(!depth.PaysToRead(1, 100, {0, 0, 0, 0.9, 8}, 100, 10000));  // nothing is known of steps
  depth.Took(1, 100, 0, 1, 1000000);
  CHECK(depth.PaysToRead(1, 100, {0, 0, 0, 0.9, 8}, 100, 10000));
  CHECK(!depth.PaysToRead(1, 100, {0, 0, 0, 0.9, 8}, 100, 1));
  CHECK(!depth.PaysToRead(1, 100, {0.85, 8, 0, 0.9, 8}, 100, 10000));  // a repetition is as good, and costs less
  CHECK(!depth.PaysToRead(1, 100, {0, 0, 0, 0.1, 8}, 100, 10000));
  depth.Read(10, 10 * 5000000);  // five steps a token
  CHECK(!depth.PaysToRead(1, 100, {0, 0, 0, 0.9, 8}, 100, 1000));
  CHECK(depth.PaysToRead(1, 100, {0, 0, 0, 0.9, 8}, 100, 10000));
  depth.Drafted(2, 2 * 3000000);  // three steps a guess
  CHECK(!depth.PaysToRead(1, 100, {0, 0, 0, 0.9, 8}, 1, 10000));
  // One of which the warm-up said that it is quick, and that was not seen at work.
  GuessDepth told;
  told.Took(1, 100, 0, 1, 1000000);
  CHECK(!told.PaysToRead(1, 100, {0, 0, 0, 0.6, 8}, 1000, 100));
  told.ExpectDraft(50000);
  CHECK(told.PaysToRead(1, 100, {0, 0, 0, 0.6, 8}, 1000, 100));
  told.Drafted(1, 3000000);
  told.ExpectDraft(50000);
  CHECK(!told.PaysToRead(1, 100, {0, 0, 0, 0.6, 8}, 1000, 100));
}

// Tokens per time of a plain step of four sequences: `drafted` have a draft's guesses, `repeating` known ones.
double RateOfBoth(uint32_t drafted, uint32_t repeating, double share, double draft_odds, double odds, bool same) {
  GuessDepth depth;
  depth.ExpectDraft(static_cast<uint64_t>(share * 1e9));
  std::mt19937 rng(3);
  std::uniform_real_distribution<double> uniform(0, 1);
  double time = 0, tokens = 0;
  for (int step = 0; step < 2000; ++step) {
    std::vector<GuessChoice> choices(4);
    for (uint32_t i = 0; i < drafted; ++i) choices[i] = {0, 0, 0, draft_odds, 8};
    for (uint32_t i = 0; i < repeating; ++i) {
      GuessChoice& choice = choices[same ? i : drafted + i];
      choice.odds = odds;
      choice.most = 16;
    }
    depth.Choose(400, 64, {}, &choices);
    uint32_t extra = 0, levels = 0, gave = 4;
    for (const GuessChoice& choice : choices) {
      CHECK(choice.depth <= (choice.drafted ? choice.draft_most : choice.most));
      extra += choice.depth;
      if (choice.drafted) levels = std::max(levels, choice.depth);
      for (uint32_t j = 0; j < choice.depth && uniform(rng) < (choice.drafted ? draft_odds : odds); ++j) ++gave;
    }
    const double own = 1 + 0.01 * extra;
    depth.Drafted(levels, static_cast<uint64_t>(levels * share * 1e9));
    depth.Took(4, 400, extra, gave, static_cast<uint64_t>(own * 1e9));
    time += own + share * levels;
    tokens += gave;
  }
  return tokens / time;
}

// A draft's guesses do not hinder known ones of others, which cost no levels. Nor do they take the place of known ones of
// the same sequence that promise more.
void KnownBesideDrafted() {
  for (const double share : {0.1, 0.25, 0.5, 1.0}) {
    for (const double draft_odds : {0.6, 0.8, 0.95}) {
      for (const double odds : {0.5, 0.7, 0.95}) {
        const double known = RateOfBoth(0, 2, share, draft_odds, odds, false);
        const double made = RateOfBoth(2, 0, share, draft_odds, odds, false);
        CHECK(RateOfBoth(2, 2, share, draft_odds, odds, false) > 0.95 * std::max(known, made));
        CHECK(RateOfBoth(2, 2, share, draft_odds, odds, true) > 0.95 * std::max(known, made));
      }
    }
  }
}

// Making guesses takes time, too: where a draft is slow there are none.
void Drafts() {
  for (const double each : {0.1, 0.9}) {
    GuessDepth depth;
    std::vector<GuessChoice> choices(1);
    double time = 0, tokens = 0;
    std::mt19937 rng(3);
    std::uniform_real_distribution<double> uniform(0, 1);
    for (int step = 0; step < 400; ++step) {
      choices[0] = {0, 0, 0, 0.8, 6};
      depth.Choose(100, 64, {}, &choices);
      const uint32_t made = choices[0].depth;
      uint32_t gave = 1;
      for (uint32_t i = 0; i < made && uniform(rng) < 0.8; ++i) ++gave;
      depth.Drafted(made, static_cast<uint64_t>(each * made * 1e6));
      const double took = 1 + 0.03 * made;
      depth.Took(1, 100, made, gave, static_cast<uint64_t>(took * 1e6));
      time += took + each * made;
      tokens += gave;
    }
    CHECK(each < 0.5 ? tokens / time > 1.8 : tokens / time > 0.97);
  }
}

// Steps that compute prompts, too, every other one: rows take what they take there, and a token that comes of a guess
// spares its part of a plain step. Gains where guesses are right, and little lost where they are wrong.
void Mixed() {
  constexpr uint32_t kSteps = 4000, kChunk = 64;
  for (const uint32_t seqs : {1u, 8u, 16u}) {
    for (const double odds : {0.0, 0.9}) {
      for (const double told : {0.3, 0.9}) {
        for (const double row : {0.01, 0.03, 0.3}) {
          GuessDepth depth;
          std::vector<GuessChoice> choices(seqs);
          std::mt19937 rng(7);
          std::uniform_real_distribution<double> uniform(0, 1);
          double time = 0, plain = 0;
          uint32_t guessed = 0;
          for (uint32_t step = 0; step < kSteps; ++step) {
            for (GuessChoice& choice : choices) choice = {told, 8, 7};
            if (step % 2 == 0) {
              depth.Took(seqs, 100 * seqs, 0, seqs, 1000000);
              continue;
            }
            depth.ChooseMixed(seqs, 100 * seqs, 32, &choices);
            uint32_t guesses = 0, right = 0;
            for (const GuessChoice& choice : choices) {
              guesses += choice.depth;
              for (uint32_t i = 0; i < choice.depth && uniform(rng) < odds; ++i) ++right;
            }
            CHECK(guesses <= 32);
            guessed += guesses;
            const uint32_t rows = kChunk + seqs + guesses;
            const double took = 1 + row * rows;
            depth.TookMixed(seqs, guesses, right, rows, static_cast<uint64_t>(took * 1e6));
            time += took - static_cast<double>(right) / seqs;
            plain += 1 + row * (kChunk + seqs);
          }
          CHECK(time <= 1.02 * (plain + kSteps / 2) + 4);
          if (odds == 0.9 && told == 0.9 && row == 0.01 && seqs == 1) CHECK(time < 0.8 * plain && guessed > kSteps / 2);
        }
      }
    }
  }
}

void Costs() {
  StepCosts costs;
  CHECK(!costs.Known(1, 100));
  costs.Take(1, 100, 4, 900);  // before a plain step: nothing to compare with
  costs.Take(1, 100, 0, 1000);
  CHECK(costs.Known(1, 100));
  CHECK(!costs.Known(2, 100));
  CHECK(!costs.Known(1, 1000));
  CHECK_EQ(costs.Plain(1), 1000);
  CHECK_EQ(costs.Extra(1, 0), 0);
  CHECK(costs.Extra(1, 4) > costs.Extra(1, 2) && costs.Extra(1, 2) > 0);
  costs.Take(1, 100, 4, 1400);
  const double near = costs.Extra(1, 4);
  CHECK(near > 0.399 && near < 0.401);
  CHECK_EQ(costs.MostExtra(1), 10);
  CHECK_EQ(costs.MostExtra(2), 10);  // by the nearest load
  costs.Take(2, 100, 0, 2000);
  CHECK(costs.Extra(2, 4) > 0.199 && costs.Extra(2, 4) < 0.201);  // as long, of a longer step
  CHECK(costs.Extra(1, 2) > 0.199 && costs.Extra(1, 2) < 0.201);
  CHECK(costs.Extra(1, 8) > 0.8 && costs.Extra(1, 8) < 1);
  costs.Take(1, 100, 8, 1500);
  CHECK(costs.Extra(1, 6) > 0.449 && costs.Extra(1, 6) < 0.451);
  costs.Take(1, 100, 8, 100000);  // the machine was asleep
  CHECK(costs.Extra(1, 8) < 0.9);
  costs.Take(1, 100, 8, 1);  // cannot be
  CHECK(costs.Extra(1, 8) >= 0);
  // Every number of rows and sequences has a place.
  for (uint32_t seqs : {1u, 31u, 32u, 100u, 1u << 20, UINT32_MAX / 2}) {
    costs.Take(seqs, 5, 0, 10);
    for (uint32_t extra : {1u, 16u, 17u, 48u, 49u, 64u, 1000u, UINT32_MAX / 2}) {
      costs.Take(seqs, 5, extra, 30);
      CHECK(costs.Extra(seqs, extra) > 0);
    }
  }
  for (int i = 0; i < 2000; ++i) costs.Take(3, 5, 1, 10);
  CHECK(!costs.Known(1, 100));
}

void Odds() {
  Acceptance acceptance;
  Evidence fresh, good, bad;
  CHECK(acceptance.Odds(fresh, 20) > acceptance.Odds(fresh, 1));
  for (int i = 0; i < 50; ++i) {
    acceptance.Add(4, 4, 4, &good);
    acceptance.Add(1, 1, 0, &bad);
  }
  CHECK(acceptance.Odds(good, 4) > 0.95 && acceptance.Odds(bad, 1) < 0.05);
  // One that is new is taken for one of its kind.
  CHECK(acceptance.Odds(fresh, 4) > 0.9 && acceptance.Odds(fresh, 1) < 0.1);
  for (int i = 0; i < 30; ++i) acceptance.Add(4, 1, 0, &good);
  CHECK(acceptance.Odds(good, 4) < 0.4);
  acceptance.Add(4, 1000, 10, &good);
  CHECK(acceptance.Odds(good, 4) >= 0 && acceptance.Odds(good, 4) < 0.1);
}

}  // namespace

int main() {
  Gains();
  LossIsBounded();
  NoGuessesThatDoNotPay();
  ComputedTwice();
  Reading();
  Drafts();
  KnownBesideDrafted();
  Mixed();
  Costs();
  Odds();
  return Finish("guess_depth_test");
}
