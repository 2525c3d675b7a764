#include "core/memory_limit.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "core/cgroup.h"

namespace llmc {
namespace {

// Number that `text` starts with, after blanks; none for "max".
std::optional<uint64_t> ParseBytes(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  uint64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) return std::nullopt;
  return value;
}

// Number of the line that starts with `name`.
std::optional<uint64_t> FindBytes(const std::string& text, const std::string& name) {
  const std::size_t at = text.compare(0, name.size(), name) == 0 ? 0 : text.find("\n" + name);
  if (at == std::string::npos) return std::nullopt;
  return ParseBytes(std::string_view(text).substr(at + name.size() + (at != 0)));
}

struct MemoryFiles {
  const char *limit, *used, *inactive, *active;  // the last two are lines of memory.stat
};
constexpr MemoryFiles kV2 = {"/memory.max", "/memory.current", "inactive_file ", "active_file "};
constexpr MemoryFiles kV1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file ",
                             "total_active_file "};

// Bytes left below the limit of a cgroup; none if it has no limit. Cached file pages count as free.
std::optional<uint64_t> LeftIn(const std::string& folder, const MemoryFiles& files) {
  const auto limit = ParseBytes(ReadText(folder + files.limit)), used = ParseBytes(ReadText(folder + files.used));
  if (!limit || !used) return std::nullopt;
  const std::string stat = ReadText(folder + "/memory.stat");
  const uint64_t cached = FindBytes(stat, files.inactive).value_or(0) + FindBytes(stat, files.active).value_or(0);
  const uint64_t kept = *used - std::min(*used, cached);
  return *limit - std::min(*limit, kept);
}

}  // namespace

uint64_t AvailableMemory(const std::string& root) {
  uint64_t available = FindBytes(ReadText(root + "/proc/meminfo"), "MemAvailable:").value_or(0) * 1024;
  for (const std::string& folder : CgroupFolders("memory", root)) {
    for (const MemoryFiles& files : {kV2, kV1}) {
      available = std::min(available, LeftIn(root + folder, files).value_or(available));
    }
  }
  return available;
}

}  // namespace llmc
