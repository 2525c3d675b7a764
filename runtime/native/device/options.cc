#include "device/options.h"

#include <algorithm>
#include <charconv>

namespace llmc {

const std::string* OptionReader::Find(const char* name) {
  known_.push_back(name);
  const std::string* found = nullptr;
  for (const auto& [key, value] : options_) {
    if (key == name) found = &value;  // the last one counts
  }
  return found;
}

void OptionReader::Refuse(const char* name, const std::string& value, const std::string& wanted) {
  if (!wrong_.ok()) return;
  wrong_ = Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::string("The option ") + name + " of a device of kind '" +
                                                        kind_ + "' is '" + value + "'; use " + wanted + ".");
}

void OptionReader::Number(const char* name, uint32_t most, uint32_t* out) {
  const std::string* value = Find(name);
  if (value == nullptr) return;
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (error != std::errc() || end != value->data() + value->size() || number > most) {
    return Refuse(name, *value, "a whole number from 0 to " + std::to_string(most));
  }
  *out = number;
}

void OptionReader::Flag(const char* name, bool* out) {
  uint32_t chosen = *out ? 1 : 0;
  Choice(name, {"0", "1"}, &chosen);
  *out = chosen == 1;
}

void OptionReader::Text(const char* name, std::string* out) {
  if (const std::string* value = Find(name)) *out = *value;
}

void OptionReader::Choice(const char* name, const std::vector<const char*>& choices, uint32_t* out) {
  const std::string* value = Find(name);
  if (value == nullptr) return;
  const auto found = std::find_if(choices.begin(), choices.end(), [&](const char* choice) { return *value == choice; });
  if (found != choices.end()) {
    *out = static_cast<uint32_t>(found - choices.begin());
    return;
  }
  std::string wanted;
  for (const char* choice : choices)
    wanted += (wanted.empty() ? "" : choice == choices.back() ? " or " : ", ") + std::string(choice);
  Refuse(name, *value, wanted);
}

Status OptionReader::Finish() const {
  for (const auto& option : options_) {
    const bool known =
        std::any_of(known_.begin(), known_.end(), [&](const char* name) { return option.first == name; });
    if (known) continue;
    std::string names;
    for (const char* name : known_) names += (names.empty() ? "" : ", ") + std::string(name);
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::string("A device of kind '") + kind_ + "' has no option '" +
                                                        option.first + "'; it knows " + names + ".");
  }
  return wrong_;
}

}  // namespace llmc
