// Passes over a row of logits, with the widest vectors of this machine. Every width gives the same bits.
#pragma once
#include <cstdint>

namespace llmc {

struct RowScan {
  float max = 0;           // -inf where nothing is higher; without meaning where there is a NaN
  bool finite = true;      // all of the row
  uint32_t max_begin = 0;  // the first element equal to max lies at or behind this, in the first block that has one
  uint32_t max_end = 0;
};
// Finiteness and maximum in one pass.
RowScan ScanRow(const float* row, uint32_t n);
// out[i] = exp((row[i] − max) · scale) as ExpNegative has it.
void ExpRow(const float* row, uint32_t n, float max, float scale, float* out);
// Sum of eight interleaved chains, added in order.
double SumRow(const float* row, uint32_t n);
// Of a whole row: the sums of spans, added in order. Devices that sample add up in this order, too.
constexpr uint32_t kSumSpan = 512;
double SumSpans(const float* row, uint32_t n);
// exp(x) for x ≤ 0 by a fixed polynomial: the same bits on every machine. 0 below -87.
float ExpNegative(float x);

}  // namespace llmc
