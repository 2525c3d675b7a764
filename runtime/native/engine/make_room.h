// Allocates in advance for operations that must not fail halfway.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace llmc {

// Reserves room for `count` more elements, so that adding them does not allocate.
template <typename T>
void MakeRoom(std::vector<T>* of, std::size_t count) {
  const std::size_t wanted = of->size() + count;
  if (wanted > of->capacity()) of->reserve(std::max(wanted, 2 * of->capacity()));
}

}  // namespace llmc
