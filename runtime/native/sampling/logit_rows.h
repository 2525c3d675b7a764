// Passes over a row of logits with the widest vectors of this machine. Every width gives the same bits.
#pragma once
#include <cstdint>

namespace llmc {

struct RowScan {
  float max = 0;           // -inf if no logit is higher; meaningless if the row has a NaN
  bool finite = true;      // every logit of the row is
  uint32_t max_begin = 0;  // the first maximum lies in [max_begin, max_end), the first block that has one
  uint32_t max_end = 0;
};
// Finds finiteness and maximum in one pass.
RowScan ScanRow(const float* row, uint32_t n);
// out[i] = exp((row[i] − max) · scale), by ExpNegative.
void ExpRow(const float* row, uint32_t n, float max, float scale, float* out);
// Sum of eight interleaved partial sums, added in order.
double SumRow(const float* row, uint32_t n);
// Sum of a row by spans of kSumSpan floats, added in order. Devices that sample add in this order, too.
constexpr uint32_t kSumSpan = 512;
double SumSpans(const float* row, uint32_t n);
// exp(x) for x ≤ 0 by a fixed polynomial: the same bits on every machine. 0 below -87.
float ExpNegative(float x);

}  // namespace llmc
