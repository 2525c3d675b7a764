// ClBinaryCache: programs as a driver has built them, by device, driver and source, in files of their own.
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
  // folder: made when something is written; empty: nothing is kept.
  explicit ClBinaryCache(std::string folder) : folder_(std::move(folder)) {}

  // What was written under `key`; empty where that is nothing, or damaged: then it is built and written again.
  std::vector<unsigned char> Read(const std::string& key) const;
  // In one rename, so that no reader sees a part. A cache that cannot be written is none: the next start builds again.
  void Write(const std::string& key, const std::vector<unsigned char>& binary) const;

 private:
  std::string PathOf(const std::string& key) const;

  std::string folder_;
};

}  // namespace llmc
