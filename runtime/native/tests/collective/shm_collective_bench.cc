// Prints what sums of ranks cost: ns for an all-reduce of several sizes, between threads that spin.
// Usage: shm_collective_bench [ranks]. Not a test: figures depend on what else the machine is doing.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/shm_collective.h"
#include "core/clock.h"

namespace {

constexpr int kSamples = 50, kSumsPerSample = 1000;
constexpr uint64_t kWidths[] = {256, 1024, 4096, 16384};  // floats

// ns of one sum, by sample.
std::vector<double> Sum(const std::shared_ptr<llmc::Room>& room, uint64_t width) {
  llmc::ShmCollective collective(room);
  const std::vector<float> in(width, 1.0f);
  std::vector<float> out(width);
  std::vector<double> ns;
  for (int sample = 0; sample < kSamples; ++sample) {
    const uint64_t start = llmc::MonotonicNs();
    for (int i = 0; i < kSumsPerSample; ++i) {
      collective.AllReduce({in.data(), out.data(), nullptr, nullptr, 1, width}, 0, 1);
    }
    ns.push_back(static_cast<double>(llmc::MonotonicNs() - start) / kSumsPerSample);
  }
  std::sort(ns.begin(), ns.end());
  return ns;
}

}  // namespace

int main(int argc, char** argv) {
  const auto count = static_cast<uint32_t>(argc > 1 ? std::max(2, std::atoi(argv[1])) : 2);
  for (const uint64_t width : kWidths) {
    const int memory = ::memfd_create("llmc_bench", 0);
    std::vector<std::shared_ptr<llmc::Room>> rooms(count);
    const std::string path = "/proc/self/fd/" + std::to_string(memory);
    llmc::Status status = llmc::Room::Open(path, 0, count, rooms.data());
    for (uint32_t r = 1; r < count && status.ok(); ++r) status = llmc::Room::Join(rooms[0], r, &rooms[r]);
    ::close(memory);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message.c_str());
      return 1;
    }
    std::vector<std::thread> others;
    for (uint32_t r = 1; r < count; ++r) others.emplace_back([&rooms, r, width] { Sum(rooms[r], width); });
    const std::vector<double> ns = Sum(rooms[0], width);
    for (std::thread& other : others) other.join();
    std::printf("%3u ranks %6llu bytes  min %9.0f  median %9.0f  p90 %9.0f ns\n", count,
                static_cast<unsigned long long>(width * sizeof(float)), ns.front(), ns[ns.size() / 2],
                ns[ns.size() * 9 / 10]);
  }
  return 0;
}
