// Reads and checks the options that a caller gives a device as text.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace llmc {

using DeviceOptions = std::vector<std::pair<std::string, std::string>>;

// Reads the options of a device one by one. Each call declares an option. Finish refuses undeclared ones and reports
// the first wrong value.
class OptionReader {
 public:
  OptionReader(const char* kind, const DeviceOptions& options) : kind_(kind), options_(options) {}

  // Each leaves *out unchanged if the option was not given.
  void Number(const char* name, uint32_t most, uint32_t* out);
  void Flag(const char* name, bool* out);  // 0 or 1
  // Whole numbers between commas.
  void Numbers(const char* name, uint32_t most, std::vector<uint32_t>* out);
  void Text(const char* name, std::string* out);
  // Stores the index of the value among `choices`.
  void Choice(const char* name, const std::vector<const char*>& choices, uint32_t* out);
  Status Finish() const;

 private:
  const std::string* Find(const char* name);
  void Refuse(const char* name, const std::string& value, const std::string& wanted);

  const char* kind_;
  const DeviceOptions& options_;
  std::vector<const char*> known_;
  Status wrong_;
};

}  // namespace llmc
