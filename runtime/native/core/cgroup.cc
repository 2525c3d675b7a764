#include "core/cgroup.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
#include <sstream>

namespace llmc {
namespace {

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool Contains(const std::string& list, const std::string& name) {
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
  std::string root, point;  // mounted directory of the hierarchy, and mount point
};

// `path` relative to the mounted directory: empty or starting with '/'. A cgroup outside of it, as seen in a namespace,
// counts as the mounted directory itself.
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

}  // namespace

std::string ReadText(const std::string& path) {
  std::string text;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), std::fclose);
  if (!file) return text;
  char buffer[4096];
  std::size_t got = sizeof(buffer);
  while (got == sizeof(buffer)) {  // a short read is the end or an error
    got = std::fread(buffer, 1, sizeof(buffer), file.get());
    text.append(buffer, got);
  }
  return text;
}

std::vector<std::string> CgroupFolders(const std::string& controller, const std::string& cgroup,
                                       const std::string& mountinfo) {
  // v1: "4:cpu,cpuacct:/path", v2: "0::/path".
  std::string v1_path, v2_path;
  for (const std::string& line : Split(cgroup, '\n')) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) v2_path = line.substr(second + 1);
    if (Contains(controllers, controller)) v1_path = line.substr(second + 1);
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
    if (right[0] == "cgroup" && Contains(right[2], controller) && !v1_path.empty()) {
      AddFolders(v1_path, mount, &folders);
    }
  }
  return folders;
}

std::vector<std::string> CgroupFolders(const std::string& controller, const std::string& root) {
  const std::string self = root + "/proc/self/";
  return CgroupFolders(controller, ReadText(self + "cgroup"), ReadText(self + "mountinfo"));
}

}  // namespace llmc
