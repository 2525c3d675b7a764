// CPUs that this process may use: affinity mask, SMT siblings, memory nodes and cgroup quotas.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace llmc {

struct CpuPlan {
  // CPUs of the affinity mask: one per physical core first, then their siblings, each grouped by memory node. So a team
  // smaller than the machine has near memory and fast barriers, however the CPUs are numbered.
  std::vector<int> cpus;
  uint32_t num_cores = 1;    // physical cores among them, at least 1
  uint32_t quota = 0;        // CPUs' worth of time the cgroups grant, rounded up; 0: no limit

  // Threads for compute-bound work: one per physical core, but at most as many as the quota keeps running.
  uint32_t num_threads() const { return quota != 0 && quota < num_cores ? quota : num_cores; }
  // Threads that can run at the same time; a larger team should not spin at barriers.
  uint32_t num_running() const;
  // With a binding quota pinning does harm: containers of one machine would crowd onto its first CPUs. The scheduler
  // could not move a thread off a CPU that another container uses.
  bool quota_binds() const { return quota != 0 && quota < cpus.size(); }
};

// The plan for the CPUs of the calling thread's affinity mask. Never throws; an unreadable limit counts as none.
CpuPlan PlanCpus();
// The same for given CPUs (ascending), with the files of /proc/self and /sys read below `root`.
CpuPlan PlanCpus(const std::vector<int>& allowed, const std::string& root);

// CPUs of each online memory node, by node number; empty if /sys below `root` does not tell. Memory-only nodes have no
// CPUs.
std::map<int, std::vector<int>> NodeCpus(const std::string& root);

// Parsers of file contents. "0-3,8" → 0 1 2 3 8; malformed text ends the list.
std::vector<int> ParseCpuList(const std::string& text);
// CPUs granted by cpu.max (cgroup v2: "200000 100000", "max 100000"), rounded up; 0: no limit or malformed.
uint32_t ParseCpuMax(const std::string& text);
// The same from cpu.cfs_quota_us (-1: no limit) and cpu.cfs_period_us (cgroup v1).
uint32_t ParseCfsQuota(const std::string& quota, const std::string& period);

}  // namespace llmc
