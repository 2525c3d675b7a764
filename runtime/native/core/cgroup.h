// The control groups whose limits hold for this process, v1 and v2, and the short files of /proc and /sys that tell them.
#pragma once
#include <string>
#include <vector>

namespace llmc {

// Empty when the file does not exist or cannot be read.
std::string ReadText(const std::string& path);

// Directories that may hold this process's limits, with the files of /proc/self read below `root`: of each mounted
// hierarchy with that controller ("cpu", "memory") its cgroup and all parents up to the mount point, as absolute paths.
std::vector<std::string> CgroupFolders(const std::string& controller, const std::string& root);
// The same from the contents of /proc/self/cgroup and /proc/self/mountinfo.
std::vector<std::string> CgroupFolders(const std::string& controller, const std::string& cgroup,
                                       const std::string& mountinfo);

}  // namespace llmc
