// MadeHere: notices that a fork of the process that made an object uses it.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <string>

#include "core/status.h"

namespace llmc {

// A fork has the object's memory, but none of its threads, and locks that these held stay locked. So it would wait for
// ever.
class MadeHere {
 public:
  bool here() const { return ::getpid() == pid_; }
  // `what` is the object, as in "engine".
  Status Check(const char* what) const {
    if (here()) return Status::Ok();
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "Process " + std::to_string(pid_) + " made the " + what +
                                                        ", and its fork " + std::to_string(::getpid()) +
                                                        " has none of the threads; make the " + what +
                                                        " in the process that uses it.");
  }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace llmc
