// Ranks that mpirun starts: sums and results have the bits that shared memory gives them, and what rank 0 says arrives.
// Without arguments it starts itself with mpirun; where there is no MPI it says so and passes.
#include "collective/mpi/mpi_group.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/shm_collective.h"
#include "support/check.h"

namespace {

using llmc::Collective;
using llmc::Group;

// The widest goes in two pieces; the ones above 32 KiB are added up by parts.
struct Shape {
  uint64_t rows, width;
};
constexpr uint64_t kOutboxBytes = 16u << 20;
constexpr Shape kShapes[] = {{1, 12}, {3, 1000}, {0, 64}, {70, 1920}, {1, 4}, {1100, 1004}};

std::vector<float> Values(uint32_t seed, uint64_t count) {
  std::vector<float> all(count);
  for (uint64_t i = 0; i < count; ++i) {
    const auto mixed = static_cast<uint32_t>((i * 2654435761u) ^ (seed * 40503u + 77u));
    all[i] = static_cast<float>(static_cast<int32_t>(mixed * 2246822519u)) * 0x1p-24f;
  }
  return all;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<float> Summed(Collective* collective, const Shape& shape, bool in_place) {
  const uint64_t count = shape.rows * shape.width;
  std::vector<float> in = Values(collective->rank(), count), out(in_place ? 0 : count);
  const std::vector<float> bias = Values(91, shape.width), residual = Values(92, count);
  float* to = in_place ? in.data() : out.data();
  collective->AllReduce({in.data(), to, bias.data(), in_place ? nullptr : residual.data(), shape.rows, shape.width}, 0,
                        1);
  return in_place ? in : out;
}

std::vector<float> Gathered(Collective* collective, const Shape& shape) {
  const uint64_t count = shape.rows * shape.width;
  const std::vector<float> in = Values(collective->rank(), count / collective->ranks_of_stage());
  std::vector<float> out(count);
  collective->AllGather({in.data(), out.data(), shape.rows, shape.width}, 0, 1);
  return out;
}

void TestBits(Group* group, const std::shared_ptr<llmc::Room>& room) {
  llmc::ShmCollective shm(room);
  const std::shared_ptr<Collective> mpi = group->NewCollective(group->num_ranks(), 0);
  for (const Shape& shape : kShapes) {
    for (const bool in_place : {false, true}) {
      CHECK(SameBits(Summed(mpi.get(), shape, in_place), Summed(&shm, shape, in_place)));
    }
    CHECK(SameBits(Gathered(mpi.get(), shape), Gathered(&shm, shape)));
  }
  CHECK_OK(mpi->status());
}

// Two sums on their way at a time, of which a later one is finished first; the transport gets turns in between.
void TestSumsBesideOthers(Group* group, const std::shared_ptr<llmc::Room>& room) {
  llmc::ShmCollective shm(room);
  const std::shared_ptr<Collective> mpi = group->NewCollective(group->num_ranks(), 0);
  CHECK(mpi->overlaps() && !shm.overlaps());
  constexpr Shape kLanes[] = {{1100, 1004}, {70, 1920}};
  std::vector<float> in[2], out[2];
  for (uint32_t lane = 0; lane < 2; ++lane) {
    const uint64_t count = kLanes[lane].rows * kLanes[lane].width;
    in[lane] = Values(10 * lane + mpi->rank(), count);
    out[lane].resize(count);
  }
  const auto sum = [&](uint32_t lane) {
    return llmc::Reduction{in[lane].data(), out[lane].data(), nullptr, nullptr, kLanes[lane].rows, kLanes[lane].width};
  };
  for (uint32_t turn = 0; turn < 4; ++turn) {
    for (const uint32_t lane : {0u, 1u}) mpi->BeginReduce(sum(lane), lane);
    for (uint32_t i = 0; i < turn * mpi->rank() * 100; ++i) mpi->Tend();
    for (const uint32_t lane : {1u, 0u}) mpi->FinishReduce(lane);
    for (const uint32_t lane : {0u, 1u}) {
      CHECK(mpi->Reduced(lane));
      const std::vector<float> found = std::exchange(out[lane], std::vector<float>(out[lane].size()));
      shm.AllReduce(sum(lane), 0, 1);
      CHECK(SameBits(found, out[lane]));
    }
  }
  CHECK_OK(mpi->status());
}

// Two stages of two ranks, of which the second hands back what the first has made.
void TestStages(Group* group, const std::shared_ptr<llmc::Room>& room) {
  llmc::ShmCollective shm(room, 2);
  const std::shared_ptr<Collective> mpi = group->NewCollective(2, kOutboxBytes);
  for (const Shape& shape : kShapes) {
    for (const bool in_place : {false, true}) {
      CHECK(SameBits(Summed(mpi.get(), shape, in_place), Summed(&shm, shape, in_place)));
    }
    CHECK(SameBits(Gathered(mpi.get(), shape), Gathered(&shm, shape)));
    const uint64_t count = shape.rows * shape.width;
    std::vector<float> data(count);
    if (mpi->stage() == 0) data = Values(mpi->rank(), count);
    // Both places are used again, while what lay there was only just taken.
    for (uint32_t turn = 0; turn < 4; ++turn) {
      for (const uint32_t stage : {0u, 1u}) mpi->PassOn({data.data(), count, stage, turn % 2 * kOutboxBytes / 2}, 0, 1);
    }
    CHECK(SameBits(data, Values(mpi->rank() % 2, count)));
  }
  CHECK_OK(mpi->status());
}

void TestSaying(Group* group) {
  for (const uint64_t length : {uint64_t{1}, uint64_t{3} << 20, uint64_t{0}, uint64_t{100}}) {
    std::string said(length, '\0'), heard(length, '\0');
    for (uint64_t i = 0; i < length; ++i) said[i] = static_cast<char>(i * 7 + length);
    if (group->rank() == 0) {
      CHECK_OK(group->Say(said.data(), length));
    } else {
      CHECK_OK(group->Hear(heard.data(), length, 1000));
      CHECK(heard == said);
    }
  }
}

// Ranks of the second stage hear nothing until rank 0 has said everything: it does not wait for them.
void TestSayingToStages(Group* group, const std::shared_ptr<llmc::Room>& room) {
  llmc::ShmCollective shm(room);
  const auto meet = [&shm] {
    float own = 0, all[4];
    shm.AllGather({&own, all, 1, 4}, 0, 1);
  };
  constexpr uint64_t kTimes = 3, kLength = 2u << 20;
  if (group->rank() > 1) meet();
  for (uint64_t i = 0; i < kTimes; ++i) {
    const std::string said(kLength, static_cast<char>('a' + i));
    if (group->rank() == 0) {
      CHECK_OK(group->Say(said.data(), kLength));
    } else {
      std::string heard(kLength, '\0');
      CHECK_OK(group->Hear(heard.data(), kLength, 1000));
      CHECK(heard == said);
    }
  }
  if (group->rank() <= 1) meet();
}

int RunRank(const char* library, const char* room_path) {
  std::shared_ptr<Group> group, second;
  CHECK(llmc::MpiGroup::Open("/nowhere/libmpi.so", 0, &second).message.find("LLMC_MPI_LIBRARY") != std::string::npos);
  CHECK_OK(llmc::MpiGroup::Open(library, 4, &group));
  CHECK(llmc::MpiGroup::Open(library, 4, &second).message.find("starts once") != std::string::npos);
  std::shared_ptr<llmc::Room> room;
  if (group->rank() == 0) CHECK_OK(llmc::Room::Open(room_path, 0, 4, &room));
  CHECK_OK(group->rank() == 0 ? group->AwaitLoaded() : group->TellLoaded());
  if (group->rank() != 0) CHECK_OK(llmc::Room::Open(room_path, group->rank(), 4, &room));
  TestBits(group.get(), room);
  TestSaying(group.get());
  TestSumsBesideOthers(group.get(), room);
  TestStages(group.get(), room);
  TestSaying(group.get());
  TestSayingToStages(group.get(), room);
  CHECK_OK(group->status());
  group->Leave();
  return llmc_test::Finish("mpi_group_test");
}

// The mpirun of this machine, with its library; an empty command if there is none.
struct Launcher {
  std::string command;
  const char* library = nullptr;
};

Launcher Find() {
  if (std::system("command -v mpirun > /dev/null") != 0) return {};
  const bool open = std::system("mpirun --version | grep -q 'Open MPI'") == 0;
  const std::vector<const char*> names =
      open ? std::vector<const char*>{"libmpi.so.40", "libmpi.so"} : std::vector{"libmpi.so.12", "libmpich.so.12"};
  for (const char* name : names) {
    if (::dlopen(name, RTLD_NOW | RTLD_LOCAL) == nullptr) continue;
    return {open ? "mpirun --oversubscribe --allow-run-as-root -n 4" : "mpirun -n 4", name};
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) return RunRank(argv[1], argv[2]);
  const Launcher launcher = Find();
  if (launcher.command.empty()) {
    std::printf("mpi_group_test: skipped, there is no MPI here\n");
    return 0;
  }
  char path[] = "/dev/shm/llmc_mpi_test_XXXXXX";
  const int fd = ::mkstemp(path);
  CHECK(fd >= 0);
  ::close(fd);
  const std::string command = launcher.command + " '" + argv[0] + "' " + launcher.library + " " + path;
  const int ended = std::system(command.c_str());
  ::unlink(path);
  return ended == 0 ? 0 : 1;
}
