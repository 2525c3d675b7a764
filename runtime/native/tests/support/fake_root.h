// A root directory with the files of a machine that does not exist.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/check.h"

namespace llmc_test {

class FakeRoot {
 public:
  FakeRoot() {
    std::string pattern = (std::filesystem::temp_directory_path() / "llmc-root-XXXXXX").string();
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    root_ = pattern;
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  ~FakeRoot() { std::filesystem::remove_all(root_); }
  FakeRoot& Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
    return *this;
  }
  FakeRoot& Self(const std::string& cgroup, const std::string& mountinfo) {
    return Write("/proc/self/cgroup", cgroup).Write("/proc/self/mountinfo", mountinfo);
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

}  // namespace llmc_test
