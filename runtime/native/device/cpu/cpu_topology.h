// Which CPUs this process may use: affinity mask, SMT siblings, memory nodes and cgroup quotas.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace llmc {

struct CpuPlan {
  // CPUs of the affinity mask: one of each physical core first, then their siblings, both memory node by memory node: a
  // team smaller than the machine has near memory and barriers, however its CPUs are numbered.
  std::vector<int> cpus;
  uint32_t num_cores = 1;    // physical cores among them, at least 1
  uint32_t quota = 0;        // CPUs' worth of time the cgroups grant, rounded up; 0: no limit

  // Threads for compute-bound work: one for each physical core, but no more than the quota keeps running.
  uint32_t num_threads() const { return quota != 0 && quota < num_cores ? quota : num_cores; }
  // Threads that can run at the same time; more of them should not spin for one another.
  uint32_t num_running() const;
  // Below a quota, pinning does harm: containers of one machine would crowd onto its first CPUs, and the scheduler
  // could not move a thread off a CPU that another container is using.
  bool quota_binds() const { return quota != 0 && quota < cpus.size(); }
};

// The plan for the CPUs of the calling thread's affinity mask. Never throws; what cannot be read is no limit.
CpuPlan PlanCpus();
// The same for given CPUs (ascending), with the files of /proc/self and /sys read below `root`.
CpuPlan PlanCpus(const std::vector<int>& allowed, const std::string& root);

// CPUs of each online memory node, by the node's number; no node where /sys below `root` does not tell. Nodes of memory
// alone have no CPUs.
std::map<int, std::vector<int>> NodeCpus(const std::string& root);

// The parts, from file contents. "0-3,8" → 0 1 2 3 8; what is malformed ends the list.
std::vector<int> ParseCpuList(const std::string& text);
// CPUs granted by cpu.max (cgroup v2: "200000 100000", "max 100000"), rounded up; 0: no limit or malformed.
uint32_t ParseCpuMax(const std::string& text);
// The same from cpu.cfs_quota_us (-1: no limit) and cpu.cfs_period_us (cgroup v1).
uint32_t ParseCfsQuota(const std::string& quota, const std::string& period);

}  // namespace llmc
