// Streams and events.
#include "streams.h"

#include <chrono>
#include <thread>

namespace stub_cuda {

Stream* StreamOf(uint64_t number) {
  for (const auto& [handle, kind] : world().alive) {
    if (kind == "stream" && static_cast<Stream*>(handle)->number == number) return static_cast<Stream*>(handle);
  }
  return nullptr;
}

bool Proceed(Stream* s, uint64_t end) {
  while (!s->waiting.empty() && s->done < end) {
    if (s->runs) return Wrong("streams wait for each other"), true;
    s->runs = true;
    const Operation& next = s->waiting.front();
    const bool ended = next.work(next.how);
    s->runs = false;
    if (!ended) return false;
    const bool replayed = !std::strcmp(next.how, "replayed");
    s->waiting.pop_front();
    ++s->done;
    GoAhead(replayed);
  }
  return true;
}

void Drain(Stream* s, uint64_t end) {
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!Proceed(s, end)) {
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() < late) continue;
    Wrong("a stream is waited for whose work waits for another process");
    s->waiting.clear();
    s->done = s->added;
  }
}

// Whether a stream's first operation has all it waits for.
static bool IsReady(const Stream& s) {
  const std::optional<Event>& event = s.waiting.front().awaits;
  const Stream* other = event ? StreamOf(event->stream) : nullptr;
  return !other || other->done >= event->end;
}

void GoAhead(bool replays) {
  static bool goes = false;
  const long long order = Fact("ahead", 0);
  if (goes || !order || (order == 2 && !replays)) return;
  goes = true;
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& [handle, kind] : world().alive) {
      auto* s = static_cast<Stream*>(handle);
      if (kind != "stream" || s->computes || s->runs || s->waiting.empty() || !IsReady(*s)) continue;
      moved = Proceed(s, s->done + 1) || moved;
    }
    moved = moved && order == 1;
  }
  goes = false;
}

int AddWaiting(Stream* s, std::vector<const void*> uses, std::function<bool(const char*)> work, bool kernel) {
  Operation one{std::move(work), std::move(uses)};
  one.kernel = kernel;
  if (s->captured.graph) {
    auto& nodes = s->captured.graph->nodes;
    one.behind = s->captured.last;
    one.beside = s->captured.beside;
    s->captured.last = {nodes.size()};
    nodes.push_back(std::make_unique<Operation>(std::move(one)));
    return kOk;
  }
  s->computes = s->computes || kernel;
  s->waiting.push_back(std::move(one));
  ++s->added;
  GoAhead(false);
  return kOk;
}

bool Used(const void* at, size_t bytes) {
  const auto* begin = static_cast<const char*>(at);
  for (const auto& [handle, kind] : world().alive) {
    if (kind != "stream") continue;
    for (const Operation& one : static_cast<Stream*>(handle)->waiting) {
      for (const void* used : one.uses) {
        if (used >= begin && used < begin + bytes) return true;
      }
    }
  }
  return false;
}

}  // namespace stub_cuda

using namespace stub_cuda;

API cuStreamCreate(void** out, unsigned flags) {
  BEGIN("StreamCreate", true)
  if (flags != 1) return Wrong("a stream that waits for stream 0");
  static uint64_t number = 0;
  auto* made = Make<Stream>("stream");
  made->number = ++number;
  *out = made;
  return kOk;
}
API cuStreamSynchronize(void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "cuStreamSynchronize");
  if (s && s->captured.graph) Wrong("cuStreamSynchronize of a stream that is captured");
  if (s) Drain(s);
  if (const int code = Begin("StreamSynchronize", true)) return code;
  return s ? int{kOk} : int{kInvalidHandle};
}
API cuStreamQuery(void* stream) {
  BEGIN("StreamQuery", true)
  auto* s = Alive<Stream>(stream, "stream", "cuStreamQuery");
  if (!s) return kInvalidHandle;
  if (s->captured.graph) return Wrong("cuStreamQuery of a stream that is captured");
  return Proceed(s) ? int{kOk} : int{kNotReady};
}
API cuStreamDestroy_v2(void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* s = Alive<Stream>(stream, "stream", "cuStreamDestroy");
  if (s && !s->waiting.empty()) Wrong("a stream is destroyed while it has work");
  return End<Stream>(stream, "stream", "cuStreamDestroy");
}
API cuEventCreate(void** out, unsigned flags) {
  BEGIN("EventCreate", true)
  if (flags != 2) return Wrong("an event that measures time nobody asks for");
  *out = Make<Event>("event");
  return kOk;
}
API cuEventRecord(void* event, void* stream) {
  BEGIN("EventRecord", true)
  auto* e = Alive<Event>(event, "event", "cuEventRecord");
  auto* s = Alive<Stream>(stream, "stream", "cuEventRecord");
  if (!e || !s) return kInvalidHandle;
  *e = {s->number, s->added, s->captured.number, s->captured.last};
  return kOk;
}
// A stream that waits for an event of a capture is captured, too.
API cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  BEGIN("StreamWaitEvent", true)
  auto* s = Alive<Stream>(stream, "stream", "cuStreamWaitEvent");
  auto* e = Alive<Event>(event, "event", "cuStreamWaitEvent");
  if (!s || !e) return kInvalidHandle;
  if (flags) return Wrong("cuStreamWaitEvent with flags");
  if (!e->stream) return Wrong("a stream waits for an event that was never recorded");
  if (e->capture) {
    const Stream* of = StreamOf(e->stream);
    if (!of || of->captured.number != e->capture) return Wrong("a stream waits for an event of a capture that ended");
    if (s->captured.graph && s->captured.number != e->capture) return Wrong("a wait between two captures");
    if (!s->captured.graph && !s->waiting.empty()) return Wrong("a stream that has work is captured by a wait");
    if (!s->captured.graph) s->captured = {of->captured.graph, e->capture, true};
    for (const size_t node : e->last) s->captured.last.push_back(node);
    return kOk;
  }
  if (s->captured.graph) return Wrong("a stream that is captured waits for one that is not");
  const Event of = *e;
  Operation wait{[of](const char*) {
    Stream* other = StreamOf(of.stream);
    return !other || Proceed(other, of.end);
  }};
  wait.awaits = of;
  s->waiting.push_back(std::move(wait));
  ++s->added;
  GoAhead(false);
  return kOk;
}
API cuEventSynchronize(void* event) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  auto* e = Alive<Event>(event, "event", "cuEventSynchronize");
  if (e && (!e->stream || e->capture)) Wrong("an event is waited for that was never recorded");
  Stream* s = e && !e->capture ? StreamOf(e->stream) : nullptr;
  if (s) Drain(s, e->end);
  if (const int code = Begin("EventSynchronize", true)) return code;
  return e ? int{kOk} : int{kInvalidHandle};
}
API cuEventQuery(void* event) {
  BEGIN("EventQuery", true)
  auto* e = Alive<Event>(event, "event", "cuEventQuery");
  if (!e) return kInvalidHandle;
  if (!e->stream || e->capture) return Wrong("an event is asked for that was never recorded");
  Stream* s = StreamOf(e->stream);
  return !s || Proceed(s, e->end) ? int{kOk} : int{kNotReady};
}
API cuEventDestroy_v2(void* event) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return End<Event>(event, "event", "cuEventDestroy");
}
