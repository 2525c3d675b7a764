// Lists of words that OpenCL gives as text.
#pragma once
#include <string>

namespace llmc {

// Whether `word` is one of the words, which blanks separate.
inline bool Lists(const std::string& words, const std::string& word) {
  return (" " + words + " ").find(" " + word + " ") != std::string::npos;
}

}  // namespace llmc
