// What a test orders a stub library to do, in an environment variable: NAME=NUMBER, or NAME@CALL=NUMBER from that call
// on, with spaces between.
#pragma once
#include <cstdlib>
#include <cstring>
#include <string>

// The number behind NAME=, into *value; *from: behind NAME@. False: the variable does not have the name.
inline bool Ordered(const char* variable, const std::string& name, long long* value, long long* from) {
  const char* text = std::getenv(variable);
  for (const char* at = text; at && *at; at = std::strchr(at, ' ') ? std::strchr(at, ' ') + 1 : nullptr) {
    if (std::strncmp(at, name.c_str(), name.size()) != 0) continue;
    const char* rest = at + name.size();
    long long call = 1;
    if (*rest == '@') call = std::strtoll(rest + 1, const_cast<char**>(&rest), 10);
    if (*rest != '=') continue;
    *value = std::atoll(rest + 1);
    if (from) *from = call;
    return true;
  }
  return false;
}
