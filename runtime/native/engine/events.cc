#include "engine/events.h"

#include <algorithm>
#include <cstring>

#include "core/clock.h"
#include "engine/request.h"

namespace llmc {

llmc_event MakeEvent(const Sequence& s, uint32_t output_index, uint32_t kind) {
  llmc_event event;
  std::memset(&event, 0, sizeof(event));
  event.kind = kind;
  event.request_id = s.request->id;
  event.output_index = output_index;
  event.token_id = -1;
  event.num_prompt_tokens = s.num_prompt;
  event.num_cached_tokens = std::min(s.num_cached, s.num_prompt);  // a resumed request's output may be cached, too
  event.num_output_tokens = static_cast<uint32_t>(s.tokens.size()) - s.num_prompt;
  event.time_ns = MonotonicNs();
  if (kind == LLMC_EVENT_FINISHED || kind == LLMC_EVENT_FAILED) {
    event.arrival_ns = s.request->arrival_ns;
    event.first_scheduled_ns = s.request->first_scheduled_ns;
    event.first_token_ns = s.request->first_token_ns;
  }
  return event;
}

void SetSample(const SampleResult& sample, llmc_event* event) {
  event->token_id = sample.token;
  event->logprob = sample.logprob;
  event->rank = sample.rank;
  event->num_top = sample.num_top;
  std::copy_n(sample.top_token_ids, sample.num_top, event->top_token_ids);
  std::copy_n(sample.top_logprobs, sample.num_top, event->top_logprobs);
}

}  // namespace llmc
