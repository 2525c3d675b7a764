// Control groups, v1 and v2, whose limits apply to this process, and reading of short files in /proc and /sys.
#pragma once
#include <string>
#include <vector>

namespace llmc {

// Empty when the file does not exist or cannot be read.
std::string ReadText(const std::string& path);

// Directories that may hold this process's limits; files of /proc/self are read below `root`. For each mounted
// hierarchy with that controller ("cpu", "memory"): its cgroup and all parents up to the mount point, as absolute
// paths.
std::vector<std::string> CgroupFolders(const std::string& controller, const std::string& root);
// The same from the contents of /proc/self/cgroup and /proc/self/mountinfo.
std::vector<std::string> CgroupFolders(const std::string& controller, const std::string& cgroup,
                                       const std::string& mountinfo);

}  // namespace llmc
