#include "device/cpu/cpu_topology.h"

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "core/cgroup.h"
#include "support/check.h"
#include "support/fake_root.h"

namespace {

using Cpus = std::vector<int>;
using Folders = std::vector<std::string>;

class FakeMachine : public llmc_test::FakeRoot {
 public:
  FakeMachine& Siblings(const char* name, std::initializer_list<const char*> lists) {
    int cpu = 0;
    for (const char* list : lists) {
      Write("/sys/devices/system/cpu/cpu" + std::to_string(cpu++) + "/topology/" + name, std::string(list) + "\n");
    }
    return *this;
  }
  FakeMachine& Nodes(const std::string& online, std::initializer_list<const char*> lists) {
    Write("/sys/devices/system/node/online", online);
    int node = 0;
    for (const char* list : lists) {
      Write("/sys/devices/system/node/node" + std::to_string(node++) + "/cpulist", std::string(list) + "\n");
    }
    return *this;
  }
  llmc::CpuPlan Plan(const Cpus& allowed) const { return llmc::PlanCpus(allowed, root()); }
};

const char kV2Mount[] =
    "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const char kV1Mounts[] =
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";

void TestCpuList() {
  CHECK(llmc::ParseCpuList("0-3,8\n") == Cpus({0, 1, 2, 3, 8}));
  CHECK(llmc::ParseCpuList("5") == Cpus({5}));
  CHECK(llmc::ParseCpuList("").empty());
  CHECK(llmc::ParseCpuList("x").empty());
  CHECK(llmc::ParseCpuList("-1").empty());
  CHECK(llmc::ParseCpuList("3-1").empty());
  CHECK(llmc::ParseCpuList("1,4-").size() == 1);
  CHECK(llmc::ParseCpuList("0-99999999999").empty());
  CHECK(llmc::ParseCpuList("99999999999999999999").empty());
}

void TestQuotas() {
  CHECK_EQ(llmc::ParseCpuMax("max 100000\n"), 0u);
  CHECK_EQ(llmc::ParseCpuMax("200000 100000\n"), 2u);
  CHECK_EQ(llmc::ParseCpuMax("150000 100000\n"), 2u);
  CHECK_EQ(llmc::ParseCpuMax("1000 100000\n"), 1u);
  CHECK_EQ(llmc::ParseCpuMax(""), 0u);
  CHECK_EQ(llmc::ParseCpuMax("200000"), 0u);
  CHECK_EQ(llmc::ParseCpuMax("200000 0"), 0u);
  CHECK_EQ(llmc::ParseCpuMax("-5 100000"), 0u);
  CHECK_EQ(llmc::ParseCpuMax("99999999999999999999 1"), 0u);
  CHECK_EQ(llmc::ParseCpuMax("9223372036854775807 1"), 8192u);
  CHECK_EQ(llmc::ParseCfsQuota("-1\n", "100000\n"), 0u);
  CHECK_EQ(llmc::ParseCfsQuota("400000\n", "100000\n"), 4u);
  CHECK_EQ(llmc::ParseCfsQuota("50001\n", "50000\n"), 2u);
  CHECK_EQ(llmc::ParseCfsQuota("50000\n", ""), 0u);
}

void TestFolders() {
  // v2 and v1 cgroups with their parents; the v1 hierarchies of other controllers do not matter.
  CHECK(llmc::CgroupFolders("cpu", "0::/a/b\n", kV2Mount) ==
        Folders({"/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"}));
  CHECK(llmc::CgroupFolders("cpu", "5:cpuset:/x\n4:cpu,cpuacct:/a\n1:name=systemd:/y\n0::/z\n", kV1Mounts) ==
        Folders({"/sys/fs/cgroup/cpu,cpuacct/a", "/sys/fs/cgroup/cpu,cpuacct"}));
  CHECK(llmc::CgroupFolders("cpu", "0::/\n", kV2Mount) == Folders({"/sys/fs/cgroup"}));
  // A container without a cgroup namespace sees the host's path and a mount of its own part of the tree.
  const std::string bind = "30 23 0:26 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
  CHECK(llmc::CgroupFolders("cpu", "0::/docker/c1\n", bind) == Folders({"/sys/fs/cgroup"}));
  CHECK(llmc::CgroupFolders("cpu", "0::/docker/c1/sub\n", bind) == Folders({"/sys/fs/cgroup/sub", "/sys/fs/cgroup"}));
  CHECK(llmc::CgroupFolders("cpu", "0::/docker/c12\n", bind) == Folders({"/sys/fs/cgroup"}));
  CHECK(llmc::CgroupFolders("cpu", "0::/elsewhere\n", bind) == Folders({"/sys/fs/cgroup"}));
  CHECK(llmc::CgroupFolders("cpu", "0::/../sibling\n", kV2Mount) == Folders({"/sys/fs/cgroup"}));
  CHECK(llmc::CgroupFolders("cpu", "0::/a\n", "30 23 0:26 / /with\\040space rw - cgroup2 c rw\n") ==
        Folders({"/with space/a", "/with space"}));
  CHECK(llmc::CgroupFolders("cpu", "", "").empty());
  CHECK(llmc::CgroupFolders("cpu", "nonsense\n:\n", "more nonsense\n - cgroup2\n").empty());
}

void TestQuotaOnThePath() {
  FakeMachine v2;
  v2.Self("0::/pod/box\n", kV2Mount).Write("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
  CHECK_EQ(v2.Plan({0, 1, 2, 3}).quota, 0u);
  v2.Write("/sys/fs/cgroup/pod/box/cpu.max", "350000 100000\n");
  CHECK_EQ(v2.Plan({0, 1, 2, 3, 4, 5}).quota, 4u);
  v2.Write("/sys/fs/cgroup/pod/cpu.max", "200000 100000\n");  // the parent's limit is tighter
  const llmc::CpuPlan plan = v2.Plan({0, 1, 2, 3});
  CHECK_EQ(plan.quota, 2u);
  CHECK_EQ(plan.num_threads(), 2u);
  CHECK_EQ(plan.num_running(), 2u);
  CHECK(plan.quota_binds());
  CHECK_EQ(plan.cpus.size(), 4u);
  CHECK(!v2.Plan({0, 1}).quota_binds());
  CHECK_EQ(v2.Plan({5}).num_threads(), 1u);

  FakeMachine v1;
  v1.Self("4:cpu,cpuacct:/a/b\n0::/\n", kV1Mounts);
  v1.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  v1.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  v1.Write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n");
  v1.Write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  v1.Write("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "300000\n");
  v1.Write("/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n");
  CHECK_EQ(v1.Plan({0, 1, 2, 3}).quota, 1u);
  CHECK_EQ(v1.Plan({0, 1, 2, 3}).num_threads(), 1u);
}

void TestSiblings() {
  FakeMachine smt;  // four cores of two threads, numbered as most x86 machines do
  smt.Siblings("core_cpus_list", {"0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"});
  llmc::CpuPlan plan = smt.Plan({0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(plan.cpus == Cpus({0, 1, 2, 3, 4, 5, 6, 7}));
  CHECK_EQ(plan.num_cores, 4u);
  CHECK_EQ(plan.num_threads(), 4u);
  CHECK_EQ(plan.num_running(), 8u);
  plan = smt.Plan({0, 1, 4, 6});  // the mask decides: CPU 6 stands for its core, 4 is a second thread
  CHECK(plan.cpus == Cpus({0, 1, 6, 4}));
  CHECK_EQ(plan.num_cores, 3u);
  CHECK_EQ(smt.Plan({3, 7}).num_threads(), 1u);

  FakeMachine adjacent;  // numbered core by core, by the older file name
  adjacent.Siblings("thread_siblings_list", {"0-1", "0-1", "2-3", "2-3"});
  plan = adjacent.Plan({0, 1, 2, 3});
  CHECK(plan.cpus == Cpus({0, 2, 1, 3}));
  CHECK_EQ(plan.num_threads(), 2u);

  FakeMachine odd;  // no topology, an empty file, a list without the CPU itself: cores of their own
  odd.Siblings("core_cpus_list", {"", "7", "garbage"});
  plan = odd.Plan({0, 1, 2, 3});
  CHECK(plan.cpus == Cpus({0, 1, 2, 3}));
  CHECK_EQ(plan.num_threads(), 4u);
  CHECK(odd.Plan({}).num_threads() >= 1u);  // unknown affinity
}

// Cores of one node before those of the next, and so their siblings, however CPUs are numbered.
void TestNodes() {
  FakeMachine alternating;
  alternating.Nodes("0-1\n", {"0,2,4,6", "1,3,5,7"});
  llmc::CpuPlan plan = alternating.Plan({0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(plan.cpus == Cpus({0, 2, 4, 6, 1, 3, 5, 7}));
  CHECK_EQ(plan.num_threads(), 8u);
  CHECK(alternating.Plan({1, 2, 3}).cpus == Cpus({2, 1, 3}));
  alternating.Siblings("core_cpus_list", {"0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"});
  plan = alternating.Plan({0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(plan.cpus == Cpus({0, 2, 1, 3, 4, 6, 5, 7}));
  CHECK_EQ(plan.num_threads(), 4u);

  FakeMachine usual;
  usual.Nodes("0-1\n", {"0-1,4-5", "2-3,6-7"});
  CHECK(usual.Plan({0, 1, 2, 3, 4, 5, 6, 7}).cpus == Cpus({0, 1, 4, 5, 2, 3, 6, 7}));
  usual.Siblings("core_cpus_list", {"0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"});
  CHECK(usual.Plan({0, 1, 2, 3, 4, 5, 6, 7}).cpus == Cpus({0, 1, 2, 3, 4, 5, 6, 7}));

  // By the node's number, with one that is offline and one of memory alone; CPUs of no node come last.
  FakeMachine odd;
  odd.Nodes("0,2-3\n", {"3", "0-3", "", "0,1,3"});
  CHECK(odd.Plan({0, 1, 2, 3}).cpus == Cpus({3, 0, 1, 2}));
  CHECK(llmc::NodeCpus(odd.root()) == (std::map<int, Cpus>{{0, {3}}, {2, {}}, {3, {0, 1, 3}}}));
  odd.Nodes("none\n", {"3"});
  CHECK(odd.Plan({0, 1, 2, 3}).cpus == Cpus({0, 1, 2, 3}));
  CHECK(llmc::NodeCpus(odd.root()).empty());
}

void TestThisMachine() {
  const llmc::CpuPlan plan = llmc::PlanCpus();
  CHECK(plan.num_threads() >= 1 && plan.num_threads() <= plan.num_running());
  CHECK(plan.num_cores <= plan.cpus.size());
}

}  // namespace

int main() {
  TestCpuList();
  TestQuotas();
  TestFolders();
  TestQuotaOnThePath();
  TestSiblings();
  TestNodes();
  TestThisMachine();
  return llmc_test::Finish("cpu_topology_test");
}
