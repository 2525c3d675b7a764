// ClBinaryCache: files of programs as a driver has built them, by device, driver and source.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmc {

// FNV-1a, 64 bits.
uint64_t HashOf(const char* data, size_t bytes);

class ClBinaryCache {
 public:
  // folder: created at the first write; empty: nothing is cached.
  explicit ClBinaryCache(std::string folder) : folder_(std::move(folder)) {}

  // Whether anything is cached.
  bool kept() const { return !folder_.empty(); }
  // The binary under `key`; empty if there is none or it is damaged: then it is built and written again.
  std::vector<unsigned char> Read(const std::string& key) const;
  // Renames a finished file, so that no reader sees a part. Errors are ignored: the next start builds again.
  void Write(const std::string& key, const std::vector<unsigned char>& binary) const;

 private:
  std::string PathOf(const std::string& key) const;

  std::string folder_;
};

}  // namespace llmc
