// Ranks that add up, gather and pass on in shared memory: the same bits for any number of rows and threads, and no hang when one
// of them ends.
#include "collective/shm_collective.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/channel.h"
#include "support/check.h"

namespace {

using llmc::Room;

// A file of memory that lives as long as this.
class Memory {
 public:
  Memory() : fd_(::memfd_create("llmc_test", 0)) { CHECK(fd_ >= 0); }
  ~Memory() { ::close(fd_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

// Threads of a rank meet, as those of a team do between two commands.
class Meeting {
 public:
  explicit Meeting(uint32_t size) : size_(size) {}
  void Wait() {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    while (round_.load(std::memory_order_acquire) == round) std::this_thread::yield();
  }

 private:
  uint32_t size_;
  std::atomic<uint32_t> arrived_{0}, round_{0};
};

constexpr uint64_t kOutboxBytes = 1u << 20;

// One thread or more of each rank; every rank's threads are its number modulo 2 and one more.
struct Ranks {
  Memory memory;
  std::vector<std::shared_ptr<Room>> rooms;
  std::vector<std::unique_ptr<llmc::ShmCollective>> collectives;

  // ranks_of_stage: 0 for all.
  explicit Ranks(uint32_t count, uint32_t ranks_of_stage = 0) {
    rooms.resize(count);
    CHECK_OK(Room::Open(memory.path(), 0, count, &rooms[0]));
    // Of one mapping, so that a sanitizer sees who touches the same bytes.
    for (uint32_t r = 1; r < count; ++r) CHECK_OK(Room::Join(rooms[0], r, &rooms[r]));
    for (const auto& room : rooms) {
      CHECK_OK(room->MakeOutboxes(kOutboxBytes));
      collectives.push_back(std::make_unique<llmc::ShmCollective>(room, ranks_of_stage));
    }
  }
  template <typename Body>
  void Run(const Body& body) {
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<Meeting>> meetings;
    for (uint32_t r = 0; r < rooms.size(); ++r) {
      const uint32_t team = 1 + r % 2;
      meetings.push_back(std::make_unique<Meeting>(team));
      for (uint32_t t = 0; t < team; ++t) {
        threads.emplace_back([&body, r, t, team, this, meeting = meetings[r].get()] {
          body(r, t, team, collectives[r].get(), meeting);
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
};

float Value(uint32_t rank, uint64_t i) {
  const auto mixed = static_cast<uint32_t>((i * 2654435761u) ^ (rank * 40503u + 77u));
  return static_cast<float>(static_cast<int32_t>(mixed * 2246822519u)) * 0x1p-24f;
}

std::vector<float> Values(uint32_t rank, uint64_t count) {
  std::vector<float> all(count);
  for (uint64_t i = 0; i < count; ++i) all[i] = Value(rank, i);
  return all;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Shape {
  uint64_t rows, width;
};
constexpr Shape kShapes[] = {{1, 12}, {3, 1000}, {1, 0}, {17, 1236}, {0, 64}, {70, 1920}, {2, 36}, {1, 12}};

// Sums in the order of ranks, whichever of the ways a message of that size takes, in place and with what is added.
void TestSums(uint32_t num_ranks) {
  Ranks ranks(num_ranks);
  for (const bool in_place : {false, true}) {
    std::vector<std::vector<float>> in, out;
    std::vector<float> want;
    uint64_t most = 0;
    for (const Shape& shape : kShapes) most = std::max(most, shape.rows * shape.width);
    const std::vector<float> bias = Values(91, 2000), residual = Values(92, most);
    for (uint32_t r = 0; r < num_ranks; ++r) in.push_back(Values(r, most)), out.emplace_back(most);
    std::vector<std::vector<std::vector<float>>> results(num_ranks);
    ranks.Run([&](uint32_t r, uint32_t t, uint32_t team, llmc::ShmCollective* collective, Meeting* meeting) {
      for (const Shape& shape : kShapes) {
        const uint64_t count = shape.rows * shape.width;
        if (t == 0) in[r] = Values(r, most);
        meeting->Wait();
        float* to = in_place ? in[r].data() : out[r].data();
        const bool adds = shape.rows != 3;
        collective->AllReduce(
            {in[r].data(), to, adds ? bias.data() : nullptr, adds ? residual.data() : nullptr, shape.rows, shape.width},
            t, team);
        meeting->Wait();
        if (t == 0) results[r].emplace_back(to, to + count);
        meeting->Wait();
      }
    });
    for (size_t s = 0; s < std::size(kShapes); ++s) {
      const Shape& shape = kShapes[s];
      want.resize(shape.rows * shape.width);
      for (uint64_t i = 0; i < want.size(); ++i) {
        want[i] = Value(0, i);
        for (uint32_t r = 1; r < num_ranks; ++r) want[i] += Value(r, i);
        if (shape.rows != 3) want[i] += bias[i % shape.width], want[i] += residual[i];
      }
      for (uint32_t r = 0; r < num_ranks; ++r) CHECK(SameBits(results[r][s], want));
    }
  }
}

void TestGathers(uint32_t num_ranks) {
  Ranks ranks(num_ranks);
  std::vector<std::vector<float>> in, out;
  constexpr uint64_t kRows = 70;
  const uint64_t width = 1201, whole = width * num_ranks;
  for (uint32_t r = 0; r < num_ranks; ++r) in.push_back(Values(r, kRows * width)), out.emplace_back(kRows * whole);
  ranks.Run([&](uint32_t r, uint32_t t, uint32_t team, llmc::ShmCollective* collective, Meeting* meeting) {
    for (const uint64_t rows : {uint64_t{1}, kRows}) {
      collective->AllGather({in[r].data(), out[r].data(), rows, whole}, t, team);
      meeting->Wait();
    }
  });
  std::vector<float> want(kRows * whole);
  for (uint64_t i = 0; i < want.size(); ++i) {
    want[i] = Value(static_cast<uint32_t>(i % whole / width), i / whole * width + i % width);
  }
  for (uint32_t r = 0; r < num_ranks; ++r) CHECK(SameBits(out[r], want));
}

// Stages of two ranks sum and gather among themselves, and hand on what they have, back to the first stage.
void TestStages(uint32_t num_stages) {
  constexpr uint32_t kEach = 2;
  Ranks ranks(num_stages * kEach, kEach);
  constexpr uint64_t kMost = 150000;  // in three pieces
  for (const uint64_t count : {uint64_t{5}, uint64_t{0}, kMost}) {
    std::vector<std::vector<float>> data(ranks.rooms.size()), sums, gathered;
    for (uint32_t r = 0; r < data.size(); ++r) {
      data[r] = r < kEach ? Values(r, count) : std::vector<float>(count);
      sums.emplace_back(count), gathered.emplace_back(2 * count);
    }
    ranks.Run([&](uint32_t r, uint32_t t, uint32_t team, llmc::ShmCollective* collective, Meeting* meeting) {
      CHECK(collective->stage() == r / kEach && collective->num_stages() == num_stages);
      for (uint32_t stage = 0; stage < num_stages; ++stage) {
        if (stage == collective->stage()) {
          collective->AllReduce({data[r].data(), sums[r].data(), nullptr, nullptr, 1, count}, t, team);
          meeting->Wait();
          collective->AllGather({data[r].data(), gathered[r].data(), 1, 2 * count}, t, team);
          meeting->Wait();
        }
        collective->PassOn({data[r].data(), count, stage, 128}, t, team);
        meeting->Wait();
      }
    });
    for (uint32_t r = 0; r < data.size(); ++r) {
      CHECK(SameBits(data[r], Values(r % kEach, count)));
      for (uint64_t i = 0; i < count; ++i) {
        if (sums[r][i] != Value(0, i) + Value(1, i) || gathered[r][count + i] != Value(1, i)) {
          CHECK(false);
          break;
        }
      }
    }
  }
}

// A rank gives without waiting for anybody, also in a ring in which nobody takes yet. Places are used again.
void TestGivesWaitForNobody() {
  constexpr uint64_t kCounts[] = {70000, 0, 3};  // the first in two pieces
  Ranks ranks(3, 1);
  const auto pass = [&](uint32_t rank, uint32_t stage, uint64_t i, std::vector<float>* data) {
    ranks.collectives[rank]->PassOn({data->data(), kCounts[i], stage, i * 300032}, 0, 1);
  };
  for (uint32_t round = 0; round < 2; ++round) {
    const auto value = [&](uint32_t stage, uint64_t i) { return Values(10 * round + stage, kCounts[i]); };
    for (uint32_t stage = 0; stage < 3; ++stage) {
      for (uint64_t i = 0; i < std::size(kCounts); ++i) {
        std::vector<float> data = value(stage, i);
        pass(stage, stage, i, &data);
      }
    }
    for (uint32_t stage = 0; stage < 3; ++stage) {
      for (uint64_t i = 0; i < std::size(kCounts); ++i) {
        std::vector<float> data(kCounts[i]);
        pass((stage + 1) % 3, stage, i, &data);
        CHECK(SameBits(data, value(stage, i)));
      }
    }
  }
}

// What lies in an outbox is not written over before it was taken.
void TestAPlaceThatIsTaken() {
  constexpr uint64_t kCount = 70000;
  Ranks ranks(2, 1);
  std::vector<float> data[2];  // of a rank
  ranks.Run([&](uint32_t r, uint32_t t, uint32_t team, llmc::ShmCollective* collective, Meeting* meeting) {
    for (uint32_t i = 0; i < 40; ++i) {
      if (t == 0) data[r] = r == 0 ? Values(i, kCount) : std::vector<float>(kCount);
      meeting->Wait();
      collective->PassOn({data[r].data(), kCount, 0, i % 2 * 300032}, t, team);
      meeting->Wait();
      if (r == 1 && t == 0) CHECK(SameBits(data[r], Values(i, kCount)));
    }
  });
}

// Messages of all lengths, some longer than the channel, arrive as they were said.
void TestChannel() {
  Ranks ranks(3);
  const std::vector<uint64_t> lengths = {1, 64, 65, 3u << 20, 7, llmc::kChannelBytes, 100000};
  std::atomic<int> right{0};
  ranks.Run([&](uint32_t r, uint32_t t, uint32_t, llmc::ShmCollective*, Meeting*) {
    if (t != 0) return;
    llmc::Speaker speaker(ranks.rooms[r]);
    llmc::Listener listener(ranks.rooms[r]);
    for (int round = 0; round < 3; ++round) {
      for (const uint64_t length : lengths) {
        std::string said(length, '\0'), heard(length, '\0');
        for (uint64_t i = 0; i < length; ++i) said[i] = static_cast<char>(i * 7 + length);
        if (r == 0) {
          CHECK_OK(speaker.Say(said.data(), length));
        } else {
          CHECK_OK(listener.Hear(heard.data(), length, 1000));
          right += heard == said ? 1 : 0;
        }
      }
    }
  });
  CHECK_EQ(right.load(), 2 * 3 * static_cast<int>(lengths.size()));
}

// Who waits for a rank whose process was killed is told which it was.
void TestAProcessThatEnds() {
  Memory memory;
  std::shared_ptr<Room> room;
  CHECK_OK(Room::Open(memory.path(), 0, 2, &room));
  const pid_t child = ::fork();
  if (child == 0) {
    std::shared_ptr<Room> own;
    const bool entered = Room::Open(memory.path(), 1, 0, &own).ok();
    own->own().loaded.Set(1);
    ::_exit(entered ? 0 : 1);  // without leaving
  }
  CHECK(room->Await(&room->member(1).loaded, 1, 0));
  llmc::ShmCollective collective(room);
  std::vector<float> data(100, 1.0f);
  collective.AllReduce({data.data(), data.data(), nullptr, nullptr, 1, 100}, 0, 1);
  const std::string why = collective.status().message;
  CHECK(why.find("Rank 1 of 2 has failed: its process " + std::to_string(child) + " is gone") == 0);
  // From then on nothing waits.
  collective.AllGather({data.data(), data.data(), 1, 100}, 0, 1);
  CHECK(!llmc::Speaker(room).Say("x", 1).ok());
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

void TestWhatARoomRefuses() {
  Memory memory;
  std::shared_ptr<Room> first, second;
  CHECK(Room::Open(memory.path(), 1, 2, &second).message.find("rank 0 opens it first") != std::string::npos);
  CHECK(Room::Open(memory.path(), 0, 300, &second).message.find("use 1 to 256") != std::string::npos);
  CHECK_OK(Room::Open(memory.path(), 0, 2, &first));
  CHECK(Room::Open(memory.path(), 0, 2, &second).message.find("has a rank 0 already") != std::string::npos);
  CHECK(Room::Open(memory.path(), 2, 0, &second).message.find("memory of 2 ranks") != std::string::npos);
  CHECK(Room::Join(first, 0, &second).message.find("Rank 0 is there already") != std::string::npos);
  CHECK(Room::Open("/nowhere", 1, 2, &second).code == LLMC_ERR_IO);
  CHECK(!Room::Report(memory.path(), 2, "why").ok());
  CHECK_OK(Room::Report(memory.path(), 1, "killed by signal 9"));
  CHECK_OK(Room::Report(memory.path(), 0, "later"));
  CHECK(first->status().message == "Rank 1 of 2 has failed: killed by signal 9; start anew.");
}

// As many bytes as a file may have are too few: for the room itself, then for what ranks pass on.
void TestMemoryThatDoesNotGrow() {
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_IGN);
  Memory memory;
  std::shared_ptr<Room> room;
  rlimit few = {4096, before.rlim_max};
  CHECK_EQ(::setrlimit(RLIMIT_FSIZE, &few), 0);
  const llmc::Status small = Room::Open(memory.path(), 0, 2, &room);
  CHECK(small.code == LLMC_ERR_IO);
  CHECK(small.message == "The ranks' shared memory " + memory.path() +
                             " cannot be used: File too large; is there enough shared memory, and was it passed on?");
  few.rlim_cur = 64u << 20;
  CHECK_EQ(::setrlimit(RLIMIT_FSIZE, &few), 0);
  CHECK_OK(Room::Open(memory.path(), 0, 2, &room));
  const llmc::Status large = room->MakeOutboxes(64u << 20);
  CHECK(large.code == LLMC_ERR_OUT_OF_MEMORY);
  CHECK(large.message ==
        "the ranks' shared memory does not grow by 134217728 bytes for what they pass on: File too large");
  CHECK_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  CHECK_OK(room->MakeOutboxes(1u << 20));
}

}  // namespace

int main() {
  TestAProcessThatEnds();
  for (const uint32_t num_ranks : {1u, 2u, 3u, 4u}) {
    TestSums(num_ranks);
    TestGathers(num_ranks);
  }
  for (const uint32_t num_stages : {2u, 3u}) TestStages(num_stages);
  TestGivesWaitForNobody();
  TestAPlaceThatIsTaken();
  TestChannel();
  TestWhatARoomRefuses();
  TestMemoryThatDoesNotGrow();
  return llmc_test::Finish("shm_collective_test");
}
