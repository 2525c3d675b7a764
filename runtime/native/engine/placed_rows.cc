#include "engine/placed_rows.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "core/c_struct.h"

namespace llmc {
namespace {

// The array's element i, which may be of an older or newer caller.
Status Element(const llmc_request& c, uint64_t i, llmc_placed_rows* out) {
  const auto* first = reinterpret_cast<const char*>(c.placed);
  *out = {};
  LLMC_RETURN_IF_ERROR(CheckStruct(c.placed, "request->placed"));
  llmc_placed_rows one{};
  std::memcpy(&one, first + i * c.placed->struct_size, std::min<std::size_t>(c.placed->struct_size, sizeof(one)));
  *out = one;
  return Status::Ok();
}

// Positions on axes, which end before the model's longest text if the prompt does.
Status CheckAxes(const ModelShape& model, const llmc_placed_rows& one, const std::string& name) {
  if (one.positions == nullptr) return Status::Ok();
  if (model.rope_axes == 0) {
    return Status::Invalid(name + ".positions is given, but the model's tokens have one position; leave it NULL.");
  }
  if (one.advance < 1 || one.advance > one.num_rows) {
    return Status::Invalid(name + ".advance is " + std::to_string(one.advance) + "; use 1 to " +
                           std::to_string(one.num_rows) + ", its number of rows.");
  }
  for (uint64_t i = 0; i < uint64_t{one.num_rows} * kRopeAxes; ++i) {
    if (one.positions[i] >= 0 && static_cast<uint32_t>(one.positions[i]) < one.advance) continue;
    return Status::Invalid(name + ".positions[" + std::to_string(i) + "] is " + std::to_string(one.positions[i]) +
                           "; use 0 to " + std::to_string(one.advance - 1) + ", below its advance.");
  }
  return Status::Ok();
}

}  // namespace

Status PlacedRows::Read(const ModelShape& model, const llmc_request& c, PlacedRows* out) {
  *out = {};
  if (c.num_placed == 0) return Status::Ok();
  if (!model.places_rows) {
    return Status::Invalid(
        "The request has placed rows, but the artifact takes none; compile the model with --images, or leave them out.");
  }
  out->width_ = static_cast<uint32_t>(model.states_width);
  const uint64_t last = c.num_prompt_tokens - c.num_output_tokens - 1;
  uint64_t end = 0;
  int64_t shift = 0;
  for (uint64_t i = 0; i < c.num_placed; ++i) {
    llmc_placed_rows one{};
    LLMC_RETURN_IF_ERROR(Element(c, i, &one));
    const std::string name = "placed[" + std::to_string(i) + "]";
    if (one.num_rows == 0) return Status::Invalid(name + " has no rows; leave it out.");
    if (one.rows == nullptr) return NullArgument((name + ".rows").c_str());
    if (one.first < end || one.first > last || one.num_rows > last - one.first) {
      return Status::Invalid(name + " takes the place of tokens " + std::to_string(one.first) + " to " +
                             std::to_string(one.first + one.num_rows - 1) +
                             "; rows must be ascending and apart, and end before the prompt's last token, " +
                             std::to_string(last) + ".");
    }
    LLMC_RETURN_IF_ERROR(CheckAxes(model, one, name));
    end = one.first + one.num_rows;
    Part part{};
    part.first = static_cast<uint32_t>(one.first);
    part.end = static_cast<uint32_t>(end);
    part.offset = out->rows_.size() / out->width_;
    part.on_axes = one.positions != nullptr;
    part.shift = part.on_axes ? shift + one.advance - one.num_rows : shift;
    shift = part.shift;
    std::copy(std::begin(one.identity), std::end(one.identity), part.identity.begin());
    out->parts_.push_back(part);
    out->rows_.insert(out->rows_.end(), one.rows, one.rows + one.num_rows * out->width_);
    if (model.rope_axes == 0) continue;
    out->axes_.resize((part.offset + one.num_rows) * kRopeAxes);
    if (part.on_axes) std::copy_n(one.positions, one.num_rows * kRopeAxes, &out->axes_[part.offset * kRopeAxes]);
  }
  return Status::Ok();
}

const PlacedRows::Part* PlacedRows::Before(uint32_t position) const {
  const auto behind = std::upper_bound(parts_.begin(), parts_.end(), position,
                                       [](uint32_t at, const Part& part) { return at < part.first; });
  return behind == parts_.begin() ? nullptr : &*(behind - 1);
}

const float* PlacedRows::row(uint32_t position) const {
  const Part* part = Before(position);
  return part != nullptr && position < part->end ? rows_.data() + row_of(*part, position) * width_ : nullptr;
}

void PlacedRows::AddRopePositions(uint32_t position, std::vector<int32_t>* out) const {
  const Part* part = Before(position);
  if (part == nullptr || position >= part->end || !part->on_axes) {
    const int64_t shift = part == nullptr ? 0 : part->shift;
    out->insert(out->end(), kRopeAxes, static_cast<int32_t>(position + shift));
    return;
  }
  const int64_t before = part == parts_.data() ? 0 : (part - 1)->shift;
  const int32_t* axes = &axes_[row_of(*part, position) * kRopeAxes];
  for (uint32_t axis = 0; axis < kRopeAxes; ++axis) {
    out->push_back(static_cast<int32_t>(part->first + before + axes[axis]));
  }
}

void PlacedRows::PutNames(uint32_t count, int32_t* tokens) const {
  for (const Part& part : parts_) {
    for (uint32_t i = part.first; i < std::min(part.end, count); ++i) tokens[i] = part.name;
  }
}

int32_t RowNames::Of(const PlacedRows::Identity& identity) {
  const auto found = names_.find(identity);
  if (found != names_.end()) return found->second;
  if (last_ == INT32_MIN) return 0;
  if (names_.size() >= kMost) names_.clear();
  names_.emplace(identity, last_ - 1);
  return --last_;
}

}  // namespace llmc
