// Prints what sums of ranks cost: ns for an all-reduce of several sizes. Not a test: figures depend on what else the
// machine is doing.
// Usage: collective_bench [ranks]: between threads of one process that spin.
//        mpirun -n 2 -hosts a,b collective_bench libmpi.so.12: between the processes that mpirun started, through that
//        library. For two ranks it also prints what `llmc buckets scale` asks of a link.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/mpi/mpi_group.h"
#include "collective/shm_collective.h"
#include "core/clock.h"

namespace {

using llmc::Collective;

constexpr int kSamples = 50;
constexpr uint64_t kWidths[] = {16, 256, 1024, 4096, 16384, 262144};  // floats
constexpr uint64_t kFloatsPerSample = 1 << 20;

// ns of one sum, by sample, ascending.
std::vector<double> Sum(Collective* collective, uint64_t width) {
  const std::vector<float> in(width, 1.0f);
  std::vector<float> out(width);
  const auto sums = static_cast<int>(std::clamp<uint64_t>(kFloatsPerSample / width, 10, 1000));
  std::vector<double> ns;
  for (int sample = 0; sample < kSamples; ++sample) {
    const uint64_t start = llmc::MonotonicNs();
    for (int i = 0; i < sums; ++i) collective->AllReduce({in.data(), out.data(), nullptr, nullptr, 1, width}, 0, 1);
    ns.push_back(static_cast<double>(llmc::MonotonicNs() - start) / sums);
  }
  std::sort(ns.begin(), ns.end());
  return ns;
}

void Print(uint32_t ranks, uint64_t width, const std::vector<double>& ns) {
  std::printf("%3u ranks %8llu bytes  min %9.0f  median %9.0f  p90 %9.0f ns\n", ranks,
              static_cast<unsigned long long>(width * sizeof(float)), ns.front(), ns[ns.size() / 2],
              ns[ns.size() * 9 / 10]);
}

int Fail(const llmc::Status& status) {
  std::fprintf(stderr, "%s\n", status.message.c_str());
  return 1;
}

int OfThreads(uint32_t count) {
  for (const uint64_t width : kWidths) {
    const int memory = ::memfd_create("llmc_bench", 0);
    std::vector<std::shared_ptr<llmc::Room>> rooms(count);
    const std::string path = "/proc/self/fd/" + std::to_string(memory);
    llmc::Status status = llmc::Room::Open(path, 0, count, rooms.data());
    for (uint32_t r = 1; r < count && status.ok(); ++r) status = llmc::Room::Join(rooms[0], r, &rooms[r]);
    ::close(memory);
    if (!status.ok()) return Fail(status);
    const auto run = [&rooms, width](uint32_t rank) {
      llmc::ShmCollective collective(rooms[rank]);
      return Sum(&collective, width);
    };
    std::vector<std::thread> others;
    for (uint32_t r = 1; r < count; ++r) others.emplace_back(run, r);
    const std::vector<double> ns = run(0);
    for (std::thread& other : others) other.join();
    Print(count, width, ns);
  }
  return 0;
}

int OfProcesses(const char* library) {
  std::shared_ptr<llmc::Group> group;
  const llmc::Status opened = llmc::MpiGroup::Open(library, 0, &group);
  if (!opened.ok()) return Fail(opened);
  const std::shared_ptr<Collective> collective = group->NewCollective(group->num_ranks(), 0);
  std::vector<double> medians;
  for (const uint64_t width : kWidths) {
    const std::vector<double> ns = Sum(collective.get(), width);
    if (!collective->status().ok()) return Fail(collective->status());
    if (group->rank() == 0) Print(group->num_ranks(), width, ns);
    medians.push_back(ns[ns.size() / 2]);
  }
  if (group->rank() == 0 && group->num_ranks() == 2) {
    const double more = static_cast<double>(std::end(kWidths)[-1] - kWidths[0]) * sizeof(float);
    const double bits_per_ns = 8 * more / (medians.back() - medians.front());
    std::printf("--latency-us %.1f --gbps %.1f\n", medians.front() / 1e3, bits_per_ns);
  }
  group->Leave();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  return argc > 1 && ranks == 0 ? OfProcesses(argv[1]) : OfThreads(static_cast<uint32_t>(std::max(2, ranks)));
}
