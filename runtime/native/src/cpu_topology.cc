#include "cpu_topology.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <map>
#include <sstream>
#include <string_view>
#include <thread>

#include "cpu_pin.h"

namespace llmc {
namespace {

// Empty when the file does not exist or cannot be read. These files are short.
std::string ReadText(const std::string& path) {
  std::string text;
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return text;
  char buffer[4096];
  for (std::size_t got; (got = std::fread(buffer, 1, sizeof(buffer), file)) > 0;) text.append(buffer, got);
  std::fclose(file);
  return text;
}

// The integer that `text` starts with, moved past it. False when there is none or it overflows.
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

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool Contains(const std::string& list, const char* name) {
  const std::vector<std::string> parts = Split(list, ',');
  return std::find(parts.begin(), parts.end(), name) != parts.end();
}

// mountinfo writes space, tab, newline and backslash as \ooo.
std::string Unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    int value = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 4, value, 8).ptr == text.data() + i + 4) {
      out += static_cast<char>(value);
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

struct Mount {
  std::string root, point;  // the directory of the hierarchy that is mounted, and where
};

// `path` relative to the mounted directory, starting with '/' or empty. A cgroup outside of it (seen through a
// namespace) counts as the mounted directory itself.
std::string BelowMount(const std::string& path, const Mount& mount) {
  const std::string prefix = mount.root == "/" ? "" : mount.root;
  if (path.compare(0, prefix.size(), prefix) != 0 || path.find("/..") != std::string::npos) return "";
  const std::string rest = path.substr(prefix.size());
  return rest.size() > 1 && rest[0] == '/' ? rest : "";
}

void AddFolders(const std::string& path, const Mount& mount, std::vector<std::string>* folders) {
  std::string rest = BelowMount(path, mount);
  for (; !rest.empty(); rest.resize(rest.rfind('/'))) folders->push_back(mount.point + rest);
  folders->push_back(mount.point);
}

uint32_t CgroupQuota(const std::string& root) {
  uint32_t tightest = 0;
  const std::string self = root + "/proc/self/";
  for (const std::string& folder : CpuCgroupFolders(ReadText(self + "cgroup"), ReadText(self + "mountinfo"))) {
    const std::string path = root + folder;
    for (const uint32_t limit : {ParseCpuMax(ReadText(path + "/cpu.max")),
                                 ParseCfsQuota(ReadText(path + "/cpu.cfs_quota_us"),
                                               ReadText(path + "/cpu.cfs_period_us"))}) {
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

std::vector<std::string> CpuCgroupFolders(const std::string& cgroup, const std::string& mountinfo) {
  // v1: "4:cpu,cpuacct:/path", v2: "0::/path".
  std::string v1_path, v2_path;
  for (const std::string& line : Split(cgroup, '\n')) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) v2_path = line.substr(second + 1);
    if (Contains(controllers, "cpu")) v1_path = line.substr(second + 1);
  }
  std::vector<std::string> folders;
  for (const std::string& line : Split(mountinfo, '\n')) {
    // id parent major:minor root point options [optional fields] - type source super-options
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const std::vector<std::string> left = Split(line.substr(0, dash), ' '), right = Split(line.substr(dash + 3), ' ');
    if (left.size() < 5 || right.size() < 3) continue;
    const Mount mount{Unescape(left[3]), Unescape(left[4])};
    if (right[0] == "cgroup2" && !v2_path.empty()) AddFolders(v2_path, mount, &folders);
    if (right[0] == "cgroup" && Contains(right[2], "cpu") && !v1_path.empty()) AddFolders(v1_path, mount, &folders);
  }
  return folders;
}

CpuPlan PlanCpus(const std::vector<int>& allowed, const std::string& root) {
  CpuPlan plan;
  try {
    const std::vector<int> ranks = SiblingRanks(allowed, root);
    const int rounds = ranks.empty() ? 0 : *std::max_element(ranks.begin(), ranks.end()) + 1;
    for (int rank = 0; rank < rounds; ++rank) {
      for (std::size_t i = 0; i < allowed.size(); ++i) {
        if (ranks[i] == rank) plan.cpus.push_back(allowed[i]);
      }
      if (rank == 0) plan.num_cores = static_cast<uint32_t>(plan.cpus.size());
    }
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
