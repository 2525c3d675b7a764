// Structs that cross the C boundary: struct_size says how much of one the caller knows, which may be less or more than
// this library does. What the caller lacks keeps its default; what only the caller knows is zero.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/status.h"

namespace llmc {

inline Status NullArgument(const char* name) {
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::string(name) + " is NULL; pass a valid pointer.");
}

// Every struct has a field behind its struct_size.
template <class T>
Status CheckStruct(const T* value, const char* name) {
  if (value == nullptr) return NullArgument(name);
  if (value->struct_size >= 2 * sizeof(uint32_t)) return Status::Ok();
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "struct_size of " + std::string(name) + " is " +
                                                      std::to_string(value->struct_size) +
                                                      "; set it to the size of the struct.");
}

// Writes the caller's struct_size bytes and no more; padding as it is, which a copy by value need not keep.
template <class T>
void WriteStruct(const T& value, uint32_t struct_size, T* out) {
  static_assert(offsetof(T, struct_size) == 0);
  std::memcpy(static_cast<void*>(out), &value, std::min<size_t>(struct_size, sizeof(T)));
  std::memcpy(static_cast<void*>(out), &struct_size, std::min<size_t>(struct_size, sizeof(struct_size)));
}

// The _init functions: a struct_size too small to be one is left alone.
template <class T>
void InitStruct(const T& defaults, uint32_t struct_size, T* out) {
  if (out == nullptr || struct_size < 2 * sizeof(uint32_t)) return;
  std::memset(static_cast<void*>(out), 0, struct_size);
  WriteStruct(defaults, struct_size, out);
}

// *to holds the defaults.
template <class T>
Status ReadStruct(const T* from, const char* name, T* to) {
  LLMC_RETURN_IF_ERROR(CheckStruct(from, name));
  std::memcpy(static_cast<void*>(to), from, std::min<size_t>(from->struct_size, sizeof(T)));
  to->struct_size = sizeof(T);
  return Status::Ok();
}

// An array's elements have the size that the first one tells.
template <class Values, class T>
void WriteArray(const Values& values, uint64_t count, T* out) {
  const uint32_t stride = count != 0 ? out[0].struct_size : 0;
  for (uint64_t i = 0; i < count; ++i) {
    WriteStruct(values[i], stride, reinterpret_cast<T*>(reinterpret_cast<char*>(out) + i * stride));
  }
}

}  // namespace llmc
