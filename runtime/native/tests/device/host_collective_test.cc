// HostCollective: what ranks of GPUs add, gather and pass on has the order of the ranks, wherever operands lie.
#include "device/gpu/host_collective.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective/room.h"
#include "collective/shm_collective.h"
#include "support/check.h"

namespace {

using Floats = std::vector<float>;

constexpr uint32_t kRanks = 3, kWidth = 6, kRows = 5;
constexpr uint64_t kOutboxBytes = 1 << 16;

// Memory of a device, by operand; copies happen when they are waited for, those to the device at the next wait.
struct FakeDevice {
  std::map<uint32_t, Floats> operands;
  std::vector<std::pair<const void*, std::pair<void*, uint64_t>>> waiting;

  void Wait() {
    for (const auto& [from, to] : waiting) std::memcpy(to.first, from, to.second);
    waiting.clear();
  }
};

// Runs a collective on every rank, on a thread each. operands: of a rank; the last one is the result.
template <class Operands>
std::vector<Floats> Together(const llmc::CollectiveRecord& record, uint32_t ranks_of_stage, Operands operands) {
  const int fd = ::memfd_create("llmc_test", 0);
  CHECK(fd >= 0);
  std::vector<std::shared_ptr<llmc::Room>> rooms(kRanks);
  CHECK_OK(llmc::Room::Open("/proc/self/fd/" + std::to_string(fd), 0, kRanks, &rooms[0]));
  for (uint32_t r = 1; r < kRanks; ++r) CHECK_OK(llmc::Room::Join(rooms[0], r, &rooms[r]));
  for (const auto& room : rooms) CHECK_OK(room->MakeOutboxes(kOutboxBytes));
  std::vector<Floats> results(kRanks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      llmc::ShmCollective ranks(rooms[r], ranks_of_stage);
      FakeDevice device;
      uint32_t count = 0;
      for (const Floats& one : operands(r)) device.operands[count++] = one;
      const llmc::HostCollective joint(record, {kRows, 0}, &ranks, 0);
      CHECK_EQ(joint.result() + 1, count);
      Floats host(4 * kRows * kWidth, -1);
      CHECK_OK(llmc::JoinOnHost(
          joint, &ranks, host.data(),
          [&](uint32_t operand, uint64_t bytes, float* to) {
            CHECK(bytes <= device.operands[operand].size() * sizeof(float));
            device.waiting.push_back({device.operands[operand].data(), {to, bytes}});
            return llmc::Status::Ok();
          },
          [&] {
            device.Wait();
            return llmc::Status::Ok();
          },
          [&](uint32_t operand, uint64_t bytes, const float* from) {
            CHECK_EQ(bytes, device.operands[operand].size() * sizeof(float));
            device.waiting.push_back({from, {device.operands[operand].data(), bytes}});
            return llmc::Status::Ok();
          }));
      device.Wait();
      results[r] = device.operands[joint.result()];
    });
  }
  for (std::thread& thread : threads) thread.join();
  ::close(fd);
  return results;
}

// Terms whose sum depends on their order.
float Term(uint32_t rank, uint64_t i) {
  const float sizes[] = {1e8f, 1.0f, -1e8f};
  return sizes[(rank + i) % kRanks] + static_cast<float>(i) * 0.37f;
}
Floats Terms(uint32_t rank, uint64_t count) {
  Floats terms(count);
  for (uint64_t i = 0; i < count; ++i) terms[i] = Term(rank, i);
  return terms;
}

void TestSums() {
  const uint64_t count = uint64_t{kRows} * kWidth;
  const Floats bias = Terms(1, kWidth), residual = Terms(2, count);
  for (const uint32_t adds : {0u, llmc::kAddsBias, llmc::kAddsResidual, llmc::kAddsBias | llmc::kAddsResidual}) {
    const auto results = Together({0, 0, kWidth, adds, 0, {}}, kRanks, [&](uint32_t rank) {
      std::vector<Floats> of = {Terms(rank, count)};
      if (adds & llmc::kAddsBias) of.push_back(bias);
      if (adds & llmc::kAddsResidual) of.push_back(residual);
      of.emplace_back(count, -2.0f);
      return of;
    });
    for (const Floats& found : results) {
      for (uint64_t i = 0; i < count; ++i) {
        float wanted = Term(0, i);
        for (uint32_t r = 1; r < kRanks; ++r) wanted += Term(r, i);
        if (adds & llmc::kAddsBias) wanted += bias[i % kWidth];
        if (adds & llmc::kAddsResidual) wanted += residual[i];
        CHECK_EQ(found[i], wanted);
      }
    }
  }
}

void TestGathers() {
  constexpr uint32_t kOwn = kWidth / kRanks;
  const auto results = Together({1, 0, kWidth, 0, 0, {}}, kRanks, [&](uint32_t rank) {
    return std::vector<Floats>{Terms(rank, uint64_t{kRows} * kOwn), Floats(uint64_t{kRows} * kWidth)};
  });
  for (const Floats& found : results) {
    for (uint32_t i = 0; i < kRows * kWidth; ++i) {
      const uint32_t column = i % kWidth;
      CHECK_EQ(found[i], Term(column / kOwn, uint64_t{i / kWidth} * kOwn + column % kOwn));
    }
  }
}

void TestStages() {
  const uint64_t count = uint64_t{kRows} * kWidth;
  for (uint32_t stage = 0; stage + 1 < kRanks; ++stage) {
    // A rank of neither stage does not run it.
    const auto results = Together({2, 0, kWidth, 0, stage, {}}, 1, [&](uint32_t rank) {
      return std::vector<Floats>{rank == stage || rank == stage + 1 ? Terms(rank, count) : Floats(count)};
    });
    CHECK(results[stage] == Terms(stage, count));
    CHECK(results[stage + 1] == Terms(stage, count));
  }
}

void TestNoRows() {
  std::shared_ptr<llmc::Room> room;
  const int fd = ::memfd_create("llmc_test", 0);
  CHECK_OK(llmc::Room::Open("/proc/self/fd/" + std::to_string(fd), 0, 2, &room));
  llmc::ShmCollective ranks(room);
  const llmc::CollectiveRecord record = {0, 0, kWidth, 0, 0, {}};
  CHECK(llmc::HostCollective(record, {0, 3}, &ranks, 0).empty());
  ::close(fd);
}

}  // namespace

int main() {
  TestSums();
  TestGathers();
  TestStages();
  TestNoRows();
  return llmc_test::Finish("host_collective_test");
}
