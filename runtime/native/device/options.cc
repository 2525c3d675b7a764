#include "device/options.h"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace llmc {
namespace {

// Whether `text` is a number of at most `most`. Else *out stays as it was.
bool ReadNumber(std::string_view text, uint32_t most, uint32_t* out) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number > most) return false;
  *out = number;
  return true;
}

}  // namespace

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
  if (value == nullptr || ReadNumber(*value, most, out)) return;
  Refuse(name, *value, "a whole number from 0 to " + std::to_string(most));
}

void OptionReader::Numbers(const char* name, uint32_t most, std::vector<uint32_t>* out) {
  const std::string* value = Find(name);
  if (value == nullptr) return;
  std::vector<uint32_t> numbers;
  const std::string_view text = *value;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    numbers.push_back(0);
    if (!ReadNumber(text.substr(at, end - at), most, &numbers.back())) {
      return Refuse(name, *value, "whole numbers from 0 to " + std::to_string(most) + ", with commas between them");
    }
    at = end + 1;
  }
  *out = std::move(numbers);
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
