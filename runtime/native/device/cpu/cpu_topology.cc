#include "device/cpu/cpu_topology.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <string_view>
#include <thread>

#include "core/cgroup.h"
#include "device/cpu/cpu_pin.h"

namespace llmc {
namespace {

// Parses the integer that `text` starts with and moves `text` past it. False if there is none or it overflows.
bool TakeInt(std::string_view* text, int64_t* value) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *value);
  if (error != std::errc()) return false;
  text->remove_prefix(static_cast<std::size_t>(end - text->data()));
  return true;
}

uint32_t CpusOf(int64_t quota_us, int64_t period_us) {
  if (quota_us <= 0 || period_us <= 0) return 0;
  const int64_t cpus = quota_us / period_us + (quota_us % period_us != 0);
  return static_cast<uint32_t>(std::min<int64_t>(cpus, kMaxCpus));
}

uint32_t CgroupQuota(const std::string& root) {
  uint32_t tightest = 0;
  for (const std::string& folder : CgroupFolders("cpu", root)) {
    const std::string path = root + folder;
    for (const uint32_t limit :
         {ParseCpuMax(ReadText(path + "/cpu.max")),
          ParseCfsQuota(ReadText(path + "/cpu.cfs_quota_us"), ReadText(path + "/cpu.cfs_period_us"))}) {
      if (limit != 0 && (tightest == 0 || limit < tightest)) tightest = limit;
    }
  }
  return tightest;
}

// Rank of each CPU among the allowed ones of its core; CPUs without topology files are cores of their own.
std::vector<int> SiblingRanks(const std::vector<int>& allowed, const std::string& root) {
  std::map<int, int> seen;  // first sibling of a core → allowed CPUs of it so far
  std::vector<int> ranks;
  for (const int cpu : allowed) {
    const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::vector<int> siblings = ParseCpuList(ReadText(folder + "core_cpus_list"));
    if (siblings.empty()) siblings = ParseCpuList(ReadText(folder + "thread_siblings_list"));  // before Linux 5.3
    const bool valid = std::find(siblings.begin(), siblings.end(), cpu) != siblings.end();
    ranks.push_back(seen[valid ? siblings.front() : cpu]++);
  }
  return ranks;
}

// Memory node of each CPU: the first node that lists it.
std::map<int, int> CpuNodes(const std::string& root) {
  std::map<int, int> nodes;
  for (const auto& [node, cpus] : NodeCpus(root)) {
    for (const int cpu : cpus) nodes.emplace(cpu, node);
  }
  return nodes;
}

std::vector<int> AffinityCpus() {
  CpuMask mask;
  std::vector<int> cpus;
  if (!GetAffinity(&mask)) return cpus;
  for (int cpu = 0; cpu < kMaxCpus; ++cpu) {
    if (llmc::Contains(mask, cpu)) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

uint32_t CpuPlan::num_running() const {
  const uint32_t count = cpus.empty() ? num_cores : static_cast<uint32_t>(cpus.size());
  return quota != 0 && quota < count ? quota : count;
}

std::vector<int> ParseCpuList(const std::string& text) {
  std::vector<int> cpus;
  for (std::string_view rest = text;;) {
    int64_t first = 0, last = 0;
    if (!TakeInt(&rest, &first)) return cpus;
    last = first;
    if (!rest.empty() && rest[0] == '-') {
      rest.remove_prefix(1);
      if (!TakeInt(&rest, &last)) return cpus;
    }
    if (first < 0 || last < first || last >= kMaxCpus) return cpus;
    for (int64_t cpu = first; cpu <= last; ++cpu) cpus.push_back(static_cast<int>(cpu));
    if (rest.empty() || rest[0] != ',') return cpus;
    rest.remove_prefix(1);
  }
}

uint32_t ParseCpuMax(const std::string& text) {
  std::string_view rest = text;
  int64_t quota = 0, period = 0;
  if (!TakeInt(&rest, &quota) || rest.empty() || rest[0] != ' ') return 0;  // "max" is no number
  rest.remove_prefix(1);
  return TakeInt(&rest, &period) ? CpusOf(quota, period) : 0;
}

uint32_t ParseCfsQuota(const std::string& quota, const std::string& period) {
  std::string_view quota_text = quota, period_text = period;
  int64_t quota_us = 0, period_us = 0;
  return TakeInt(&quota_text, &quota_us) && TakeInt(&period_text, &period_us) ? CpusOf(quota_us, period_us) : 0;
}

std::map<int, std::vector<int>> NodeCpus(const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node/";
  std::map<int, std::vector<int>> nodes;
  for (const int node : ParseCpuList(ReadText(folder + "online"))) {
    nodes[node] = ParseCpuList(ReadText(folder + "node" + std::to_string(node) + "/cpulist"));
  }
  return nodes;
}

CpuPlan PlanCpus(const std::vector<int>& allowed, const std::string& root) {
  CpuPlan plan;
  try {
    const std::vector<int> ranks = SiblingRanks(allowed, root);
    const std::map<int, int> nodes = CpuNodes(root);
    std::vector<std::array<int, 3>> order;  // rank, node, CPU
    for (std::size_t i = 0; i < allowed.size(); ++i) {
      const auto node = nodes.find(allowed[i]);
      order.push_back({ranks[i], node == nodes.end() ? kMaxCpus : node->second, allowed[i]});
    }
    std::sort(order.begin(), order.end());
    for (const std::array<int, 3>& cpu : order) plan.cpus.push_back(cpu[2]);
    if (!ranks.empty()) plan.num_cores = static_cast<uint32_t>(std::count(ranks.begin(), ranks.end(), 0));
    plan.quota = CgroupQuota(root);
  } catch (const std::exception&) {  // out of memory: a team that is not tuned still runs
    plan.cpus.clear();
  }
  if (plan.cpus.empty()) plan.num_cores = std::max(1u, std::thread::hardware_concurrency());
  return plan;
}

CpuPlan PlanCpus() {
  std::vector<int> allowed;
  try {
    allowed = AffinityCpus();
  } catch (const std::exception&) {  // as above
  }
  return PlanCpus(allowed, "");
}

}  // namespace llmc
