#include "collective/channel.h"

#include <algorithm>
#include <cstring>

namespace llmc {
namespace {

constexpr uint32_t kLines = kChannelBytes / kLineBytes;
constexpr uint32_t kLinesAtOnce = kLines / 4;  // per piece: others read its begin before its end is written
static_assert((kLines & (kLines - 1)) == 0, "counts of lines wrap at 2^32, and the ring with them");

// Calls piece(offset in the ring, offset in the message, bytes), twice if the message wraps at the end of the ring.
template <typename Piece>
void ForPieces(uint32_t line, uint64_t offset, uint64_t bytes, Piece piece) {
  const uint64_t at = uint64_t{line % kLines} * kLineBytes, first = std::min(bytes, kChannelBytes - at);
  piece(at, offset, first);
  if (bytes > first) piece(0, offset + first, bytes - first);
}

uint32_t LinesOf(uint64_t bytes) { return static_cast<uint32_t>((bytes + kLineBytes - 1) / kLineBytes); }

}  // namespace

Status Speaker::Say(const void* data, uint64_t bytes) {
  constexpr uint64_t kSpinNs = 50'000;
  if (room_->failed()) return room_->status();
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t now = std::min(bytes - done, uint64_t{kLinesAtOnce} * kLineBytes);
    const uint32_t end = lines_ + LinesOf(now);
    for (uint32_t r = 1; r < room_->num_ranks(); ++r) {
      if (!room_->Await(&room_->member(r).heard, end - kLines, kSpinNs)) return room_->status();
    }
    ForPieces(lines_, done, now, [&](uint64_t at, uint64_t from, uint64_t count) {
      std::memcpy(room_->channel() + at, static_cast<const char*>(data) + from, count);
    });
    lines_ = end;
    done += now;
    room_->said().Set(lines_);
  }
  return Status::Ok();
}

Status Listener::Hear(void* data, uint64_t bytes, uint64_t spin_ns) {
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t now = std::min(bytes - done, uint64_t{kLinesAtOnce} * kLineBytes);
    const uint32_t end = lines_ + LinesOf(now);
    if (!room_->Await(&room_->said(), end, spin_ns)) return room_->status();
    ForPieces(lines_, done, now, [&](uint64_t at, uint64_t from, uint64_t count) {
      std::memcpy(static_cast<char*>(data) + from, room_->channel() + at, count);
    });
    lines_ = end;
    done += now;
    room_->own().heard.Set(lines_);
  }
  return Status::Ok();
}

}  // namespace llmc
