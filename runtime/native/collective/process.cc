#include "collective/process.h"

#include <cstdlib>
#include <string>

#include "core/cgroup.h"

namespace llmc {

uint64_t StartOfProcess(int32_t pid) {
  constexpr int kStartField = 22, kStateField = 3;  // numbered as in proc(5)
  const std::string stat = ReadText("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t name_end = stat.rfind(')');  // a name may contain spaces and parentheses
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return 0;
  std::size_t at = name_end + 2;
  if (stat[at] == 'Z' || stat[at] == 'X') return 0;
  for (int field = kStateField; field < kStartField; ++field) {
    at = stat.find(' ', at);
    if (at == std::string::npos) return 0;
    ++at;
  }
  return std::strtoull(stat.c_str() + at, nullptr, 10);
}

}  // namespace llmc
