// CallWithin: for a call that may never return, such as one of a driver that is stuck.
#pragma once
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

namespace llmc {

// What call() returns within that time; else nothing, and the call goes on in a thread of its own, with what it has
// captured. If no thread can be had, the caller's own one waits for as long as it takes.
template <class Call, class Result = std::invoke_result_t<Call&>>
std::optional<Result> CallWithin(std::chrono::nanoseconds most, Call call) {
  const auto task = std::make_shared<std::packaged_task<Result()>>(std::move(call));
  std::future<Result> result = task->get_future();
  try {
    std::thread([task] { (*task)(); }).detach();
  } catch (const std::system_error&) {
    (*task)();
  }
  if (result.wait_for(most) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace llmc
