#include "core/memory_limit.h"

#include <string>

#include "support/check.h"
#include "support/fake_root.h"

namespace {

using llmc::AvailableMemory;

constexpr uint64_t kGiB = 1ull << 30;
const char kV2Mount[] = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
const char kV1Mount[] = "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

class FakeMachine : public llmc_test::FakeRoot {
 public:
  FakeMachine() { Write("/proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nCached: 1 kB\n"); }
  void Limit(const std::string& folder, const std::string& limit, uint64_t used, const std::string& stat) {
    Write("/sys/fs/cgroup" + folder + "/memory.max", limit + "\n");
    Write("/sys/fs/cgroup" + folder + "/memory.current", std::to_string(used) + "\n");
    Write("/sys/fs/cgroup" + folder + "/memory.stat", stat);
  }
  void LimitV1(const std::string& folder, const std::string& limit, uint64_t used, const std::string& stat) {
    Write("/sys/fs/cgroup/memory" + folder + "/memory.limit_in_bytes", limit + "\n");
    Write("/sys/fs/cgroup/memory" + folder + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    Write("/sys/fs/cgroup/memory" + folder + "/memory.stat", stat);
  }
};

void TestMachine() {
  FakeMachine machine;
  CHECK_EQ(AvailableMemory(machine.root()), 8 * kGiB);
  machine.Write("/proc/meminfo", "MemTotal: 16 kB\n");
  CHECK_EQ(AvailableMemory(machine.root()), 0u);
  machine.Write("/proc/meminfo", "MemAvailable: much\n");
  CHECK_EQ(AvailableMemory(machine.root()), 0u);
  CHECK_EQ(AvailableMemory(machine.root() + "/nowhere"), 0u);
  CHECK(AvailableMemory() > 0);
}

void TestV2() {
  FakeMachine machine;
  machine.Self("0::/a/b\n", kV2Mount);
  CHECK_EQ(AvailableMemory(machine.root()), 8 * kGiB);
  machine.Limit("/a", "max", 3, "");
  CHECK_EQ(AvailableMemory(machine.root()), 8 * kGiB);
  machine.Limit("/a", std::to_string(6 * kGiB), kGiB, "");
  CHECK_EQ(AvailableMemory(machine.root()), 5 * kGiB);
  const std::string gib = std::to_string(kGiB);
  machine.Limit("/a/b", std::to_string(4 * kGiB), 3 * kGiB,
                "inactive_file " + gib + "\nanon 7\nactive_file " + gib + "\nworkingset_active_file 9\n");
  CHECK_EQ(AvailableMemory(machine.root()), 3 * kGiB);
  machine.Limit("/a/b", gib, 2 * kGiB, "");
  CHECK_EQ(AvailableMemory(machine.root()), 0u);
  machine.Limit("/a/b", gib, kGiB / 2, "active_file " + gib + "\n");  // counted at different moments
  CHECK_EQ(AvailableMemory(machine.root()), kGiB);
}

void TestV1() {
  FakeMachine machine;
  machine.Self("4:memory:/a\n0::/z\n", kV1Mount);
  machine.LimitV1("", "9223372036854771712", 5 * kGiB, "");
  CHECK_EQ(AvailableMemory(machine.root()), 8 * kGiB);
  machine.LimitV1("/a", std::to_string(2 * kGiB), kGiB,
                  "inactive_file 5\ntotal_inactive_file 512\ntotal_active_file 512\n");
  CHECK_EQ(AvailableMemory(machine.root()), kGiB + 1024);
}

}  // namespace

int main() {
  TestMachine();
  TestV2();
  TestV1();
  return llmc_test::Finish("memory_limit_test");
}
