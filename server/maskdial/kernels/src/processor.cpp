// The kernels of one instruction set, which the compiler's flags choose: AVX-512 VNNI (and the same with
// AMX for products), AVX-VNNI, AVX2, Arm's NEON with or without dot products, or none. All compute the same bits: integer sums are exact, and every operation on floats
// is the same one, in the same order.
#include "processor.h"

#include "block_products.h"
#include "cached_softmax.h"
#include "full_softmax.h"
#include "full_softmax_int16.h"
#include "low_rank.h"
#include "norms.h"
#include "products.h"
#include "quantization.h"
#include "recurrence.h"
#include "row_scores.h"
#include "softmax.h"
#include "stored_blocks.h"
#if defined(__AVX512VNNI__)
#include "block_tiles.h"
#include "tiles.h"
#endif

// The table's name differs between the files that are compiled from this one.
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

namespace {

constexpr Processor kProcessor = {
    .name = TEXT(ISA),
    .quantize = quantize,
    .quantize_by_peak = quantize_by_peak,
    .multiply = multiply<kPanel>,
    .quantize_blocks = quantize_blocks,
    .multiply_blocks = multiply_blocks,
    .reduce = reduce,
    .expand = expand,
    .rotate = rotate,
    .quantize_head = quantize_head,
    .cache_head = cache_head,
    .quantize_head_int16 = quantize_head_int16,
    .attend = attend,
    .attend_int8 = attend_int8,
    .attend_int16 = attend_int16,
    .attend_fully = attend_fully,
    .attend_fully_int16 = attend_fully_int16,
    .add_norm = add_norm,
    .add_rms_norm = add_rms_norm,
    .convolve = convolve,
    .attend_linearly = attend_linearly,
    .scan_channel = scan_channel,
    .summarize = summarize,
    .find_max = find_max,
    .exponentials = exponentials,
    .sum_above = sum_above,
    .find_at_least = find_at_least,
    .find_between = find_between,
    .find_stored_type = find_stored_type,
};

}  // namespace

extern const Processor JOIN(processor_, ISA);
const Processor JOIN(processor_, ISA) = kProcessor;

#if defined(__AVX512VNNI__)
extern const Processor processor_amx;
constinit const Processor processor_amx = [] {
  Processor processor = kProcessor;
  processor.name = "amx";
  processor.multiply = multiply_tiles;
  processor.multiply_blocks = multiply_blocks_by_tiles;
  return processor;
}();
#endif
